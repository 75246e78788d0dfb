"""A judge that speaks OpenAI's chat completions; its grade, 0 to 10, follows from the answer alone. Each question that
it answers is a line of the log: its digest.
"""

import hashlib
import json
import re
from typing import Any

from tests.support.answering import Answering, serve

_ANSWER = re.compile(r"<answer-(\w+)>\n(.*?)\n</answer-\1>", re.DOTALL)


class Judge(Answering):
    def answer(self, raw: bytes) -> tuple[str, Any]:
        found = _ANSWER.search(json.loads(raw)["messages"][-1]["content"])
        assert found is not None
        grade = sum(found[2].encode()) % 11
        message = {"role": "assistant", "content": f"I have read it.\nScore: {grade}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 100}}
        return hashlib.sha256(raw).hexdigest(), made


if __name__ == "__main__":
    serve(Judge)
