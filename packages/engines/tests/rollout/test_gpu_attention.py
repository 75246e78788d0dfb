"""The GPU's kernel in JAX's interpreter against a float64 softmax, and lowered for CUDA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rollout.test_attention import reference
from volley_engines.gpu.attention import attend

rng = np.random.default_rng(0)


def differs(
    seq_lens: list[int],
    query_lens: list[int],
    tokens: int,
    shape: tuple[int, int, int, int],
    dtype: Any,
    **options: Any,
) -> float:
    """Largest difference to float64 for `shape`, which is H, K, D and the width of the pool's rows."""
    heads, kv_heads, dim, width = shape
    slots = [rng.permutation(300)[:n] for n in seq_lens]
    pool = jnp.array(rng.normal(size=(300, 2 * kv_heads, width)), dtype)
    q = jnp.array(rng.normal(size=(tokens, heads, dim)), dtype)
    cache_loc = np.zeros(sum(seq_lens) + 5, np.int32)
    cache_loc[: sum(seq_lens)] = np.concatenate(slots)
    lens = (jnp.array(one, jnp.int32) for one in (seq_lens, query_lens))
    run = partial(attend, kv_heads=kv_heads, scale=dim**-0.5, interpret=True, **options)
    out = np.asarray(jax.jit(run)(q, pool.reshape(-1, width), jnp.array(cache_loc), *lens), float)
    exact, held = np.asarray(q, float), np.asarray(pool, float)[..., :dim]
    at, worst, options = 0, 0.0, {name: options[name] for name in ("window", "softcap") if name in options}
    for length, n, where in zip(seq_lens, query_lens, slots, strict=True):
        if n:
            keys, values = held[where, ::2], held[where, 1::2]
            expected = reference(exact[at : at + n], keys, values, length - n, dim**-0.5, **options)
            worst = np.maximum(worst, np.abs(out[at : at + n] - expected).max())  # NaN if any is
        at += n
    assert not out[at:].any()
    return float(worst)


LENS = [1, 63, 64, 65, 200, 0, 0]
SOME = {"window": 7, "softcap": 0.8}


@pytest.mark.parametrize(
    ("query_lens", "tokens", "shape", "dtype", "options"),
    [
        ([1, 1, 1, 1, 1, 0, 0], 7, (6, 2, 80, 128), jnp.float32, {"decode": True}),
        ([1, 1, 1, 1, 1, 0, 0], 8, (4, 2, 64, 64), jnp.bfloat16, {"decode": True, "window": 70, "softcap": 0.8}),
        ([1, 63, 5, 33, 17, 0, 0], 128, (3, 1, 80, 80), jnp.float32, {"decode": False, **SOME}),
        ([1, 1, 64, 1, 9, 0, 0], 80, (4, 1, 256, 256), jnp.bfloat16, {"decode": False}),
    ],
)
def test_the_kernel_attends_as_a_float64_softmax(
    query_lens: list[int], tokens: int, shape: tuple[int, int, int, int], dtype: Any, options: dict[str, Any]
) -> None:
    """Head sizes that are no power of two, rows that are longer, groups of query heads, padding."""
    within = 2e-6 if dtype == jnp.float32 else 1e-2
    assert differs(LENS, query_lens, tokens, shape, dtype, **options) < within


def test_a_batch_of_padding_gives_zeros() -> None:
    assert differs([0, 0], [0, 0], 4, (2, 1, 64, 64), jnp.float32, decode=True) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("shape", [(9, 3, 64), (8, 4, 256), (10, 2, 80)])
def test_it_lowers_for_cuda(shape: tuple[int, int, int], decode: bool, dtype: Any) -> None:
    """A pool of more than 2³¹ elements."""
    heads, kv_heads, dim = shape
    width = -(-dim // 128) * 128
    floats = [(64, heads, dim), (2**33 // width, width)]
    lens = [(4096,), (64,), (64,)]
    arguments = [
        *(jax.ShapeDtypeStruct(one, dtype) for one in floats),
        *(jax.ShapeDtypeStruct(one, jnp.int32) for one in lens),
    ]
    run = jax.jit(partial(attend, kv_heads=kv_heads, scale=1.0, decode=decode))
    text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("gpu.triton") == 1
    assert "stablehlo.while" not in text
