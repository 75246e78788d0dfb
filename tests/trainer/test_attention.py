"""Attention in blocks of queries against float64 numpy, with its gradient, for rows of one sequence and packed ones."""

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
def test_blocks_give_what_all_positions_at_once_give(length: int, options: ScoreOptions, packed: bool):
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
        grouped = q.reshape(B, length, K, N // K, H)
        places = np.arange(length)[None] if positions is None else positions
        return attention._block(grouped, k, v, until, places, first=0, options=options).reshape(q.shape)

    of_blocks = jax.grad(partial(total, lambda *parts: attend(*parts, until)), argnums=(0, 1, 2))(*low)
    for ours, theirs in zip(of_blocks, jax.grad(partial(total, at_once), argnums=(0, 1, 2))(*low), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=5e-6)


def test_no_block_looks_past_its_end():
    """What comes later may be anything: it is not read, let alone multiplied by zero."""
    q, k, v = (np.random.default_rng(0).normal(size=(1, 530, n, H)).astype(np.float32) for n in (N, K, K))
    whole = attention.attend(q, k, v)
    k[:, 300:], v[:, 300:] = np.inf, np.nan
    assert np.array_equal(attention.attend(q, k, v)[:, :256], whole[:, :256])
