"""Accelerators of this machine, which an installed package finds, checks and assigns to the processes of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from shared import packages
from shared.schema import RunConfig


class DeviceAssigner(Protocol):
    """The part `accelerators`; its functions raise ConfigError."""

    def check_device(self, kind: Literal["tpu", "gpu"], environments: Iterable[str]) -> None:
        """Check that this machine has such an accelerator, and that JAX of the virtual environments can use it."""
        ...

    def check_backend(self, kind: Literal["tpu", "gpu"], environment: str) -> None:
        """Check that JAX of a virtual environment can use such accelerators."""
        ...

    def shares(self, config: RunConfig, n_rollout: int, *, n_trainers: int) -> dict[str, dict[str, str]]:
        """Return the environment variables that show each process its own accelerators, by process name."""
        ...


def accelerators() -> DeviceAssigner:
    """Raises ConfigError if no package brings them."""
    return packages.part("accelerators")
