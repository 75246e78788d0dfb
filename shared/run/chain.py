"""Hash chain of a run: two digests in a checkpoint, over all steps and dispositions before it.

`steps` covers the steps of the lineage: chain_s = blake3(chain_{s-1} ‖ the step's ledger lines in order ‖ its line of
metrics). `voids` covers the tickets that ended without training, whose lines have no order: the sum of their blake3
digests modulo 2^256 (Bellare and Micciancio, "A New Paradigm for Collision-free Hashing: Incrementality at Reduced
Cost", 1997).

Invariant: the trainer that extends a chain and the proof that recomputes it call the same functions, on values as read
back from JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import blake3
import orjson

from shared.errors import DecodeError

_DIGITS = 64
_BASE = 1 << 256
_ZERO = "0" * _DIGITS


@dataclass(frozen=True, slots=True)
class Chain:
    """`steps`, `voids`: digests in hex."""

    steps: str = _ZERO
    voids: str = _ZERO

    def trained(self, lines: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> Self:
        """Extend the chain by one step: its ledger lines in training order, and its line of metrics.jsonl."""
        link = blake3.blake3(bytes.fromhex(self.steps))
        for record in (*lines, metrics):
            link.update(_canonical(record))
        return replace(self, steps=link.hexdigest())

    def ended(self, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Add the ledger lines, in any order, of tickets that ended without training."""
        total = sum(
            (int.from_bytes(blake3.blake3(_canonical(line)).digest()) for line in lines), start=int(self.voids, 16)
        )
        return replace(self, voids=f"{total % _BASE:0{_DIGITS}x}")

    @classmethod
    def from_mapping(cls, raw: Any) -> Self:
        """Parse a chain. Raises DecodeError."""
        if not isinstance(raw, dict):
            raise DecodeError("the chain is not an object")
        return cls(_hex(raw.get("steps")), _hex(raw.get("voids")))


def as_read(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line as it is read back from its file, without numpy's numbers."""
    return orjson.loads(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY))


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Serialize with sorted keys, so that key order and blanks in the file do not matter."""
    return orjson.dumps(record, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def _hex(value: Any) -> str:
    if not isinstance(value, str) or len(value) != _DIGITS or set(value) - set("0123456789abcdef"):
        raise DecodeError(f"{str(value)[:_DIGITS]!r} in the chain is not a digest")
    return value
