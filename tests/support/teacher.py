"""A teacher that speaks SGLang's /generate; what it says of a token follows from its id alone (`told`). Each question
that it answers is a line of the log: how many tokens it was asked about.
"""

import json
from typing import Any

from shared.models.chat import ChatTokenizer
from tests.support.answering import Answering, serve
from tests.support.tokenizer import FOLDER

TOKENIZER = ChatTokenizer(FOLDER)


def told(token: int) -> float:
    """Its log-probability."""
    return -(token % 5 + 1) / 4


class Teacher(Answering):
    def answer(self, raw: bytes) -> tuple[str, Any]:
        asked = json.loads(raw)
        ids = asked["input_ids"][asked["logprob_start_len"] :]
        rows = [[told(token) if i else None, token, TOKENIZER.token(token)] for i, token in enumerate(ids)]
        return f"{len(ids)}", {"output_ids": [], "meta_info": {"input_token_logprobs": rows}}


if __name__ == "__main__":
    serve(Teacher)
