"""The sampler against numpy: distribution, filters, seeds."""

import jax
import numpy as np
import pytest

from services.rollout.api.validation import GREEDY_BELOW, MAX_TEMPERATURE, MAX_TOP_K, MIN_TOP_P
from services.rollout.engines.sglang_jax.scheduling.sampling import sample
from tests.support.decoder_reference import log_softmax

ALL = np.iinfo(np.int32).max
rng = np.random.default_rng(0)
SCORES = rng.normal(size=50).astype(np.float32) * 2
compiled = jax.jit(sample)


def draw(
    n: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = ALL,
    seeds: np.ndarray | None = None,
    index: int = 0,
    scores: np.ndarray = SCORES,
) -> tuple[np.ndarray, np.ndarray]:
    """n draws from the same scores, each with its own seed."""
    words = np.stack([np.zeros(n), np.arange(n)], 1).astype(np.uint32) if seeds is None else seeds
    parameters = ((temperature, np.float32), (top_p, np.float32), (top_k, np.int32))
    rows = [np.full(n, value, dtype) for value, dtype in parameters]
    tokens, logprobs = compiled(
        np.tile(scores, (n, 1)), *rows, words, np.full(n, index, np.int32), np.full(n, -1, np.int32)
    )
    return np.asarray(tokens), np.asarray(logprobs)


def chi2_per_degree(tokens: np.ndarray, p: np.ndarray) -> float:
    expected = p * len(tokens)
    often = expected >= 5
    observed = np.bincount(tokens, minlength=len(p))
    pairs = [(observed[often], expected[often])]
    if not often.all():
        pairs.append((observed[~often].sum(keepdims=True), expected[~often].sum(keepdims=True)))
    return sum((((o - e) ** 2) / e).sum() for o, e in pairs) / often.sum()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Seeds 0, 1, 2, …: the worst case for a hash that is linear in the seed."""
    tokens, _ = draw(20_000, temperature=temperature)
    assert chi2_per_degree(tokens, np.exp(log_softmax(SCORES.astype(float), temperature))) < 1.6


def test_draws_at_successive_positions_of_one_request_follow_the_softmax() -> None:
    same = np.tile(np.array([[0, 7]], np.uint32), (1, 1))
    tokens = np.concatenate([draw(1, seeds=same, index=i)[0] for i in range(3000)])
    assert chi2_per_degree(tokens, np.exp(log_softmax(SCORES.astype(float)))) < 1.6


def test_positions_and_seeds_are_independent_of_each_other() -> None:
    """Pairs (draw at 0, draw at 1) over many seeds have the product distribution."""
    few = SCORES[:6]
    p = np.exp(log_softmax(few.astype(float)))
    pairs = draw(20_000, index=0, scores=few)[0] * 6 + draw(20_000, index=1, scores=few)[0]
    assert chi2_per_degree(pairs, np.outer(p, p).ravel()) < 1.6


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds = rng.integers(0, 2**32, (64, 2), dtype=np.uint32)
    together, _ = draw(64, seeds=seeds)
    alone = [int(draw(1, seeds=seeds[i : i + 1])[0][0]) for i in range(64)]
    assert together.tolist() == alone


def test_top_p_acts_at_the_requests_temperature() -> None:
    """The engine's own sampler takes the nucleus of temperature 1 whatever the temperature."""
    for temperature in (0.5, 1.0, 2.0):
        p = np.exp(log_softmax(SCORES.astype(float), temperature))
        order = np.argsort(-p)
        nucleus = set(order[np.cumsum(p[order]) - p[order] < 0.6].tolist())
        tokens, _ = draw(5000, temperature=temperature, top_p=0.6)
        assert set(tokens.tolist()) == nucleus


def test_top_k_keeps_k_tokens() -> None:
    assert set(draw(5000, temperature=2.0, top_k=4)[0].tolist()) == set(np.argsort(-SCORES)[:4].tolist())


def test_temperature_zero_takes_the_best() -> None:
    assert set(draw(8, temperature=0.0)[0].tolist()) == {int(SCORES.argmax())}


def test_logprobs_are_of_the_whole_distribution() -> None:
    """Not renormalised for the nucleus: they are what an importance ratio needs."""
    tokens, logprobs = draw(200, temperature=0.7, top_p=0.5)
    np.testing.assert_allclose(logprobs, log_softmax(SCORES.astype(float), 0.7)[tokens], atol=1e-5)
    tokens, logprobs = draw(1, temperature=0.0)
    np.testing.assert_allclose(logprobs, log_softmax(SCORES.astype(float))[tokens], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, GREEDY_BELOW, MAX_TEMPERATURE])
@pytest.mark.parametrize(("top_p", "top_k"), [(1e-320, ALL), (1e-38, ALL), (MIN_TOP_P, 1), (1.0, MAX_TOP_K)])
def test_every_parameter_that_a_request_may_have_gives_finite_logprobs(
    temperature: float, top_p: float, top_k: int
) -> None:
    tokens, logprobs = draw(8, temperature=temperature, top_p=top_p, top_k=top_k, scores=SCORES * 1000)
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    assert temperature > 1 or set(tokens.tolist()) == {int(SCORES.argmax())}
