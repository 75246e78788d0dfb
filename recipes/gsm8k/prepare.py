"""GSM8K as rows of conversations: two solved problems as earlier turns, then the problem to solve.

python recipes/gsm8k/prepare.py FOLDER

FOLDER holds train.jsonl and test.jsonl, as https://github.com/openai/grade-school-math publishes them. The rows are
written beside this program, into data/.
"""

import json
import re
import sys
from pathlib import Path

REQUEST = "Solve the problem step by step, briefly. End with a line '#### NUMBER'.\n\n"
N_EXAMPLES = 2


def main() -> None:
    source, target = Path(sys.argv[1]), Path(__file__).with_name("data")
    problems = {split: _problems(source / f"{split}.jsonl") for split in ("train", "test")}
    shown = [turn for problem in problems["train"][:N_EXAMPLES] for turn in _turns(*problem)]
    target.mkdir(exist_ok=True)
    for split, skipped in (("train", N_EXAMPLES), ("test", 0)):
        rows = []
        for question, solution in problems[split][skipped:]:
            asked, _ = _turns(question, solution)
            answer = solution.rpartition("####")[2].strip().replace(",", "")
            rows.append(json.dumps({"messages": [*shown, asked], "answer": answer}) + "\n")
        (target / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")


def _problems(path: Path) -> list[tuple[str, str]]:
    """Questions and solutions, without the marks `<<48/2=24>>` for a calculator."""
    with path.open(encoding="utf-8") as lines:
        return [(row["question"], re.sub("<<.*?>>", "", row["answer"])) for row in map(json.loads, lines)]


def _turns(question: str, solution: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"role": "user", "content": REQUEST + question}, {"role": "assistant", "content": solution}


if __name__ == "__main__":
    main()
