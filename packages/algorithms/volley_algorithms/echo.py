"""ECHO (environment cross-entropy hybrid objective, arXiv:2605.24517): the policy also learns to predict the
environment. The loss is GRPO's on the sampled tokens, plus

    observation_coef (1 / n) sum over the step's n observation tokens of -log p(token)

An observation token is one that the environment wrote after the first sampled token of its sequence: the answers of
tools, states of a game, messages of a user, with the chat template around them. Prompts are not. Both terms come from
the same forward pass, have denominators of their own, and the second needs no reward, so failed episodes teach too.
With a sampling temperature other than 1, p is the policy's at that temperature.

Sources: the paper's objective; prime-rl `orchestrator/algo/echo.py` (a coefficient of 0.1, separate denominators).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.algorithm import Needs
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.policy_gradient import Clipped
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from volley_algorithms.estimators import Estimated
from volley_algorithms.sections import EchoSection


class Echo(Estimated[EchoSection], Clipped[EchoSection]):
    """GRPO that also predicts the environment."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, observations=True)

    def loss(self, scores: TokenScores, batch: Batch) -> tuple[jax.Array, Statistics]:
        assert batch.observed is not None
        loss, found = super().loss(scores, batch)
        nll = jnp.where(batch.observed > 0, -scores.logprobs, 0.0)
        loss = loss + self.section.observation_coef * (nll * batch.observed).sum()
        return loss, {**found, "observation_nll": statistics.mean(nll, (batch.observed > 0).astype(jnp.float32))}
