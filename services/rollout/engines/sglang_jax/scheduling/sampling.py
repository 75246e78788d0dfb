"""Sampling of the next token: exact, and for each request independent of the batch it happens to be in.

Every request draws Gumbel noise from threefry keyed by (its 64-bit seed, the index of the token in its output), so the
same request with the same seed gives the same tokens alone or among 63 others, before and after a retraction, unless
two of them are equally likely up to rounding. The Gumbel maximum is an exact draw from the softmax (Gumbel, 1954). It
draws a block of the vocabulary by the blocks' sums, and then a token of that block, which takes a hundredth of the
random numbers. The engine's own sampler hashes seeds linearly (biased) and applies top-p at temperature 1 whatever the
temperature.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

GREEDY = 0.0
_BLOCK, _FEW = 128, 2048
"""Tokens of the vocabulary that are drawn as one before one of them is; a vocabulary of a few is one block."""


def sample(
    logits_BV: jax.Array,
    temperature_B: jax.Array,
    top_p_B: jax.Array,
    min_p_B: jax.Array,
    top_k_B: jax.Array,
    seed_B2: jax.Array,
    index_B: jax.Array,
    forced_B: jax.Array,
    guided_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row.

    Args:
        logits_BV: any float dtype; computed on as float32.
        temperature_B: float32; 0 means greedy.
        top_p_B, min_p_B, top_k_B: float32 in (0, 1]; float32 in [0, 1], of the likeliest token's probability; int32,
            the vocabulary size or more means all. Each acts on softmax(logits / T) by itself.
        seed_B2: uint32, the two words of each row's seed.
        index_B: int32, how many tokens the request has produced before this one.
        forced_B: int32; a token to take instead of drawing, or -1.
        guided_BV: float32; logits to draw from (`guided`), by default `logits_BV`.
    Returns: int32[B] tokens and float32[B] log softmax(logits / T) of them (T = 1 for greedy rows), not renormalised
        for top-k or top-p.
    """
    greedy_B = temperature_B <= GREEDY
    scaled_BV = logits_BV.astype(jnp.float32) / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    free_BV = scaled_BV
    if guided_BV is not None:
        free_BV = guided_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    restricted_B = (top_p_B < 1.0) | (min_p_B > 0.0) | (top_k_B < logits_BV.shape[-1])
    filtered = jnp.any(restricted_B & ~greedy_B)
    kept_BV = jax.lax.cond(filtered, _filter, lambda z, *_: z, free_BV, top_p_B, min_p_B, top_k_B)
    token_B = jnp.where(forced_B >= 0, forced_B, _drawn(kept_BV, greedy_B, seed_B2, index_B))
    logprob_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(scaled_BV, axis=-1)
    return token_B, logprob_B


def most_likely(logits_BV: jax.Array, temperature_B: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return the n most likely tokens of each row, the likeliest first.

    Returns: int32[B, n] tokens and float32[B, n] log softmax(logits / T) of them (T = 1 for greedy rows), as `sample`.
    """
    scaled_BV = logits_BV.astype(jnp.float32) / jnp.where(temperature_B <= GREEDY, 1.0, temperature_B)[:, None]
    top_BN, ids_BN = jax.lax.top_k(scaled_BV, n)
    return ids_BN.astype(jnp.int32), top_BN - jax.nn.logsumexp(scaled_BV, axis=-1, keepdims=True)


def _drawn(kept_BV: jax.Array, greedy_B: jax.Array, seed_B2: jax.Array, index_B: jax.Array) -> jax.Array:
    """Draw a token of each row from softmax(kept), or take the likeliest of a greedy row, the first of equals.

    N blocks of C tokens: a reduction within blocks is also much faster on CPUs than one over the whole vocabulary.

    Returns: int32[B].
    """
    n_tokens = kept_BV.shape[-1]
    size = n_tokens if n_tokens <= _FEW else _BLOCK
    padded_BV = jnp.pad(kept_BV, ((0, 0), (0, -n_tokens % size)), constant_values=-jnp.inf)
    blocks_BNC = padded_BV.reshape(len(kept_BV), -1, size)
    top_BN = jnp.max(blocks_BNC, axis=-1)
    n_blocks = top_BN.shape[-1]

    def noisy() -> tuple[jax.Array, jax.Array]:
        if n_blocks == 1:
            return top_BN, jnp.where(greedy_B[:, None], 0.0, _gumbel(seed_B2, index_B, size))
        noise_BX = jnp.where(greedy_B[:, None], 0.0, _gumbel(seed_B2, index_B, n_blocks + size))
        finite_BN = jnp.where(top_BN == -jnp.inf, 0.0, top_BN)
        mass_BN = finite_BN + jnp.log(jnp.sum(jnp.exp(blocks_BNC - finite_BN[..., None]), axis=-1))
        return jnp.where(greedy_B[:, None], top_BN, mass_BN + noise_BX[:, :n_blocks]), noise_BX[:, n_blocks:]

    def plain() -> tuple[jax.Array, jax.Array]:
        return top_BN, jnp.zeros((len(top_BN), size), jnp.float32)

    by_block_BN, noise_BC = jax.lax.cond(jnp.all(greedy_B), plain, noisy)
    block_B = jnp.argmax(by_block_BN, axis=-1)
    chosen_BC = jnp.take_along_axis(blocks_BNC, block_B[:, None, None], axis=1)[:, 0]
    return (block_B * size + jnp.argmax(chosen_BC + noise_BC, axis=-1)).astype(jnp.int32)


def _gumbel(seed_B2: jax.Array, index_B: jax.Array, n: int) -> jax.Array:
    """Gumbel noise of each row's next token, float32 [B, n]."""

    def of_row(seed_2: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), index)
        return jax.random.gumbel(key, (n,), jnp.float32)

    return jax.vmap(of_row)(seed_B2, index_B)


def guided(
    logits_BV: jax.Array,
    bias_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits with biases added and without the tokens that are not allowed (-inf).

    Args:
        bias_ids, bias: int32 and float32 [B, n], tokens of each row and what to add to their logits.
        mask: uint32 [B, words], one bit for each token that is allowed, the lowest first.
    """
    found_BV = logits_BV.astype(jnp.float32)
    if bias_ids is not None:
        found_BV = found_BV.at[jnp.arange(len(bias_ids))[:, None], bias_ids].add(bias)
    if mask is not None:
        tokens_V = jnp.arange(logits_BV.shape[-1])
        allowed_BV = (mask[:, tokens_V // 32] >> (tokens_V % 32).astype(jnp.uint32)) & 1
        found_BV = jnp.where(allowed_BV > 0, found_BV, -jnp.inf)
    return found_BV


def _filter(scaled_BV: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """-inf outside the top k, outside the smallest set whose probability reaches p, and below the least probability;
    ties with the last one stay.

    The least logit that stays is found by bisection over the float32 numbers, in 32 sums a row: on a CPU, a sort of the
    vocabulary takes seven times as long. A row whose softmax is not a number loses no token to a probability.
    """
    probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
    order_BV = _ordered(scaled_BV)
    most_B = jnp.where(top_p_B < 1.0, jnp.maximum(top_p_B, jnp.finfo(jnp.float32).tiny), jnp.inf)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below_B2, stays_B2 = bounds
        middle_B2 = (below_B2 & stays_B2) + ((below_B2 ^ stays_B2) >> 1)
        n_above_B = jnp.sum(order_BV > middle_B2[:, :1], axis=-1)
        mass_above_B = jnp.sum(jnp.where(order_BV > middle_B2[:, 1:], probs_BV, 0.0), axis=-1)
        stay_B2 = jnp.stack([n_above_B < top_k_B, ~(mass_above_B >= most_B)], axis=-1)
        return jnp.where(stay_B2, below_B2, middle_B2), jnp.where(stay_B2, middle_B2, stays_B2)

    shape, ends = (len(scaled_BV), 2), jnp.iinfo(jnp.int32)
    _, least_B2 = jax.lax.fori_loop(0, 32, halve, (jnp.full(shape, ends.min), jnp.full(shape, ends.max)))
    keep_BV = order_BV >= jnp.max(least_B2, axis=-1, keepdims=True)
    keep_BV &= ~(probs_BV < min_p_B[:, None] * jnp.max(probs_BV, axis=-1, keepdims=True))
    return jnp.where(keep_BV, scaled_BV, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Return int32 in the order of the float32 `x`, equal where `x` is equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
