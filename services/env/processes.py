"""Interface of processes that play built-in environments, provided by an installed package (part `env.processes`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self, runtime_checkable

from services.env.backend import EnvironmentBackend
from services.env.settings import EnvSettings
from services.env.threads import InThreads
from shared import packages


@runtime_checkable
class ProcessBackend(Protocol):
    """Backend whose episodes run in other processes; `local` is the same environment in the service."""

    @property
    def local(self) -> InThreads: ...


class EnvironmentProcesses(Protocol):
    """Processes for episodes; they end with the context."""

    def backend(self, local: InThreads, kind: str, config: Mapping[str, Any]) -> EnvironmentBackend:
        """Return the environment with its episodes in the processes, as a `ProcessBackend`."""
        ...

    def expect(self, digests: Mapping[str, str]) -> None:
        """Set the digests of data files, by path, for processes started later."""
        ...

    async def keep(self) -> None:
        """Worker: keep the configured number of processes running."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: Any) -> None: ...


@asynccontextmanager
async def environment_processes(settings: EnvSettings) -> AsyncIterator[EnvironmentProcesses | None]:
    """Open the processes that the settings ask for; None for none. Raises ConfigError if no package brings them."""
    if not settings.n_processes:
        yield None
        return
    made: EnvironmentProcesses = packages.part("env.processes")(settings)
    async with made as processes:
        yield processes
