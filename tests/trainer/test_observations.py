"""ECHO: tokens of the environment in the loss, in rows of their own and packed, in trees too."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import (
    BatchLayout,
    Row,
    arranged,
    assembled,
    left_out,
    policy_rows,
    weigh_observations,
    with_observations,
)
from shared.algorithm_schema import GrpoSection
from shared.types import Branch, VersionSpan, WeightVersion
from tests.trainer.test_algorithms import MODEL_TURNS, VERSION, N, trajectory
from volley_algorithms.sections import EchoSection

START = WeightVersion(1, 0)


def with_branch():
    """The branch leaves after the first turn and reads an answer of its own before it samples."""
    mask = np.array([0, 0, 1, 1], np.uint8)
    own = Branch(
        parent=0,
        shared=MODEL_TURNS[0][1],
        token_ids=np.array([90, 91, 92, 93], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=(VersionSpan(VERSION, 9, 11),),
        turns=(),
    )
    made = trajectory(1.0, branches=(own,))
    made.validate()
    return made


def rows_of(*trajectories) -> list[Row]:
    return weigh_observations([row for one in trajectories for row in with_observations(policy_rows(one, START))])


def test_observations_are_what_the_environment_wrote_after_the_first_sampled_token():
    (row,) = with_observations(policy_rows(trajectory(1.0), START))
    assert np.flatnonzero(row.observed).tolist() == [7, 8]
    trunk, branch = with_observations(policy_rows(with_branch(), START))
    assert np.flatnonzero(trunk.observed).tolist() == [7, 8]
    assert np.flatnonzero(branch.observed).tolist() == [7, 8]
    assert sum(float(one.observed.sum()) for one in rows_of(with_branch(), trajectory(0.0))) == pytest.approx(1.0)
    assert not left_out(row).observed.any()


@pytest.mark.parametrize("tokens", [None, 64], ids=["a sequence a row", "packed"])
def test_the_loss_is_grpos_and_the_mean_likelihood_of_observations(tokens: int | None):
    """Every token's log-probability is a number of its own, so a token at a wrong place changes the value."""
    rows = rows_of(with_branch(), trajectory(0.0), trajectory(1.0, task=2))
    rows = [replace(row, advantages=np.linspace(-1, 1, len(row.ids))) for row in rows]
    layout = BatchLayout((32,), 4 if tokens is None else 2, 0, tokens)
    parts = arranged(rows, layout, 1)
    weights = np.full(len(rows), 0.1)
    batches = assembled(rows, weights, parts, 0)
    value, plain = 0.0, 0.0
    for batch in batches:
        logprobs = -jnp.asarray(batch.targets, jnp.float32) / 64.0
        scores = TokenScores(logprobs, jnp.zeros_like(logprobs))
        value += float(algorithm(EchoSection(name="echo", observation_coef=0.5), 1, 8).loss(scores, batch)[0])
        plain += float(algorithm(GrpoSection(), 1, 8).loss(scores, batch)[0])
    seen = np.concatenate([row.ids[row.observed > 0] for row in rows])
    assert len(seen) == 8
    assert value - plain == pytest.approx(0.5 * seen.mean() / 64.0, rel=1e-5)


def test_the_gradient_reaches_observations_alone_with_their_share():
    rows = [replace(row, advantages=np.zeros(N)) for row in rows_of(trajectory(1.0))]
    (batch,) = assembled(rows, np.ones(1), arranged(rows, BatchLayout((16,), 1, 0), 1), 0)
    made = algorithm(EchoSection(name="echo"), 1, 8)

    def of(x: jax.Array):
        return made.loss(TokenScores(x, jnp.zeros_like(x)), batch)

    (_, told), gradient = jax.value_and_grad(of, has_aux=True)(jnp.full(batch.ids.shape, -2.0))
    assert np.flatnonzero(gradient[0]).tolist() == [6, 7]
    np.testing.assert_allclose(gradient[0, 6:8], -0.1 / 2, rtol=1e-6)
    assert statistics.values(jax.device_get(told))["observation_nll"] == pytest.approx(2.0)
