"""Bit map of a version's chunks on a server. Other servers pull these chunks from it, and only the rest from the
trainer.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from shared.errors import DecodeError


class Holding(NamedTuple):
    """bool[n] each, for the n chunks of a version in one order: `has` are here, `pending` are arriving."""

    has: np.ndarray
    pending: np.ndarray

    @classmethod
    def nothing(cls, n: int) -> Self:
        return cls(np.zeros(n, np.bool_), np.zeros(n, np.bool_))

    def in_order(self, order: np.ndarray) -> Holding:
        """Select the chunks with these numbers: int[m]."""
        return Holding(self.has[order], self.pending[order])

    def to_bytes(self) -> bytes:
        return np.packbits(np.stack(self), axis=1).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, n: int) -> Self:
        """Decode a holding. Raises DecodeError for bytes of another number of chunks."""
        if len(data) != size_of(n):
            raise DecodeError(f"the holding of {n} chunks has {size_of(n)} bytes, not {len(data)}")
        bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(2, -1), axis=1, count=n).astype(np.bool_)
        return cls(bits[0], bits[1])


def size_of(n: int) -> int:
    """Size in bytes of a holding of n chunks."""
    return 2 * -(-n // 8)
