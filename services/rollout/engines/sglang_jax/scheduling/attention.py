"""The engine's attention on CPUs. Its cost follows the tokens that exist, not the padded shape.

`BlockAttention` also serves GPUs: there it writes to the pool in the same way, and attends by the kernel in
`scheduling.gpu_attention`.

The engine's own native backend scores every query against every key of the whole batch and copies the whole key/value
pool once a layer; at 32 requests that is most of the time of a step. Here three nested loops with dynamic bounds visit
groups of requests, each block of their queries, and each block of their keys, with the running softmax of
FlashAttention (Dao et al., 2022). A block of keys stays in the CPU's cache from its gather to its last use.

A group is one request of a prefill. Of a decode, whose requests have one query each, it is GROUP requests with about
as many keys: sorted by length, so that few requests wait for a longer one.

Layout of the inputs (the engine's): the tokens of all requests lie one after another; `cache_loc` holds the pool slots
of all tokens of request 0, then of request 1, and so on. Padding requests have length 0 and come last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.attention.native_backend import NativeAttention

BLOCK_K = 64
BLOCK_Q = 16
GROUP = 16


def attend_on_cpu(
    q: jax.Array,
    rows: jax.Array,
    cache_loc: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    *,
    decode: bool,
    **options: Any,
) -> jax.Array:
    """`attend_blocks`, or `attend_tokens` for a decode, in which no request has more than one query."""
    if decode:
        return attend_tokens(q, rows, cache_loc, seq_lens, **options)
    return attend_blocks(q, rows, cache_loc, seq_lens, query_lens, block_q=BLOCK_Q, **options)


class BlockAttention(NativeAttention):
    """Drop-in for `NativeAttention`: causal self-attention over the paged pool, page size 1, no sinks. The engine's
    own knows no soft cap.

    `attend` is a function with the arguments of `attend_blocks`, and `decode` in the place of `block_q`.
    """

    attend: Callable[..., jax.Array] = staticmethod(attend_on_cpu)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, layer: Any, forward_batch: Any, token_to_kv_pool: Any, **_: Any
    ) -> tuple[jax.Array, jax.Array]:
        """q: [T, H, D]; k, v: [T, K, D]. Returns the output [T, H*D] and the layer's updated pool buffer."""
        decode = forward_batch.extend_seq_lens is None
        query_lens = jnp.minimum(forward_batch.seq_lens, 1) if decode else forward_batch.extend_seq_lens
        pool = token_to_kv_pool.kv_buffer[layer.layer_id - token_to_kv_pool.start_layer]
        heads, buffer = P("data", "tensor", None), jax.typeof(pool).sharding.spec
        attend = jax.shard_map(
            partial(
                write_and_attend,
                attend=self.attend,
                scale=layer.scaling,
                window=layer.sliding_window_size,
                softcap=layer.logit_cap,
                decode=decode,
            ),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, buffer, P(), P(), P(), P()),
            out_specs=(heads, buffer),
            check_vma=False,
        )
        inputs = (
            q,
            k,
            v,
            pool,
            forward_batch.out_cache_loc,
            forward_batch.cache_loc,
            forward_batch.seq_lens,
            query_lens,
        )
        specs = (heads, heads, heads, buffer, P(), P(), P(), P())
        out, pool = attend(
            *(jax.sharding.reshard(x, NamedSharding(self.mesh, spec)) for x, spec in zip(inputs, specs, strict=True))
        )
        flat = NamedSharding(self.mesh, P("data", "tensor"))
        return jax.lax.reshape(out, (q.shape[0], layer.q_head_num * layer.head_dim), out_sharding=flat), pool


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    out_cache_loc: jax.Array,
    cache_loc: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    *,
    attend: Callable[..., jax.Array],
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new keys and values [T, K, D] to slots `out_cache_loc` (int32[T]; -1 is padding), then attends.

    The pool's rows may be longer than D: what is beyond stays 0. `options` are those of `attend`.
    """
    tokens, kv_heads, dim = k.shape
    width = pool.shape[-1]
    new = jnp.pad(jnp.stack([k, v], axis=2), ((0, 0), (0, 0), (0, 0), (0, width - dim)))
    new = _stored(new.reshape(tokens, *pool.shape[1:]), pool.dtype)
    at = jnp.where(out_cache_loc >= 0, out_cache_loc, pool.shape[0])
    pool = pool.at[at].set(new, mode="drop")  # in place only while the pool keeps its shape: a reshape copies it twice
    return attend(q, pool.reshape(-1, width), cache_loc, seq_lens, query_lens, kv_heads=kv_heads, **options), pool


type AllocateBuffer = Callable[[tuple[int, ...], Any, jax.sharding.Sharding], Callable[[], jax.Array]]
"""Makes a function that allocates one layer's buffer of the pool, of a shape, a dtype and a sharding."""


def fitted_buffers(allocate: AllocateBuffer, head_dim: int) -> AllocateBuffer:
    """Allocate the pool's buffers with rows of `head_dim`, and as uint16 for bfloat16.

    The engine rounds the rows up to a multiple of 128 for its paged attention. XLA for CPUs scatters no bfloat16: it
    would convert the whole pool to float32 and back at every layer of every step. A bitcast of the pool would copy it,
    so the pool itself holds the bits as uint16.
    """

    def fitted(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
        return allocate((*shape[:-1], head_dim), jnp.uint16 if dtype == jnp.bfloat16 else dtype, sharding)

    return fitted


def _stored(values: jax.Array, dtype: Any) -> jax.Array:
    """Values as the pool stores them: cast to its float dtype, or the bits of bfloat16 where it is uint16."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(dtype)


def _loaded(stored: jax.Array) -> jax.Array:
    """Float32 values of what `_stored` made."""
    if stored.dtype == jnp.uint16:
        stored = jax.lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(jnp.float32)


def attend_blocks(
    q: jax.Array,
    rows: jax.Array,
    cache_loc: jax.Array,
    seq_lens: jax.Array,
    query_lens: jax.Array,
    *,
    kv_heads: int,
    scale: float,
    block_q: int,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal attention of the last `query_lens[b]` of `seq_lens[b]` tokens of each request.

    Args:
        q: [T, H, D], the queries of all requests one after another; T is padded.
        rows: [slots * 2 K, at least D], for each slot the key and the value of each head in turn, with 0 beyond D;
            floats, or uint16 with the bits of bfloat16.
        cache_loc: int32[C], the slots of all tokens of all requests one after another.
        seq_lens, query_lens: int32[B]; 0 for padding, which comes last.
        scale: factor on the scores.
        block_q: queries handled at once.
        window: how many tokens one sees, itself among them; None: all before it.
        softcap: c, where scores x are c · tanh(x / c).
    Returns: [T, H, D] in q's dtype; rows of padding are arbitrary but finite.
    """
    tokens, _, dim = q.shape
    grouped = jnp.pad(_by_head(q, rows, kv_heads), ((0, block_q), (0, 0), (0, 0), (0, 0)))
    slots = jnp.pad(cache_loc, (0, BLOCK_K))
    query_starts = jnp.cumsum(query_lens) - query_lens
    key_starts = jnp.cumsum(seq_lens) - seq_lens
    one_block = partial(_one_block, scale=scale, window=window, softcap=softcap)

    def request(b: jax.Array, out: jax.Array) -> jax.Array:
        first = seq_lens[b] - query_lens[b]

        def queries(i: jax.Array, out: jax.Array) -> jax.Array:
            at = query_starts[b] + i * block_q
            positions = first + i * block_q + jnp.arange(block_q)
            q_block = jax.lax.dynamic_slice_in_dim(grouped, at, block_q)
            n_keys = jnp.minimum(positions[-1] + 1, seq_lens[b])
            block = one_block(q_block[None], rows, slots, key_starts[b][None], positions[None], n_keys)[0]
            return jax.lax.dynamic_update_slice_in_dim(out, block.astype(out.dtype), at, 0)

        return jax.lax.fori_loop(0, (query_lens[b] + block_q - 1) // block_q, queries, out)

    out = jax.lax.fori_loop(0, jnp.sum(query_lens > 0), request, jnp.zeros_like(grouped))
    return out[:tokens, ..., :dim].reshape(q.shape)


def attend_tokens(
    q: jax.Array,
    rows: jax.Array,
    cache_loc: jax.Array,
    seq_lens: jax.Array,
    *,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attend_blocks` of the last token of each request: q is [B or more, H, D], row b of request b."""
    (n, _, dim), group = q.shape, min(GROUP, len(seq_lens))
    padding = -len(seq_lens) % group
    order = jnp.argsort(-seq_lens)
    lens, starts, grouped = (
        jnp.pad(x[order], ((0, padding), *((0, 0) for _ in x.shape[1:])))
        for x in (seq_lens, jnp.cumsum(seq_lens) - seq_lens, _by_head(q, rows, kv_heads))
    )
    slots = jnp.pad(cache_loc, (0, BLOCK_K))

    def requests(i: jax.Array, out: jax.Array) -> jax.Array:
        q_some, lens_some, starts_some = (
            jax.lax.dynamic_slice_in_dim(x, i * group, group) for x in (grouped, lens, starts)
        )
        block = _one_block(
            q_some[:, None],
            rows,
            slots,
            starts_some,
            lens_some[:, None] - 1,
            lens_some[0],
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, block[:, 0].astype(out.dtype), i * group, 0)

    n_groups = (jnp.sum(seq_lens > 0) + group - 1) // group
    out = jax.lax.fori_loop(0, n_groups, requests, jnp.zeros_like(grouped))
    out = out[jnp.argsort(order), ..., :dim].reshape(len(seq_lens), *q.shape[1:])
    return jnp.pad(out, ((0, n - len(seq_lens)), (0, 0), (0, 0)))


def _by_head(q: jax.Array, rows: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [T, H, D] as [T, K, H / K, D'], as long as the rows: the gather of cut rows would be slower."""
    tokens, n_heads, dim = q.shape
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, rows.shape[-1] - dim)))
    return padded.reshape(tokens, kv_heads, n_heads // kv_heads, rows.shape[-1])


def _one_block(
    q: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    key_starts: jax.Array,
    positions: jax.Array,
    n_keys: jax.Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """Online softmax of a block of queries [R, Q, K, G, D] of each of R requests at `positions` [R, Q], ascending.

    `n_keys` is that of the request with the most; keys beyond a query's position are not seen. Returns float32 of q's
    shape. What a query has of a block of keys without one that it sees is faded to 0 by the next; after one that it
    sees, such a block adds exactly 0.
    """
    n_requests, n_q, kv_heads, group, dim = q.shape
    n = n_q * group
    q_RKDN = q.astype(jnp.float32).transpose(0, 2, 4, 1, 3).reshape(n_requests, kv_heads, dim, n)
    causal_RN = jnp.repeat(positions, group, axis=1)
    head_rows = (2 * jnp.arange(kv_heads))[:, None]
    most = jnp.maximum(positions[:, -1:], 0)

    def keys(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, mixed = state
        at = i * BLOCK_K + jnp.arange(BLOCK_K)
        slot = slots[key_starts[:, None] + jnp.minimum(at, most)]
        index = slot[:, None, :] * (2 * kv_heads) + head_rows
        k = _loaded(rows.at[index].get(mode="promise_in_bounds"))
        v = _loaded(rows.at[index + 1].get(mode="promise_in_bounds"))
        scores = jnp.matmul(k, q_RKDN).transpose(0, 1, 3, 2) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        ago = causal_RN[..., None] - at
        visible = ago >= 0 if window is None else (ago >= 0) & (ago < window)
        scores = jnp.where(visible[:, None], scores, -1e30)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, fade = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        mixed = mixed * fade + jnp.matmul(weights, v)
        return new_top, total * fade + weights.sum(-1, keepdims=True), mixed

    of_heads = (n_requests, kv_heads, n)
    start = (jnp.full((*of_heads, 1), -1e30), jnp.zeros((*of_heads, 1)), jnp.zeros((*of_heads, dim)))
    oldest = 0 if window is None else jnp.maximum(positions.min() - window + 1, 0) // BLOCK_K
    _, total, mixed = jax.lax.fori_loop(oldest, (n_keys + BLOCK_K - 1) // BLOCK_K, keys, start)
    out = mixed / jnp.maximum(total, 1e-30)
    return out.reshape(n_requests, kv_heads, n_q, group, dim).transpose(0, 2, 1, 3, 4)
