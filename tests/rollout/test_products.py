"""Matrix products against float64, and what XLA makes of them on a CPU."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from services.rollout.engines.sglang_jax.scheduling.products import (
    expert_products,
    float32_logits,
    linear_through_float32,
)
from volley_engines.gpu import grouped_products

rng = np.random.default_rng(0)
mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def head_of(table: jax.Array) -> Any:
    return SimpleNamespace(
        embedding=SimpleNamespace(value=table), dtype=table.dtype, promote_dtype=lambda pair, dtype: pair
    )


def linear_of(weight: jax.Array, bias: jax.Array | None, *, skip_bias_add: bool = False) -> Any:
    return SimpleNamespace(
        mesh=mesh, weight=SimpleNamespace(value=weight), kernel_axes=(None, "tensor"), params_dtype=weight.dtype,
        bias=None if bias is None else SimpleNamespace(value=bias), skip_bias_add=skip_bias_add,
    )  # fmt: skip


def test_bfloat16_models_get_float32_logits() -> None:
    """The engine keeps bfloat16 logits: log-probabilities off by up to 0.06."""
    hidden = jnp.array(rng.normal(size=(4, 64)), jnp.bfloat16)
    table = jnp.array(rng.normal(size=(96, 64)), jnp.bfloat16)
    with jax.set_mesh(mesh):
        logits = float32_logits(SimpleNamespace(mesh=mesh, vocab_size=90, soft_cap=None), hidden, head_of(table))
    assert logits.dtype == jnp.float32
    assert logits.shape == (4, 90)
    exact = np.asarray(hidden, float) @ np.asarray(table, float).T[:, :90]
    np.testing.assert_allclose(logits, exact, atol=1e-4)
    assert np.abs(exact.astype(jnp.bfloat16).astype(float) - exact).max() > 1e-2


@pytest.mark.parametrize("n_rows", [2, 8, 32])
def test_bfloat16_weights_are_not_converted_whole(n_rows: int) -> None:
    """XLA for CPUs converts the matrix to float32 first, unless the product has the form of its bfloat16 kernel."""
    hidden = jnp.array(rng.normal(size=(n_rows, 64)), jnp.bfloat16)
    table, weight = (jnp.array(rng.normal(size=size), jnp.bfloat16) for size in ((96, 64), (64, 96)))
    processor = SimpleNamespace(mesh=mesh, vocab_size=90, soft_cap=None)
    with jax.set_mesh(mesh):
        for product, matrix in (
            (lambda x, w: float32_logits(processor, x, head_of(w)), table),
            (lambda x, w: linear_through_float32(linear_of(w, None), x)[0], weight),
        ):
            text = jax.jit(product).lower(hidden, matrix).compile().as_text()
            assert not re.search(r"f32\[(96,64|64,96)\]", text)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_linear_layer_rounds_once(dtype: Any) -> None:
    x, weight, bias = (jnp.array(rng.normal(size=size), dtype) for size in ((6, 64), (64, 96), (96,)))
    with jax.set_mesh(mesh):
        out, left = linear_through_float32(linear_of(weight, bias), x)
        apart, given_back = linear_through_float32(linear_of(weight, bias, skip_bias_add=True), x)
    exact = np.asarray(x, float) @ np.asarray(weight, float)
    assert (out.dtype, left) == (dtype, None)
    assert given_back.value is bias
    within = {"rtol": 2**-8, "atol": 1e-5} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(apart, float), exact, **within)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(apart + bias))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ([192], jnp.bfloat16),
        ([64, 0, 1, 15, 16, 96], jnp.bfloat16),
        ([64, 0, 1, 15, 16, 96], jnp.float32),
        ([0, 0, 3], jnp.bfloat16),
        ([5] * 40, jnp.float32),
    ],
)
@pytest.mark.parametrize("products", [expert_products, partial(grouped_products, interpret=True)])
def test_experts_multiply_their_own_rows(products: Any, sizes: list[int], dtype: Any) -> None:
    """Numbers of rows that suit no tile: six experts, three a token and 64 tokens are 192 rows."""
    n_rows, group_sizes = sum(sizes), jnp.array(sizes, jnp.int32)
    lhs = jnp.array(rng.normal(size=(n_rows, 24)), dtype)
    rhs = jnp.array(rng.normal(size=(len(sizes), 24, 40)), dtype)
    out = jax.jit(lambda *of: products(*of, preferred_element_type=jnp.float32))(lhs, rhs, group_sizes)
    rows, matrices = np.split(np.asarray(lhs, float), np.cumsum(sizes)[:-1]), np.asarray(rhs, float)
    expected = np.concatenate([of_expert @ matrix for of_expert, matrix in zip(rows, matrices, strict=True)])
    np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("products", [expert_products, partial(grouped_products, interpret=True)])
def test_a_device_with_some_of_the_experts_leaves_the_rows_of_others_zero(products: Any) -> None:
    sizes = jnp.array([3, 20, 1, 9], jnp.int32)
    lhs, rhs = (jnp.array(rng.normal(size=size), jnp.float32) for size in ((33, 8), (4, 8, 5)))
    multiply = jax.jit(partial(products, preferred_element_type=jnp.float32))
    whole = multiply(lhs, rhs, sizes)
    parts = [multiply(lhs, rhs[at : at + 2], sizes, group_offset=jnp.array([at])) for at in (0, 2)]
    assert not parts[0][23:].any()
    assert not parts[1][:23].any()
    np.testing.assert_allclose(whole, parts[0] + parts[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(48, 16, 32), (65536, 2048, 768), (1000, 72, 200)])
def test_experts_of_gpus_lower_for_cuda_to_one_kernel(m: int, k: int, n: int, dtype: Any) -> None:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (64, k, n))]
    run = jax.jit(partial(grouped_products, preferred_element_type=dtype))
    sizes, offset = jax.ShapeDtypeStruct((128,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    text = run.trace(*arguments, sizes, group_offset=offset).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("gpu.triton") == 1
    assert "stablehlo.while" not in text
