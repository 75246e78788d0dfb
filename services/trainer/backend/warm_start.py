"""Warm start of RL: supervised steps on the new model, which the package volley-rl-supervised makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from services.trainer.backend.inputs import BackendInputs, TrainFirst
from services.trainer.interfaces import TrainerBackend
from services.trainer.models.family import Model
from services.trainer.settings import TokenLimits
from shared import packages
from shared.schema import RunConfig


class WarmSteps(Protocol):
    """Steps on examples in memory. `to_wire` returns the examples as messages between processes hold them."""

    def train(self, model: Model) -> Iterator[Any]:
        """Train the model lazily; each step yields its metrics, a dataclass. Raises NonFinite."""
        ...

    def to_wire(self) -> Any: ...


class WarmStartedBackend(TrainerBackend, Protocol):
    """A backend whose first weights may come from supervised steps."""

    def warm_start(self, steps: WarmSteps) -> Iterator[Any]:
        """Train the built model, as `WarmSteps.train`."""
        ...


class WarmStarts(Protocol):
    """See volley_supervised.trainer.warm_start."""

    def opened(self, given: BackendInputs, tokens: TokenLimits, backend: WarmStartedBackend) -> TrainFirst: ...

    def received(self, config: RunConfig, tokens: TokenLimits, examples: Any) -> WarmSteps:
        """Return the steps on the examples of another process's `to_wire`."""
        ...


def warm_starts() -> WarmStarts:
    """Raises ConfigError if the package is not installed."""
    return packages.part("trainer.warm_start")
