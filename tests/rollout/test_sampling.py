"""The sampler against numpy: distribution, filters, seeds."""

import jax
import numpy as np
import pytest

from services.rollout.api.validation import GREEDY_BELOW, MAX_TEMPERATURE, MAX_TOP_K, MIN_TOP_P
from services.rollout.engines.sglang_jax.scheduling.sampling import _filter, guided, sample
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
    min_p: float = 0.0,
    top_k: int = ALL,
    seeds: np.ndarray | None = None,
    index: int = 0,
    scores: np.ndarray = SCORES,
) -> tuple[np.ndarray, np.ndarray]:
    """n draws from the same scores, each with its own seed."""
    words = np.stack([np.zeros(n), np.arange(n)], 1).astype(np.uint32) if seeds is None else seeds
    parameters = ((temperature, np.float32), (top_p, np.float32), (min_p, np.float32), (top_k, np.int32))
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


@pytest.mark.parametrize("allowed", [1.0, 0.02])
def test_draws_from_many_blocks_follow_the_softmax(allowed: float) -> None:
    """Also where whole blocks are forbidden. The vocabulary is no multiple of a block."""
    many = np.random.default_rng(3)
    scores = (many.normal(size=2500) * 3).astype(np.float32)
    scores[many.random(2500) >= allowed] = -np.inf
    tokens, logprobs = draw(5000, scores=scores)
    with np.errstate(divide="ignore"):
        expected = log_softmax(scores.astype(float))
    assert chi2_per_degree(tokens, np.exp(expected)) < 1.6
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)


@pytest.mark.parametrize("size", [50, 2048, 2049, 5000])
def test_greedy_takes_the_first_of_equals(size: int) -> None:
    scores = np.random.default_rng(size).integers(0, 3, (1, size)).astype(np.float32)
    scores[0, : size // 2] -= 3
    assert draw(1, temperature=0.0, scores=scores[0])[0][0] == scores[0].argmax()
    assert draw(1, temperature=1.0, top_k=1, scores=np.arange(size, dtype=np.float32))[0][0] == size - 1


def test_draws_at_successive_positions_of_one_request_follow_the_softmax() -> None:
    same = np.tile(np.array([[0, 7]], np.uint32), (1, 1))
    tokens = np.concatenate([draw(1, seeds=same, index=i)[0] for i in range(3000)])
    assert chi2_per_degree(tokens, np.exp(log_softmax(SCORES.astype(float)))) < 1.6


def test_positions_and_seeds_are_independent_of_each_other() -> None:
    """Pairs (draw at 0, draw at 1) over many seeds have the product distribution."""
    few = np.where(np.arange(50) < 6, SCORES, -np.inf).astype(np.float32)
    p = np.exp(log_softmax(SCORES[:6].astype(float)))
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


@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
def test_the_tokens_that_stay_are_those_of_a_sort(scale: float) -> None:
    """Rows with ties, forbidden tokens, both zeros, all filters at once; a token that ties with the last one stays."""
    n, size = 32, 3000
    logits = (rng.normal(size=(n, size)) * scale).astype(np.float32)
    logits[:8] = np.round(logits[:8])
    logits[4:12, ::2] = -np.inf
    logits[12] = 0.0
    logits[13, ::2] = -0.0
    top_p = rng.choice([1.0, 0.9, 0.3, 1e-6], n).astype(np.float32)
    min_p = rng.choice([0.0, 0.01, 1.0], n).astype(np.float32)
    top_k = rng.choice([ALL, size, 50, 1], n).astype(np.int32)
    stays = np.isfinite(np.asarray(jax.jit(_filter)(logits, top_p, min_p, top_k)))
    for row, p, least, k, found in zip(logits, top_p, min_p, top_k, stays, strict=True):
        probs = np.exp(log_softmax(row.astype(float)))
        values, group = np.unique(row, return_inverse=True)
        masses, counts = np.bincount(group, probs), np.bincount(group)
        mass_above = (masses[::-1].cumsum()[::-1] - masses)[group]
        n_above = (counts[::-1].cumsum()[::-1] - counts)[group]
        expected = (n_above < k) & ((mass_above < p) | (p >= 1) | (row == values[-1])) & np.isfinite(row)
        expected &= probs >= least * probs.max()
        close = (np.abs(mass_above - p) < 1e-5) | (np.abs(probs - least * probs.max()) < 1e-6 * probs.max())
        assert (found == expected)[~close | (n_above >= k)].all()
        assert found[row.argmax()]


def test_an_infinite_logit_is_drawn_whatever_is_filtered() -> None:
    logits = np.array([[1.0, np.inf, 2.0]], np.float32)
    for top_p, min_p, top_k in ((0.9, 0.0, ALL), (1.0, 0.1, ALL), (1.0, 0.0, 2), (0.5, 0.5, 1)):
        kept = _filter(logits, np.float32([top_p]), np.float32([min_p]), np.int32([top_k]))
        assert int(np.asarray(kept).argmax()) == 1


def test_temperature_zero_takes_the_best() -> None:
    assert set(draw(8, temperature=0.0)[0].tolist()) == {int(SCORES.argmax())}


def test_logprobs_are_of_the_whole_distribution() -> None:
    """Not renormalised for the nucleus: they are what an importance ratio needs."""
    tokens, logprobs = draw(64, temperature=0.7, top_p=0.5)
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


def test_min_p_drops_tokens_below_its_share_of_the_likeliest() -> None:
    for temperature in (0.5, 1.0, 2.0):
        p = np.exp(log_softmax(SCORES.astype(float), temperature))
        tokens, logprobs = draw(5000, temperature=temperature, min_p=0.15)
        assert set(tokens.tolist()) == set(np.flatnonzero(p >= 0.15 * p.max()).tolist())
        np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=1e-5)


def test_biases_and_masks_change_the_draw_and_not_its_logprob() -> None:
    """A row without constraints between rows with some draws as before."""
    n = 5000
    rows = [np.full(n, value, dtype) for value, dtype in ((0.7, np.float32), (1.0, np.float32), (0.0, np.float32))]
    rest = np.full(n, ALL, np.int32), np.stack([np.zeros(n), np.arange(n)], 1).astype(np.uint32), np.zeros(n, np.int32)
    scores, forced = np.tile(SCORES, (n, 1)), np.full(n, -1, np.int32)
    best, allowed = int(SCORES.argmax()), np.array([1, 2, 40, 47])
    mask = np.full((n, 3), 0xFFFFFFFF, np.uint32)
    mask[0::2] = 0
    for token in allowed:
        mask[0::2, token // 32] |= np.uint32(1 << token % 32)
    ids, bias = np.zeros((n, 4), np.int32), np.zeros((n, 4), np.float32)
    ids[0::2, :2], bias[0::2, :2] = (40, 47), (1.5, -np.inf)
    guided_BV = jax.jit(guided)(scores, ids, bias, mask)
    tokens, logprobs = map(np.asarray, compiled(scores, *rows, *rest, forced, guided_BV))
    logits = np.full(50, -np.inf)
    logits[allowed] = SCORES[allowed]
    logits[40] += 1.5
    logits[47] = -np.inf
    assert set(tokens[0::2].tolist()) == {1, 2, 40}
    drawn = np.searchsorted(allowed, tokens[0::2])
    assert chi2_per_degree(drawn, np.exp(log_softmax(logits[[1, 2, 40]], 0.7))) < 4
    np.testing.assert_allclose(logprobs, log_softmax(SCORES.astype(float), 0.7)[tokens], atol=1e-5)
    free, _ = draw(n, temperature=0.7)
    assert tokens[1::2].tolist() == free[1::2].tolist()
    greedy = compiled(scores, np.zeros(n, np.float32), *rows[1:], *rest, forced, guided_BV)[0]
    assert set(np.asarray(greedy)[0::2].tolist()) == {int(allowed[logits[allowed].argmax()])}
    assert set(np.asarray(greedy)[1::2].tolist()) == {best}
