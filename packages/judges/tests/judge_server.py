"""A judge that prefers longer answers: python -m packages.judges.tests.judge_server PORT LOG. Marks are lengths, too.

Each question that it answers is a line of the log: its digest.
"""

import hashlib
import json
import re
from typing import Any

from tests.support.answering import Answering, serve

_ANSWER = re.compile(r"<(answer-\d+-\w{12})>\n(.*?)\n</\1>", re.DOTALL)
_CRITERION = re.compile(r"^- (\w+): ", re.MULTILINE)
_TURNS = re.compile(r"Mark each of the (\d+) turns")


def verdict(prompt: str) -> dict[str, Any]:
    """Answer a question as it wants to be answered."""
    answers = [text for _, text in _ANSWER.findall(prompt)]
    if "Rank the answers" in prompt:
        order = sorted(range(len(answers)), key=lambda n: (-len(answers[n]), answers[n]))
        return {"ranking": [n + 1 for n in order]}
    if "Decide which answer" in prompt:
        first, second = map(len, answers)
        return {"better": 0 if first == second else 1 if first > second else 2}
    marks = {name: len(answers[0]) % 11 for name in _CRITERION.findall(prompt)}
    turns = _TURNS.search(prompt)
    return (
        {"turns": [{k: (v + n) % 11 for k, v in marks.items()} for n in range(int(turns[1]))]}
        if turns
        else {"marks": marks}
    )


class Judge(Answering):
    def answer(self, raw: bytes) -> tuple[str, Any]:
        text = f"I have read it.\n{json.dumps(verdict(json.loads(raw)['messages'][-1]['content']))}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        made = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 100}}
        return hashlib.sha256(raw).hexdigest(), made


if __name__ == "__main__":
    serve(Judge)
