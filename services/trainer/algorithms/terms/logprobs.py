"""Log-probabilities of given tokens from hidden states, without the logits of a whole sequence in memory.

A scan over chunks of T computes logits [B, C, V] and reduces them; the backward pass computes them again. The peak is
one chunk's logits instead of [B, T, V].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Entropy = Literal["none", "value", "gradient"]
"""Not computed (0); computed for metrics; computed with its gradient."""
LEAST_CHUNK = 64
_CHUNK_LOGITS = 2**24
"""Logits of a larger chunk: 64 MiB. A chunk's product reads the whole head, which few positions do not repay."""


class TokenScores(NamedTuple):
    """Log-probability of the target, and entropy of its distribution; float32 [B, T]."""

    logprobs: jax.Array
    entropy: jax.Array


def token_scores(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: float,
    entropy: Entropy,
    *,
    softcap: float | None = None,
    chunk: int | None = None,
) -> TokenScores:
    """Score targets int32 [B, T] under softmax(hidden @ head.T / temperature).

    Args:
        hidden: [B, T, D]; position t predicts targets[:, t].
        head: [V, D].
        entropy: computes the entropy, in nats, and its gradient.
        softcap: c, which turns the logits x = hidden @ head.T into c · tanh(x / c) before the division.
        chunk: positions per scan step; T is padded up to a multiple of it. None chooses by the size of the logits.
    """
    batch, length, dim = hidden.shape
    chunk = min(chunk or chunk_size(batch, length, len(head)), length)
    n = -(-length // chunk)
    pad = n * chunk - length
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(batch, n, chunk, dim).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, n, chunk).swapaxes(0, 1)

    @jax.checkpoint
    def score(hidden_c: jax.Array, targets_c: jax.Array) -> TokenScores:
        logits = jnp.einsum("bcd,vd->bcv", hidden_c, head, preferred_element_type=jnp.float32)
        logits = (logits if softcap is None else softcap * jnp.tanh(logits / softcap)) / temperature
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets_c[..., None], axis=-1)[..., 0]
        if entropy == "none":
            return TokenScores(chosen - normalizer, jnp.zeros_like(normalizer))
        held = (logits, normalizer) if entropy == "gradient" else jax.lax.stop_gradient((logits, normalizer))
        return TokenScores(chosen - normalizer, _entropy(*held))

    def step(carry: None, chunks: tuple[jax.Array, jax.Array]) -> tuple[None, TokenScores]:
        return carry, score(*chunks)

    _, scores = jax.lax.scan(step, None, (hidden, targets))
    return TokenScores(*(x.swapaxes(0, 1).reshape(batch, n * chunk)[:, :length] for x in scores))


def chunk_size(n_rows: int, length: int, vocabulary: int) -> int:
    """Positions of each row of `length` tokens whose logits are computed at once."""
    most = max(LEAST_CHUNK, _CHUNK_LOGITS // (n_rows * vocabulary))
    return -(-length // -(-length // most))


def _entropy(logits: jax.Array, normalizer: jax.Array) -> jax.Array:
    probabilities = jnp.exp(logits - normalizer[..., None])
    return (probabilities * (normalizer[..., None] - logits)).sum(-1)
