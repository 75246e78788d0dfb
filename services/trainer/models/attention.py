"""Attention and its masks, for rows with one sequence each and for packed rows.

A packed row holds several sequences one after the other, and their common prefixes once. The sequences form a trie in
depth-first order, so the sequences that share a token are neighbours, and one number per token defines the mask:

    position i sees position j where j <= i < visible_until[j]

A sliding window further limits this by the positions of tokens in their own sequence.

Attention is computed tile by tile: a tile of queries with a tile of keys at a time, none that no query of it sees. The
sums of a query's weights and weighted values are carried from tile to tile, scaled to the largest score so far. The
backward pass computes each tile's weights again, from the logarithm of their sum, which is stored instead of them. The
memory is that of one tile, not of length squared, and a program has the two loops' bodies once for each layer. Source:
Dao, "FlashAttention-2", 2023, without its order of tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_TILE, _MOST_TILES = 128, 16
"""Queries and keys of a tile on CPUs, where its scores stay in the cache, and most tiles of a row there."""
_TILE_ELSEWHERE = 512
"""On accelerators, where each product is a kernel of its own."""
_LEAST = float(np.finfo(np.float32).min)
"""Score of a key that a query does not see."""


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
    first_key: int | jax.Array = 0,
) -> jax.Array:
    """Mask of T = `n_queries` queries from position `first` over S = `n_keys` keys from position `first_key`.

    bool [1, T, S], or [B, T, S] for packed rows, with visible_until and positions int32 [B, length]. Without packing
    the mask is causal; padding is on the right.
    """
    query, key = first + jnp.arange(n_queries)[:, None], first_key + jnp.arange(n_keys)[None, :]
    found = (key <= query)[None]
    if visible_until is not None:
        found &= query < jax.lax.dynamic_slice_in_dim(visible_until, first_key, n_keys, axis=1)[:, None]
    if window is None:
        return found
    of_queries = jax.lax.dynamic_slice_in_dim(positions, first, n_queries, axis=1)
    of_keys = jax.lax.dynamic_slice_in_dim(positions, first_key, n_keys, axis=1)
    return found & (of_queries[:, :, None] - of_keys[:, None] < window)


def tile_size(length: int) -> int:
    """Queries, and keys, of a tile of rows with `length` tokens, on the devices of this process."""
    most = _TILE_ELSEWHERE if jax.default_backend() != "cpu" else max(_TILE, -(-length // _MOST_TILES))
    if length <= most:
        return length
    n_tiles = -(-length // most)
    return 8 * -(-length // (8 * n_tiles))


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
    length, n_kv, head = q.shape[1], k.shape[2], q.shape[3]
    size = tile_size(length)
    pad = -length % size  # keys that no query sees, and queries whose values are dropped
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    places = jnp.arange(length + pad)[None] if positions is None else jnp.pad(positions, ((0, 0), (0, pad)))
    until = None if visible_until is None else jnp.pad(visible_until, ((0, 0), (0, pad)))
    scale = head**-0.5 if options.scale is None else options.scale
    tiling = _Tiling(size, scale, options.softcap, options.window)
    grouped = q.reshape(*q.shape[:2], n_kv, -1, head)
    parts = (_tiles(grouped, size), _tiles(k[:, :, :, None], size), _tiles(v[:, :, :, None], size))
    mixed = _attended(tiling, *parts, until, places)
    return _rows(mixed, grouped.shape[3])[:, :length].reshape(q.shape[0], length, *q.shape[2:])


def _tiles(x: jax.Array, size: int) -> jax.Array:
    """Divide rows [B, T, K, G, H] into n tiles [n, B, K, G · size, H]."""
    batch, length, n_kv, n_group, head = x.shape
    cut = x.reshape(batch, length // size, size, n_kv, n_group, head).transpose(1, 0, 3, 4, 2, 5)
    return cut.reshape(length // size, batch, n_kv, n_group * size, head)


def _rows(tiles: jax.Array, n_group: int) -> jax.Array:
    """Put tiles [n, B, K, G · size, H] together to rows [B, T, K, G, H]."""
    n, batch, n_kv, _, head = tiles.shape
    cut = tiles.reshape(n, batch, n_kv, n_group, -1, head).transpose(1, 0, 4, 2, 3, 5)
    return cut.reshape(batch, -1, n_kv, n_group, head)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles of `size` queries and keys, and how their scores are computed (see `ScoreOptions`)."""

    size: int
    scale: float
    softcap: float | None
    window: int | None

    def pairs(self, n_tiles: int, *, is_packed: bool) -> _Pair:
        """Numbers of the tiles of queries and keys, int32, that see each other, in order of the queries."""
        window = None if is_packed else self.window
        first = [0 if window is None else max(0, (i * self.size - window + 1) // self.size) for i in range(n_tiles)]
        found = np.array([(i, j) for i in range(n_tiles) for j in range(first[i], i + 1)], np.int32)
        return jnp.asarray(found[:, 0]), jnp.asarray(found[:, 1])

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Scores [B, K, M, S], float32, of queries [B, K, M, H] with keys [B, K, H, S]."""
        scores = _product(q, k) * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def slope(self, scores: jax.Array) -> jax.Array | float:
        """Derivative of scores by the products that they are computed from."""
        return self.scale if self.softcap is None else self.scale * (1 - jnp.square(scores / self.softcap))

    def masked(
        self, x: jax.Array, tiles: _Pair, until: jax.Array | None, places: jax.Array, otherwise: float
    ) -> jax.Array:
        """Put `otherwise` where a query of `x` [B, K, M, S] does not see the key."""
        first, first_key = (one * self.size for one in tiles)
        mask = seen(first, self.size, self.size, until, places, self.window, first_key)
        grouped = x.reshape(*x.shape[:2], -1, self.size, self.size)
        return jnp.where(mask[:, None, None], grouped, otherwise).reshape(x.shape)


type _Pair = tuple[jax.Array, jax.Array]
"""Numbers of a tile of queries and of a tile of keys."""


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _at(tiles: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(tiles, number, keepdims=False)


def _with(tiles: jax.Array, one: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(tiles, one, number, 0)


def _loop[C](body: Callable[[C, _Pair], C], carry: C, pairs: _Pair) -> C:
    """Call `body` for each pair of tiles; a single one needs no loop."""
    if len(pairs[0]) == 1:
        return body(carry, (pairs[0][0], pairs[1][0]))
    return jax.lax.scan(lambda carry, pair: (body(carry, pair), None), carry, pairs)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(
    tiling: _Tiling, q: jax.Array, k: jax.Array, v: jax.Array, until: jax.Array | None, places: jax.Array
) -> jax.Array:
    """Attention of tiles of queries [n, B, K, M, H] to tiles of keys and values [n, B, K, S, H], as q."""
    return _forward(tiling, q, k, v, until, places)[0]


def _forward(
    tiling: _Tiling, q: jax.Array, k: jax.Array, v: jax.Array, until: jax.Array | None, places: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Return the attention, and what the backward pass needs."""
    turned = k.swapaxes(-1, -2)

    def add(carry: tuple[jax.Array, ...], pair: _Pair) -> tuple[jax.Array, ...]:
        i, j = pair
        mixed, most, total = (_at(one, i) for one in carry)
        scores = tiling.masked(tiling.scores(_at(q, i), _at(turned, j)), pair, until, places, _LEAST)
        larger = jnp.maximum(most, scores.max(-1))
        weights, shrink = jnp.exp(scores - larger[..., None]), jnp.exp(most - larger)
        mixed = mixed * shrink[..., None] + _product(weights.astype(v.dtype), _at(v, j))
        total = total * shrink + weights.sum(-1)
        return tuple(_with(old, new, i) for old, new in zip(carry, (mixed, larger, total), strict=True))

    zeros = jnp.zeros(q.shape, jnp.float32)
    carry = zeros, jnp.full(q.shape[:-1], _LEAST), zeros[..., 0]
    mixed, most, total = _loop(add, carry, tiling.pairs(len(q), is_packed=until is not None))
    mixed = (mixed / total[..., None]).astype(q.dtype)
    return mixed, (q, k, v, until, places, mixed, most + jnp.log(total))


def _backward(tiling: _Tiling, stored: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    """Gradients of queries, keys and values; the latter are added up as [n, B, K, H, S], which spares copies."""
    q, k, v, until, places, mixed, log_total = stored
    inner = (gradient.astype(jnp.float32) * mixed).sum(-1)
    q_turned, k_turned, v_turned, turned = (x.swapaxes(-1, -2) for x in (q, k, v, gradient))

    def add(carry: tuple[jax.Array, ...], pair: _Pair) -> tuple[jax.Array, ...]:
        i, j = pair
        of_q, of_k, of_v = carry
        scores = tiling.scores(_at(q, i), _at(k_turned, j))
        weights = tiling.masked(jnp.exp(scores - _at(log_total, i)[..., None]), pair, until, places, 0.0)
        of_scores = weights * (_product(_at(gradient, i), _at(v_turned, j)) - _at(inner, i)[..., None])
        of_products = (of_scores * tiling.slope(scores)).astype(q.dtype)
        return (
            _with(of_q, _at(of_q, i) + _product(of_products, _at(k, j)), i),
            _with(of_k, _at(of_k, j) + _product(_at(q_turned, i), of_products), j),
            _with(of_v, _at(of_v, j) + _product(_at(turned, i), weights.astype(v.dtype)), j),
        )

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (q, k_turned, v_turned))
    of_q, of_k, of_v = _loop(add, tuple(zeros), tiling.pairs(len(q), is_packed=until is not None))
    return (
        of_q.astype(q.dtype),
        of_k.swapaxes(-1, -2).astype(k.dtype),
        of_v.swapaxes(-1, -2).astype(v.dtype),
        None,
        None,
    )


_attended.defvjp(_forward, _backward)
