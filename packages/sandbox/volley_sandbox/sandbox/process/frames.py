"""The service's end of a sandbox's channel: one request, one answer, each 4 bytes of length (big endian) and JSON.

The other end is untrusted. A frame's length is checked before any of it is stored, its depth and number of values
before any is parsed. NaN, infinities and broken UTF-8 are rejected; U+FFFD replaces lone surrogates.
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
"""Bytes: room for the longest source or message under any JSON escaping."""
MAX_VALUES = 2**15
MAX_DETAIL = 6000
_HEAD = struct.Struct(">I")
EMPTY = _HEAD.pack(0)
"""A frame that a sandbox drops; it ends the program that the sandbox waits for."""
_REPORTABLE: frozenset[str] = frozenset({"exception", "memory", "output", "refused"})
"""Failures that a sandbox may report itself; the service determines the others."""


def encode(number: int, method: str, params: dict[str, Any]) -> bytes:
    """Encode a request. Raises InputError if `params` are not JSON, or too large."""
    try:
        body = orjson.dumps({"id": number, "method": method, "params": params})
    except TypeError as error:
        raise InputError(f"{method}: the parameters for the sandbox are not JSON: {error}") from error
    if len(body) > MAX_REQUEST:
        raise InputError(f"{method}: the request has {len(body)} bytes", f"send at most {MAX_REQUEST}")
    return _HEAD.pack(len(body)) + body


async def read_answer(reader: asyncio.StreamReader, number: int, most: int) -> Any:
    """Read the result of request `number`.

    Raises SandboxFailed (`alive` if the sandbox remains usable), asyncio.IncompleteReadError if the other end is
    closed.
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
            raise SandboxFailed(_shown(detail[:MAX_DETAIL]), why=_valid_reason(why), alive=why in _REPORTABLE)
        case _:
            raise _broken("what came is not the answer to the request")


def _valid_reason(why: str) -> Why:
    return next((known for known in get_args(Why.__value__) if known == why and known in _REPORTABLE), "protocol")


def _shown(text: str) -> str:
    """Escape characters that could control a terminal or forge a log line."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _broken(what: str) -> SandboxFailed:
    return SandboxFailed(what, "the code has written to the sandbox's own channel", why="protocol")
