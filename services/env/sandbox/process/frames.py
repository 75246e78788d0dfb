"""The service's end of a sandbox's channel: one request, one answer, each 4 bytes of length (big endian) and JSON.

The other end is a stranger's. A frame's length is judged before anything of it is kept, its depth and number of values
before any is made; NaN, infinities and broken UTF-8 are no JSON here; U+FFFD replaces halves of surrogate pairs.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, get_args

import orjson

from shared.bounds import check_json
from shared.errors import DecodeError, InputError, SandboxFailed, Why
from shared.text import without_halves

MAX_REQUEST = 2**25
"""Bytes: a source or a message of the greatest length, however it is escaped."""
MAX_VALUES = 2**15
MAX_DETAIL = 6000
_HEAD = struct.Struct(">I")
_TOLD: frozenset[str] = frozenset({"exception", "memory", "output", "refused"})
"""What a sandbox may say of its own failure; the rest is found out here."""


def encode(number: int, method: str, params: dict[str, Any]) -> bytes:
    """Raises InputError if `params` are no JSON, or too large."""
    try:
        body = orjson.dumps({"id": number, "method": method, "params": params})
    except TypeError as error:
        raise InputError(f"{method}: what is sent to a sandbox must be JSON: {error}") from error
    if len(body) > MAX_REQUEST:
        raise InputError(f"{method}: {len(body)} bytes are too many for a sandbox", f"send at most {MAX_REQUEST}")
    return _HEAD.pack(len(body)) + body


async def read_answer(reader: asyncio.StreamReader, number: int, most: int) -> Any:
    """The result of request `number`.

    Raises SandboxFailed (`alive` if the sandbox is as good as before), asyncio.IncompleteReadError when the other end
    is closed.
    """
    (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if length > most:
        raise SandboxFailed(f"an answer of {length} bytes was announced; at most {most} are taken", why="output")
    return _result(await reader.readexactly(length), number)


def _result(body: bytes, number: int) -> Any:
    try:
        check_json(body, "an answer", MAX_VALUES)
        answer = orjson.loads(without_halves(body))
    except (DecodeError, orjson.JSONDecodeError) as error:
        raise _broken(f"an answer is not readable: {str(error)[:200]}") from None
    match answer:
        case {"id": int(found), "result": result, **rest} if found == number and not rest and found is not True:
            return result
        case {"id": int(found), "error": {"why": str(why), "detail": str(detail)}} if found == number:
            raise SandboxFailed(_shown(detail[:MAX_DETAIL]), why=_told(why), alive=why in _TOLD)
        case _:
            raise _broken("what came is not the answer to the request")


def _told(why: str) -> Why:
    return next((known for known in get_args(Why.__value__) if known == why and known in _TOLD), "protocol")


def _shown(text: str) -> str:
    """Without what would steer a terminal or forge a line of a log."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _broken(what: str) -> SandboxFailed:
    return SandboxFailed(what, "the code has written to the sandbox's own channel", why="protocol")
