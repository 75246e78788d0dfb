"""Backends that `trainer.backend` can name: the trainer's own, `volley`, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared import packages

OWN = "volley"


@dataclass(frozen=True, slots=True)
class BackendKind:
    """Description of another project's losses and optimizer steps, without their code.

    Args:
        learner: `MODULE:NAME` that makes a learner (`services.trainer.learner.foreign.MakeLearner`). Only the trainer
            imports it.
        n_logits: number of float32 arrays of all logits that are live at once in its loss.
        problem: from a RunConfig of RL, the first setting that it cannot train with, and what to choose; None if there
            is none.
    """

    learner: str
    n_logits: int
    problem: Callable[[Any], str | None]


def names() -> list[str]:
    """Return the names of all backends."""
    return [OWN, *packages.found(packages.BACKENDS)]


def kind_of(name: str) -> BackendKind | None:
    """Return the backend of a name; None for the trainer's own. Raises ConfigError if its package cannot be loaded."""
    return None if name == OWN else packages.load(packages.found(packages.BACKENDS)[name])
