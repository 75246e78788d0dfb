"""Attention in tiles against float64 numpy, with its gradient, for rows of one sequence and packed ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.models import attention
from services.trainer.models.attention import ScoreOptions

B, N, K, H = 2, 4, 2, 8


PLAIN, GEMMA = ScoreOptions(), ScoreOptions(scale=0.3, softcap=1.5, window=70)


def seen(length: int, visible_until: np.ndarray | None, window: int | None) -> np.ndarray:
    """bool [B, T, T]; a window is counted among those that are seen without it."""
    i, j = np.arange(length)[:, None], np.arange(length)
    until = np.full((B, length), length) if visible_until is None else visible_until
    found = (j <= i) & (i < until[:, None, :])
    nearer = found[..., ::-1].cumsum(-1)[..., ::-1]
    return found & (nearer <= (window or length))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, options: ScoreOptions) -> np.ndarray:
    out = np.zeros_like(q)
    for head in range(N):
        scores = np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, head // (N // K)])
        scores *= options.scale or 1 / np.sqrt(H)
        scores = options.softcap * np.tanh(scores / options.softcap) if options.softcap else scores
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, :, head] = np.einsum("bts,bsh->bth", weights, v[:, :, head // (N // K)])
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "options"),
    [(40, PLAIN), (530, PLAIN), (300, GEMMA), pytest.param(530, GEMMA, marks=pytest.mark.long)],
)
def test_tiles_give_what_all_positions_at_once_give(length: int, options: ScoreOptions, packed: bool):
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(B, length, n, H)) for n in (N, K, K))
    until, positions = None, None
    if packed:  # a prompt that two answers share, and a sequence of its own
        shared, first, second = length // 4, length // 2, 3 * length // 4
        ends = np.repeat([second, first, second, length], [shared, first - shared, second - first, length - second])
        until = np.tile(ends.astype(np.int32), (B, 1))
        positions = np.arange(length, dtype=np.int32)[None].repeat(B, 0)
        positions[:, second:] -= second
        positions[:, first:second] -= first - shared
    mask = seen(length, until, options.window)
    low = [x.astype(np.float32) for x in (q, k, v)]
    attend = partial(attention.attend, options=options, positions=positions)
    found = jax.jit(attend)(*low, until)
    np.testing.assert_allclose(found, reference(q, k, v, mask, options), atol=2e-6)

    def total(attend, *parts):
        return jnp.sum(jnp.sin(attend(*parts)))

    def at_once(q, k, v):
        k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (options.scale or H**-0.5)
        scores = options.softcap * jnp.tanh(scores / options.softcap) if options.softcap else scores
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    of_tiles = jax.jit(jax.grad(partial(total, lambda *parts: attend(*parts, until)), argnums=(0, 1, 2)))(*low)
    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(partial(total, at_once), argnums=(0, 1, 2)))(q, k, v)
    for ours, theirs in zip(of_tiles, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=5e-6)


def test_tokens_that_see_nothing_have_finite_values_and_no_gradient():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, 300, n, H)).astype(np.float32) for n in (N, K, K))
    until = np.where(np.arange(300) < 200, 200, 0).astype(np.int32)[None]  # the last hundred are padding

    def total(q, k, v):
        made = attention.attend(q, k, v, until)
        return jnp.sum(made[:, :200]), made

    gradients, made = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert np.isfinite(made).all()
    assert all(np.isfinite(one).all() and not np.any(one[:, 200:]) for one in gradients)


def test_a_row_of_many_tiles_has_few_of_them():
    assert [attention.tile_size(n) for n in (1, 40, 128, 130, 2048, 2049, 32_768)] == [1, 40, 128, 72, 128, 136, 2048]


def test_no_tile_looks_past_its_end():
    """What comes later may be anything: it is not read, let alone multiplied by zero."""
    q, k, v = (np.random.default_rng(0).normal(size=(1, 530, n, H)).astype(np.float32) for n in (N, K, K))
    attend = jax.jit(attention.attend)
    whole = attend(q, k, v)
    end = 2 * attention.tile_size(530)
    k[:, end:], v[:, end:] = np.inf, np.nan
    assert np.array_equal(attend(q, k, v)[:, :end], whole[:, :end])
