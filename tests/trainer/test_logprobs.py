"""Chunked log-probabilities: right at every chunk size, and never a whole sequence of logits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms import logprobs
from services.trainer.algorithms.terms.logprobs import LEAST_CHUNK, chunk_size, token_scores
from services.trainer.batches.batch import Batch
from services.trainer.learner.scoring import objective, params_of
from shared.algorithm_schema import GrpoSection
from tests.support import models
from tests.trainer.support import CONFIG, model_of

B, T, D, V = 3, 37, 8, 29


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((B, T, D)).astype(np.float32),
        rng.standard_normal((V, D)).astype(np.float32),
        rng.integers(0, V, (B, T)),
    )


def exact(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp, targets[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_at_every_chunk_size(arrays, chunk: int, temperature: float):
    hidden, head, targets = arrays
    scores = token_scores(hidden, head, targets, temperature, "value", chunk=chunk)
    logprobs, entropy = exact(hidden, head, targets, temperature)
    np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, entropy, atol=1e-5)


def test_gradients_do_not_depend_on_the_chunk(arrays):
    hidden, head, targets = arrays
    weights = np.random.default_rng(1).standard_normal((B, T)).astype(np.float32)

    def loss(hidden, head, chunk):
        return (token_scores(hidden, head, targets, 0.8, "value", chunk=chunk).logprobs * weights).sum()

    one, many = (jax.grad(partial(loss, chunk=c), argnums=(0, 1))(hidden, head) for c in (T, 4))
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_extreme_logits_stay_finite(arrays):
    hidden, head, targets = arrays
    scores = token_scores(hidden * 1e3, head, targets, 1.0, "value", chunk=8)
    assert np.isfinite(scores.logprobs).all()
    assert np.isfinite(scores.entropy).all()


def largest_with(dimension: int, function, *arguments) -> int:
    """Elements of the largest array that has this dimension, in the optimized program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", text)}
    return max(int(np.prod(shape)) for shape in shapes if dimension in shape)


@pytest.fixture
def optimized() -> Iterator[None]:
    """As in use."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimized")
def test_no_buffer_of_the_compiled_step_holds_a_whole_sequence_of_logits(monkeypatch: pytest.MonkeyPatch):
    """Neither forward nor backward. The vocabulary has a size that nothing else has."""
    rows, length, vocab = 2, 4 * LEAST_CHUNK, 1019
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", 0)
    config = CONFIG | {"vocab_size": vocab, "num_hidden_layers": 1}
    model = model_of(models.random_weights(config, 0), config)
    ints, floats = jnp.zeros((rows, length), jnp.int32), jnp.ones((rows, length), jnp.float32)
    batch = Batch(ints, ints, floats, floats, floats, floats, jnp.ones((rows, 1)))
    for entropy in ("value", "gradient"):
        made = algorithm(GrpoSection(entropy_coef=0.1 * (entropy == "gradient")), 1, 16)
        loss = objective(model, made.loss, 1.0, entropy)
        gradient = jax.grad(lambda p, b, loss=loss: loss(p, b)[0])
        assert largest_with(vocab, gradient, params_of(model), batch) == rows * LEAST_CHUNK * vocab


def test_a_chunk_is_as_long_as_its_logits_allow():
    assert chunk_size(1, 2048, 49_152) == 293  # seven chunks of a row of 2,048
    assert chunk_size(4, 1024, 49_152) == 79
    assert chunk_size(16, 1024, 151_936) == LEAST_CHUNK
    assert chunk_size(2, 40, 1019) == 40


@pytest.mark.usefixtures("optimized")
def test_the_check_above_sees_a_whole_sequence_of_logits():
    def unchunked(hidden, head, targets):
        return token_scores(hidden, head, targets, 1.0, "none", chunk=64).logprobs.sum()

    arguments = jnp.ones((2, 64, 8)), jnp.ones((1019, 8)), jnp.zeros((2, 64), jnp.int32)
    assert largest_with(1019, jax.grad(unchunked, argnums=(0, 1)), *arguments) == 2 * 64 * 1019
