"""Bytes that are almost valid: mutations of real records, and bombs that promise more than they hold."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

TAGS = bytes([*range(0xC0, 0xE0), 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x00, 0x7F, 0xFF])
"""First bytes of msgpack values of every kind, 0xC1 (never used) among them."""

HUGE = tuple(struct.pack(">I", n) for n in (0xFFFFFFFF, 0x7FFFFFFF, 0x01000000, 0x00010000))


def mutations(corpus: Sequence[bytes], n: int, seed: int) -> Iterator[bytes]:
    """`n` bodies, each a member of the corpus with one to three mutations. The same seed gives the same bodies."""
    dice = random.Random(seed)
    for _ in range(n):
        body = bytearray(dice.choice(corpus))
        for _ in range(dice.randint(1, 3)):
            dice.choice(_MUTATORS)(body, dice, corpus)
        yield bytes(body)


def _place(body: bytearray, dice: random.Random) -> int:
    """Half of the time among the first bytes, where the structure is."""
    return dice.randrange(min(len(body), 64) if dice.random() < 0.5 else len(body)) if body else 0


def _flip(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    if body:
        body[_place(body, dice)] ^= 1 << dice.randrange(8)


def _tag(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    if body:
        body[_place(body, dice)] = dice.choice(TAGS)


def _length(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = _place(body, dice)
    body[at : at + 5] = bytes([dice.choice(b"\xc6\xc9\xdb\xdd\xdf")]) + dice.choice(HUGE)


def _cut(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = _place(body, dice)
    del body[at : at + dice.choice((1, 2, 5, 17, len(body)))]


def _insert(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = _place(body, dice)
    body[at:at] = dice.randbytes(dice.choice((1, 2, 5, 17)))


def _repeat(body: bytearray, dice: random.Random, _: Sequence[bytes]) -> None:
    at = _place(body, dice)
    body[at:at] = body[at : at + dice.choice((1, 3, 9, 40))] * dice.choice((1, 2, 20))


def _splice(body: bytearray, dice: random.Random, corpus: Sequence[bytes]) -> None:
    other = dice.choice(corpus)
    body[_place(body, dice) :] = other[dice.randrange(len(other) + 1) :]


_MUTATORS = (_flip, _tag, _length, _cut, _insert, _repeat, _splice)


def bombs() -> dict[str, bytes]:
    """Small bodies made to cost much: by name."""
    n = 2**20
    header = b"\xdd" + struct.pack(">I", n)
    return {
        "array of 2^32": b"\xdd\xff\xff\xff\xff",
        "map of 2^32": b"\xdf\xff\xff\xff\xff",
        "binary of 2^32": b"\xc6\xff\xff\xff\xff" + b"x" * 100,
        "text of 2^32": b"\xdb\xff\xff\xff\xff" + b"x" * 100,
        "extension of 2^32": b"\xc9\xff\xff\xff\xff\x01" + b"x" * 100,
        "arrays a million deep": b"\x91" * n + b"\x00",
        "maps a million deep": b"\x81\xa1a" * n + b"\x00",
        "500 arrays that promise a million each": header * 500 + b"\x00" * n,
        "500 maps that promise a million each": (b"\xdf" + struct.pack(">I", n) + b"\xa1a") * 500 + b"\x00" * n,
        "a map with a list for a key": b"\x81\x91\x01\x01",
        "a map with an array for a key": b"\x81\xc7\x04\x01\x00\x00\x00\x00\x01",
        "a map with NaN for a key": b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
        "text that is no UTF-8": b"\xa2\xff\xfe",
        "a surrogate": b"\xa3\xed\xa0\x80",
        "an extension that is no array": b"\xd6\x63\x00\x00\x00\x00",
        "a time stamp": b"\xd6\xff\x00\x00\x00\x00",
        "an array of five bytes of int32": b"\xc7\x05\x01\x00\x00\x00\x00\x00",
        "a byte that begins nothing": b"\xc1",
        "nothing": b"",
        "two values": b"\x01\x02",
    }
