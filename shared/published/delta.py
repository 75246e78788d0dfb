"""Encode a chunk as its difference from another: positions of the differing elements, and their XORed bits.

At the learning rates of RL, a step moves few weights far enough to round to another bfloat16. The distances between
differing elements and their differing bits are stored as planes of bytes, mostly 0, compressed by zstd. No arithmetic
is done, so a chunk is reproduced bit by bit for any numbers.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

_HEAD = struct.Struct("<BI")
_MOST = 8
"""If more than one in this many elements differs, the whole chunk is no larger."""
_WORDS = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_GAP = np.dtype("<u4")


def encode(base: bytes, data: bytes | memoryview, width: int) -> bytes | None:
    """Encode `data` relative to `base`, which has the same length; None if that would not save enough.

    Args:
        width: bytes of an element, 2 or 4.
    """
    old, new = (np.frombuffer(part, _WORDS[width]) for part in (base, data))
    differs = old != new
    if np.count_nonzero(differs) * _MOST > len(new):  # cheap check before the positions are computed
        return None
    at = np.flatnonzero(differs)
    gaps = np.diff(at, prepend=-1).astype(_GAP)
    planes = np.concatenate([_planes(gaps), _planes(old[at] ^ new[at])])
    return zstandard.ZstdCompressor(level=1).compress(_HEAD.pack(width, len(at)) + planes.tobytes())


def apply(base: bytearray | memoryview, delta: bytes) -> None:
    """Turn `base` in place into the data that `encode` was given.

    Raises ValueError for bytes that `encode` did not make for such a base, which then is unchanged.
    """
    most = _HEAD.size + len(base) * (_GAP.itemsize + max(_WORDS)) // (_MOST * min(_WORDS)) + 1
    try:
        with zstandard.ZstdDecompressor().stream_reader(delta) as reader:
            plain = reader.read(most)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(plain) < _HEAD.size:
        raise ValueError("the delta has no header")
    width, n = _HEAD.unpack_from(plain)
    if width not in _WORDS or len(plain) != _HEAD.size + n * (_GAP.itemsize + width) or len(base) % width:
        raise ValueError("the delta does not have the length in its header")
    gaps = _words(plain, _HEAD.size, n, _GAP)
    bits = _words(plain, _HEAD.size + n * _GAP.itemsize, n, _WORDS[width])
    words, at = np.frombuffer(base, _WORDS[width]), np.cumsum(gaps, dtype=np.int64) - 1
    if n and (not gaps.all() or at[-1] >= len(words)):
        raise ValueError("the delta changes an element twice, or one beyond the end")
    words[at] ^= bits


def _planes(words: np.ndarray) -> np.ndarray:
    """Return uint8: the lowest byte of each word, then the next of each, …"""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.ravel()


def _words(plain: bytes, start: int, n: int, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(plain, np.uint8, n * dtype.itemsize, start).reshape(dtype.itemsize, n)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
