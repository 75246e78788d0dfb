"""What a supervised step tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SupervisedMetrics:
    """A line of `sft.jsonl`: the loss in nats (mean over learned tokens, or over pairs), `tokens` learned from, and
    what else the objective tells.
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
