"""Server-sent events, and the interface of every dialect's stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from shared.errors import VolleyError
from volley_serving.dialects.records import Answered, Piece, Sampled, Usage

KEEP_ALIVE = b": waiting\n\n"
"""Comment that clients skip; it keeps a connection open while there is nothing to send."""


class AnswerStream(Protocol):
    """Encoder of a stream of answers. Every method returns the bytes to send, which may be none.

    The order of calls: `begin`, then `add` and at last `finish` for each answer, then `end`.
    """

    def begin(self, n_prompt: int = 0) -> bytes:
        """Encode the beginning. `n_prompt`: number of tokens of the prompt."""
        ...

    def add(self, i: int, pieces: Sequence[Piece], sampled: Sampled | None = None) -> bytes:
        """Encode pieces of answer i. `sampled`: its new tokens, for their log-probabilities."""
        ...

    def finish(self, i: int, answer: Answered) -> bytes:
        """Encode the end of answer i, all of whose pieces have been added."""
        ...

    def end(self, usage: Usage) -> bytes: ...

    def fail(self, error: VolleyError) -> bytes:
        """Encode an error in the middle of a stream, which ends it."""
        ...


def encode_finished(stream: AnswerStream, answers: Sequence[Answered], usage: Usage) -> bytes:
    """Encode finished answers as a whole stream."""
    parts = [stream.begin(usage.prompt)]
    for i, answer in enumerate(answers):
        parts += [stream.add(i, answer.pieces, answer.sampled), stream.finish(i, answer)]
    return b"".join([*parts, stream.end(usage)])


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Encode one event, with a name if it has one."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
