"""Attention in blocks of queries against float64 numpy, with its gradient, for rows of one sequence and packed ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.models import attention

B, N, K, H = 2, 4, 2, 8


def seen(length: int, visible_until: np.ndarray | None) -> np.ndarray:
    """bool [B, T, T], position by position."""
    found = np.zeros((B, length, length), bool)
    for row in range(B):
        for i in range(length):
            for j in range(i + 1):
                found[row, i, j] = visible_until is None or i < visible_until[row, j]
    return found


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    out = np.zeros_like(q)
    for head in range(N):
        scores = np.einsum("bth,bsh->bts", q[:, :, head], k[:, :, head // (N // K)]) / np.sqrt(H)
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, :, head] = np.einsum("bts,bsh->bth", weights, v[:, :, head // (N // K)])
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [40, 300, 530])
def test_blocks_give_what_all_positions_at_once_give(length: int, packed: bool):
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(B, length, n, H)) for n in (N, K, K))
    until = None
    if packed:  # a prompt that two answers share, and a sequence of its own
        shared, first, second = length // 4, length // 2, 3 * length // 4
        ends = np.repeat([second, first, second, length], [shared, first - shared, second - first, length - second])
        until = np.tile(ends.astype(np.int32), (B, 1))
    mask = seen(length, until)
    low = [x.astype(np.float32) for x in (q, k, v)]
    found = jax.jit(attention.attend)(*low, until)
    np.testing.assert_allclose(found, reference(q, k, v, mask), atol=2e-6)

    def total(attend, *parts):
        return jnp.sum(jnp.sin(attend(*parts)))

    def at_once(q, k, v):
        grouped = q.reshape(B, length, K, N // K, H)
        return attention._block(grouped, k, v, until, 0).reshape(q.shape)

    of_blocks = jax.grad(partial(total, lambda *parts: attention.attend(*parts, until)), argnums=(0, 1, 2))(*low)
    for ours, theirs in zip(of_blocks, jax.grad(partial(total, at_once), argnums=(0, 1, 2))(*low), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3e-6, atol=5e-6)


def test_no_block_looks_past_its_end():
    """What comes later may be anything: it is not read, let alone multiplied by zero."""
    q, k, v = (np.random.default_rng(0).normal(size=(1, 530, n, H)).astype(np.float32) for n in (N, K, K))
    whole = attention.attend(q, k, v)
    k[:, 300:], v[:, 300:] = np.inf, np.nan
    assert np.array_equal(attention.attend(q, k, v)[:, :256], whole[:, :256])
