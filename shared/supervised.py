"""Supervised training as the core asks about it; the package volley-rl-supervised trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared import packages


@dataclass(frozen=True, slots=True)
class SupervisedSteps:
    """Supervised steps of a run: its warm start, or all steps of a supervised run.

    A step trains on `batch_size` examples, which have `rows` sequences. `n_steps` is None if it depends on the data.
    `demonstrated`: the environment makes the data.
    """

    batch_size: int
    rows: int
    n_steps: int | None
    demonstrated: bool


def supervised_steps(config: Any) -> SupervisedSteps | None:
    """Return the supervised steps of a RunConfig; None if it has none.

    Raises ValueError for a configuration whose settings of them contradict each other.
    """
    found = packages.part("supervised.steps", required=False)
    return None if found is None else found(config)
