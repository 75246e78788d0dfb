"""A chunk as what differs from another one: which elements, and their bits XOR those of the other.

At the learning rates of RL a step moves few weights far enough to round to another bfloat16. Where elements differ, the
distances between them and the differing bits are kept as planes of bytes, of which most are 0, compressed by zstd. No
arithmetic is done, so a chunk comes out bit by bit, whatever its numbers are.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

_HEAD = struct.Struct("<BI")
_MOST = 8
"""Where more than one in so many elements differs, the chunk itself is as good."""
_WORDS = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_GAP = np.dtype("<u4")


def encode(base: bytes, data: bytes | memoryview, width: int) -> bytes | None:
    """What makes `data` of `base`, which is as long; None if that would save little.

    Args:
        width: bytes of an element, 2 or 4.
    """
    old, new = (np.frombuffer(part, _WORDS[width]) for part in (base, data))
    differs = old != new
    if np.count_nonzero(differs) * _MOST > len(new):  # cheap: no places are made of what differs everywhere
        return None
    at = np.flatnonzero(differs)
    gaps = np.diff(at, prepend=-1).astype(_GAP)
    planes = np.concatenate([_planes(gaps), _planes(old[at] ^ new[at])])
    return zstandard.ZstdCompressor(level=1).compress(_HEAD.pack(width, len(at)) + planes.tobytes())


def apply(base: bytearray | memoryview, delta: bytes) -> None:
    """Makes what `encode` was given of `base`, in place. Raises ValueError for bytes that it did not make of such a
    base, which then is as it was.
    """
    most = _HEAD.size + len(base) * (_GAP.itemsize + max(_WORDS)) // (_MOST * min(_WORDS)) + 1
    try:
        with zstandard.ZstdDecompressor().stream_reader(delta) as reader:
            plain = reader.read(most)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(plain) < _HEAD.size:
        raise ValueError("it has no head")
    width, n = _HEAD.unpack_from(plain)
    if width not in _WORDS or len(plain) != _HEAD.size + n * (_GAP.itemsize + width) or len(base) % width:
        raise ValueError("it is not as long as its head says")
    gaps = _words(plain, _HEAD.size, n, _GAP)
    bits = _words(plain, _HEAD.size + n * _GAP.itemsize, n, _WORDS[width])
    words, at = np.frombuffer(base, _WORDS[width]), np.cumsum(gaps, dtype=np.int64) - 1
    if n and (not gaps.all() or at[-1] >= len(words)):
        raise ValueError("it changes an element twice, or one that is not there")
    words[at] ^= bits


def _planes(words: np.ndarray) -> np.ndarray:
    """uint8: the lowest byte of each, then the next of each, …"""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.ravel()


def _words(plain: bytes, start: int, n: int, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(plain, np.uint8, n * dtype.itemsize, start).reshape(dtype.itemsize, n)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
