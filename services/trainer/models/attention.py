"""Attention and its masks, for rows with one sequence each and for packed rows.

A packed row holds several sequences one after the other, and their common prefixes once. The sequences form a trie in
depth-first order, so the sequences that share a token are neighbours, and one number per token defines the mask:

    position i sees position j where j <= i < visible_until[j]

A sliding window further limits this by the positions of tokens in their own sequence.

Long rows are computed in blocks of queries. A block reads no keys after it and keeps no attention weights for the
backward pass, so the memory is that of one block, not of length squared (Rabe and Staats, "Self-attention Does Not Need
O(n^2) Memory", 2021, without the blocks of keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK, _MOST_BLOCKS = 256, 8
"""Fewest queries of a block, and most blocks: each block is compiled separately."""


class Packing(NamedTuple):
    """Layout of packed rows: int32 [B, T] each.

    Attributes:
        positions: position of a token in its own sequence.
        visible_until: end of the last sequence that contains the token.
        sequences: number of the token's sequence in its row; arbitrary for a token that several sequences share.
    """

    positions: jax.Array
    visible_until: jax.Array
    sequences: jax.Array


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Computation of attention scores from a query's products with keys.

    Attributes:
        scale: factor of the products; None is 1 / √H.
        softcap: cap c of the scores c · tanh(x / c), applied after the scale; None: no cap.
        window: number of tokens of its sequence that a token sees, itself included; None: all before it.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None


def positions(ids: jax.Array, packing: Packing | None) -> jax.Array:
    """Positions of ids [B, T] in their sequences: int32 [1, T], or [B, T] for packed rows."""
    return jnp.arange(ids.shape[1])[None] if packing is None else packing.positions


def seen(
    first: int | jax.Array,
    n_queries: int,
    n_keys: int,
    visible_until: jax.Array | None,
    positions: jax.Array,
    window: int | None,
) -> jax.Array:
    """Mask of T = `n_queries` queries from position `first` over the first S = `n_keys` positions.

    bool [1, T, S], or [B, T, S] for packed rows, with visible_until and positions int32 [B, S]. Without packing the
    mask is causal; padding is on the right.
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
    """Attention [B, T, N, H]: the values that each query sees, weighted by the softmax of its scores.

    Args:
        q: [B, T, N, H]; every N / K neighbouring heads share a head of keys.
        k, v: [B, T, K, H].
        visible_until: of packed rows, see above.
        positions: int32 [B or 1, T], of tokens in their sequences; None: each row is one sequence.
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
    """Attend with queries [B, T, K, G, H] from position `first` on to keys and values [B, S, K, H]."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    mask = seen(first, q.shape[1], k.shape[1], visible_until, positions, options.window)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v)
