"""Block attention against a plain float64 softmax."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.rollout.engines.sglang_jax.scheduling.attention import (
    attend_blocks,
    attend_on_cpu,
    attend_tokens,
    fitted_buffers,
    write_and_attend,
)

HEADS, KV, DIM, SLOTS = 4, 2, 128, 700
rng = np.random.default_rng(0)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    first: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """q: [n, H, D] at positions first…; k, v: [len, K, D]."""
    k, v = (np.repeat(x.astype(float), q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(float), k) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    ago = first + np.arange(len(q))[:, None] - np.arange(len(k))
    scores = np.where((ago >= 0) & (ago < (window or len(k))), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("options", [{}, {"window": 7, "softcap": 0.8}, {"window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize("decode", [True, False])
def test_ragged_requests_attend_to_their_own_past(decode: bool, options: dict[str, Any]) -> None:
    """Lengths around the sizes of blocks, shared slots (a cached prefix), more requests than a group, and padding."""
    seq_lens = np.array([1, 63, 64, 65, 200, 16, 130, 9, 400, 64, 5, 0, 0], np.int32)
    query_lens = np.minimum(seq_lens, 1) if decode else np.array([1, 63, 5, 33, 17, 16, 1, 9, 4, 1, 5, 0, 0], np.int32)
    pool = rng.normal(size=(SLOTS, 2 * KV, DIM)).astype(np.float32)
    slots = [rng.permutation(SLOTS)[:n] for n in seq_lens]
    slots[3][:32] = slots[2][:32]
    tokens = 160
    q = rng.normal(size=(tokens, HEADS, DIM)).astype(np.float32)
    cache_loc = np.zeros(2048, np.int32)
    cache_loc[: seq_lens.sum()] = np.concatenate(slots)
    shape: dict[str, Any] = {"kv_heads": KV, "scale": DIM**-0.5}
    arrays = [jnp.array(x) for x in (q, pool.reshape(-1, DIM), cache_loc, seq_lens)]
    if decode:
        out = attend_tokens(*arrays, **shape, **options)
    else:
        out = attend_blocks(*arrays, jnp.array(query_lens), block_q=16, **shape, **options)
    assert out.shape == q.shape
    assert np.isfinite(out).all()
    at = 0
    for length, n, where in zip(seq_lens, query_lens, slots, strict=True):
        if n:
            keys, values = pool[where, ::2], pool[where, 1::2]
            expected = reference(q[at : at + n], keys, values, length - n, DIM**-0.5, **options)
            np.testing.assert_allclose(out[at : at + n], expected, atol=2e-5)
        at += n


def test_a_request_decodes_the_same_among_others() -> None:
    lens, own = np.array([70, 300, 5, 64, 129, 1, 1, 2, 3, 200], np.int32), 3
    pool, slots = jnp.array(rng.normal(size=(SLOTS * 2 * KV, DIM)), jnp.float32), rng.permutation(SLOTS)
    q = jnp.array(rng.normal(size=(len(lens), HEADS, DIM)), jnp.float32)
    cache_loc = np.resize(slots, lens.sum()).astype(np.int32)
    start, shape = lens[:own].sum(), {"kv_heads": KV, "scale": 0.1}
    among = attend_tokens(q, pool, jnp.array(cache_loc), jnp.array(lens), **shape)
    few = jnp.array(cache_loc[start : start + lens[own]]), jnp.array([lens[own], 0, 0, 0, 0, 0, 0, 0, 0, 0], jnp.int32)
    alone = attend_tokens(jnp.roll(q, -own, axis=0), pool, *few, **shape)
    np.testing.assert_array_equal(alone[0], among[own])


@pytest.mark.parametrize("dim", [16, 80, 128, 192])
def test_heads_of_any_size_fit_longer_rows(dim: int) -> None:
    """The engine's own pool [slots, 1, 2 K, 1, D'] has D rounded up to a multiple of 128; one prefill of 20 tokens."""
    length, width = 20, -(-dim // 128) * 128
    q, k, v = (rng.normal(size=(length, n, dim)).astype(np.float32) for n in (HEADS, KV, KV))
    slots = rng.permutation(SLOTS)[:length].astype(np.int32)
    pool = jnp.full((SLOTS, 1, 2 * KV, 1, width), 7.0)
    lens = jnp.array([length, 0], jnp.int32)
    out, written = write_and_attend(
        q,
        k,
        v,
        pool,
        jnp.array(slots),
        jnp.array(slots),
        lens,
        lens,
        scale=dim**-0.5,
        attend=attend_on_cpu,
        decode=False,
    )
    np.testing.assert_allclose(out, reference(q, k, v, 0, dim**-0.5), atol=2e-5)
    assert written.shape == pool.shape
    np.testing.assert_array_equal(written[slots, 0, ::2, 0, :dim], k)


def fitted(shape: tuple[int, ...], dtype: Any, dim: int) -> jax.Array:
    """A buffer of the pool that the engine would allot with this shape."""

    def allocate(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
        return partial(jnp.zeros, shape, dtype, device=sharding)

    return fitted_buffers(allocate, dim)(shape, dtype, jax.sharding.SingleDeviceSharding(jax.devices()[0]))()


def test_a_pool_of_words_holds_bfloat16_bits_and_is_never_converted_whole() -> None:
    """XLA for CPUs would scatter into a bfloat16 pool by way of a float32 copy of it."""
    length, dim, width = 20, 64, 128
    q, k, v = (jnp.array(rng.normal(size=(length, n, dim)), jnp.bfloat16) for n in (HEADS, KV, KV))
    slots, lens = jnp.array(rng.permutation(SLOTS)[:length], jnp.int32), jnp.array([length, 0], jnp.int32)
    pool = fitted((SLOTS, 1, 2 * KV // 2, 2, width), jnp.bfloat16, dim)
    compiled = (
        jax.jit(partial(write_and_attend, attend=attend_on_cpu, scale=dim**-0.5, decode=False)).lower(
            q, k, v, pool, slots, slots, lens, lens
        )
    ).compile()
    assert not re.search(rf"(f32|bf16)\[({SLOTS}|{SLOTS * 2 * KV}),", compiled.as_text())
    out, written = compiled(q, k, v, pool, slots, slots, lens, lens)
    exact = [np.asarray(one, np.float32) for one in (q, k, v)]
    np.testing.assert_allclose(np.asarray(out, np.float32), reference(*exact, 0, dim**-0.5), atol=2e-2)
    assert written.dtype == jnp.uint16
    rows = np.asarray(written).reshape(SLOTS, 2 * KV, dim)[np.asarray(slots)]
    np.testing.assert_array_equal(rows[:, ::2].view(jnp.bfloat16), np.asarray(k))
    np.testing.assert_array_equal(rows[:, 1::2].view(jnp.bfloat16), np.asarray(v))


def test_a_float32_pool_keeps_its_dtype_and_has_rows_of_a_head() -> None:
    pool = fitted((4, 1, 2, 1, 128), jnp.float32, 80)
    assert (pool.dtype, pool.shape) == (jnp.float32, (4, 1, 2, 1, 80))
