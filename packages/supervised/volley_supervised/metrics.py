"""Metrics of a supervised step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SupervisedMetrics:
    """Metrics for a line of `sft.jsonl`.

    `loss` is in nats (mean over learned tokens, or over pairs), `tokens` counts learned tokens, `more` has further
    metrics of the objective.
    """

    step: int
    max_steps: int
    loss: float
    grad_norm: float
    tokens: int
    more: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_line(self) -> dict[str, Any]:
        names = ("step", "max_steps", "loss", "grad_norm", "tokens")
        return {name: getattr(self, name) for name in names} | dict(self.more)
