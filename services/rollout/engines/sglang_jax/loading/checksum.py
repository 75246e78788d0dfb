"""Checksum of the exact bits of all weights, computed on their devices in one pass and without a copy.

For each leaf the hashes of all elements are added modulo 2**32. An element's hash mixes its bits with its position and
is one-to-one in the bits (the finalizer of MurmurHash3). So a single changed element always changes the sum; any other
change leaves it unchanged with a probability of about 2**-32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksum(leaves: Sequence[jax.Array]) -> str:
    """Checksum of arrays in their order, with elements of up to four bytes, however this process's devices share them.

    Every device sums what it holds by itself, so it may run beside the engine's steps: programs that wait for each
    other's devices, started by two threads, might wait for ever.
    """
    return combined([sums(leaf) for leaf in leaves])


type Sums = list[jax.Array | None]
"""Sums of one array's parts; the devices may still be computing them."""


def sums(leaf: jax.Array) -> Sums:
    return [_sum_of(leaf, shard) for shard in leaf.addressable_shards]


def combined(found: Sequence[Sums]) -> str:
    """The `checksum` of arrays with these sums, in their order."""
    totals = [sum(int(part) for part in parts if part is not None) % 2**32 for parts in jax.device_get(found)]
    return hashlib.sha256(np.array(totals, np.uint32).tobytes()).hexdigest()[:32]


def _sum_of(leaf: jax.Array, shard: Any) -> jax.Array | None:
    """Sum one part of the array; None for a replica of another device's part."""
    if shard.replica_id:
        return None
    starts = [part.start or 0 for part in shard.index]
    strides = tuple(math.prod(leaf.shape[axis + 1 :]) % 2**32 for axis in range(leaf.ndim))
    start = sum(at * stride for at, stride in zip(starts, strides, strict=True)) % 2**32
    return _sum(shard.data, np.uint32(start), strides)


@partial(jax.jit, static_argnames="strides")
def _sum(values: jax.Array, start: np.uint32, strides: tuple[int, ...]) -> jax.Array:
    """`start` is the position of the first element in the whole array, `strides` are those of its axes."""
    words = jax.lax.bitcast_convert_type(values, _WORDS[values.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.full_like(words, start)
    for axis, stride in enumerate(strides):
        position += jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis) * np.uint32(stride)
    mixed = words + position * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)
