"""Which tokens a token sees, in rows that hold a sequence each and in rows that several share; and what it takes from
them.

In a packed row the sequences lie one after the other, and what several of them begin with lies there once: they are a
trie in depth-first order, so those that hold a token are neighbours, and one number a token tells who sees it:

    position i sees position j where j <= i < visible_until[j]

With a sliding window it sees of these the last ones of its own sequence, by the positions that tokens have there.

Long rows are attended to in blocks of queries, each of which looks at no key after it and keeps no weights for the
backward pass: the memory is that of one block, not of length squared (Rabe and Staats, "Self-attention Does Not Need
O(n^2) Memory", 2021, without the blocks of keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK, _MOST_BLOCKS = 256, 8
"""Queries of a block at least, and blocks at most: each is a program of its own to compile."""


class Packing(NamedTuple):
    """Where sequences lie in rows that several share: int32 [B, T] each.

    positions: of a token in its own sequence. visible_until: the end of the last sequence that holds the token.
    sequences: the number of the token's sequence in its row, which means nothing for a token that several hold.
    """

    positions: jax.Array
    visible_until: jax.Array
    sequences: jax.Array


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What becomes of a query's products with keys.

    Attributes:
        scale: what they are multiplied by; None is 1 / √H.
        softcap: c of c · tanh(x / c), which is then taken of them; None: they stay.
        window: how many tokens of its sequence a token sees, itself among them; None: all before it.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None


def positions(ids: jax.Array, packing: Packing | None) -> jax.Array:
    """int32 [1, T], or [B, T] where rows are packed, of ids [B, T]."""
    return jnp.arange(ids.shape[1])[None] if packing is None else packing.positions


def seen(
    first: int | jax.Array,
    n_queries: int,
    n_keys: int,
    visible_until: jax.Array | None,
    positions: jax.Array,
    window: int | None,
) -> jax.Array:
    """bool [1, T, S], or [B, T, S] of packed rows, with visible_until and positions int32 [B, S]: which of the first
    S = `n_keys` positions (last axis) each of T = `n_queries` positions from `first` on sees. Without packing all that
    are not after it: what fills rows up is on the right.
    """
    query, key = first + jnp.arange(n_queries)[:, None], jnp.arange(n_keys)[None, :]
    found = (key <= query)[None]
    if visible_until is not None:
        found &= query < visible_until[:, None, :]
    if window is None:
        return found
    places = jax.lax.dynamic_slice_in_dim(positions, first, n_queries, axis=1)
    return found & (places[:, :, None] - positions[:, None, :] < window)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible_until: jax.Array | None = None,
    options: ScoreOptions = ScoreOptions(),
    positions: jax.Array | None = None,
) -> jax.Array:
    """[B, T, N, H]: of every query the mean of the values that it sees, by softmax of its scores.

    Args:
        q: [B, T, N, H]; every N / K neighbouring heads share a head of keys.
        k, v: [B, T, K, H].
        visible_until: see above, of packed rows.
        positions: int32 [B or 1, T], of tokens in their sequences; None are those of rows that hold one each.
    """
    length, n_kv = q.shape[1], k.shape[2]
    grouped = q.reshape(*q.shape[:2], n_kv, -1, q.shape[3])
    places = jnp.arange(length)[None] if positions is None else positions
    size = max(_BLOCK, -(-length // _MOST_BLOCKS))
    block = partial(_block, options=options)
    if length <= size:
        return block(grouped, k, v, visible_until, places, first=0).reshape(q.shape)
    blocks = [
        jax.checkpoint(partial(block, first=first))(
            grouped[:, first:end],
            k[:, :end],
            v[:, :end],
            None if visible_until is None else visible_until[:, :end],
            places[:, :end],
        )
        for first, end in ((first, min(first + size, length)) for first in range(0, length, size))
    ]
    return jnp.concatenate(blocks, axis=1).reshape(q.shape)


def _block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible_until: jax.Array | None,
    positions: jax.Array,
    *,
    first: int,
    options: ScoreOptions,
) -> jax.Array:
    """`attend`, of queries [B, T, K, G, H] that begin at position `first`, over keys and values [B, S, K, H]."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    mask = seen(first, q.shape[1], k.shape[1], visible_until, positions, options.window)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v)
