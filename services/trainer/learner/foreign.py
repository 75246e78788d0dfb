"""Seam to a learner of another project (`trainer.backend`), which computes the policy's losses and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

import optax

from services.trainer.learner.train_step import Params, PolicyLearner
from services.trainer.models.family import Model
from shared.algorithm_base import PolicyGradientSection
from shared.backend_kinds import BackendKind


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """Settings that such a learner trains by. `n_micro` is the number of micro-batches that make a step."""

    kind: BackendKind
    section: PolicyGradientSection
    temperature: float
    n_micro: int
    n_iterations: int
    num_generations: int


class ForeignLearner(PolicyLearner, Protocol):
    """Parameters under training. An update compares trainer and engine by the batches' `old` log-probabilities."""

    def configure(self, optimizer: optax.GradientTransformation, options: ForeignOptions) -> None:
        """Train the next steps by these; parameters and optimizer state stay."""
        ...


type MakeLearner = Callable[[Model, Params, optax.GradientTransformation, ForeignOptions], ForeignLearner]
"""Takes over the trained parameters of the model by leaf name, on their devices. Raises ConfigError."""


def maker(kind: BackendKind) -> MakeLearner:
    """Import what makes the learner of a backend, which may take seconds."""
    return resolve_name(kind.learner)
