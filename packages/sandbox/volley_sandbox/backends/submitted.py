"""Backends of submitted environments: what the service asks of them beyond `EnvironmentBackend`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from services.env.backend import AgentSpec, EnvironmentBackend
from services.env.episode_types import check_task


class KnownSplits:
    """Mixin for a backend with known numbers of tasks, `splits_of`.

    A subclass sets `name` and `splits_of`.
    """

    name: str
    splits_of: Mapping[str, int]

    async def splits(self) -> tuple[str, ...]:
        return tuple(self.splits_of)

    async def num_tasks(self, split: str) -> int:
        check_task(self.name, self.splits_of, split, 0)
        return self.splits_of[split]


class EnvironmentDescription(Protocol):
    """A submitted environment's description of itself. `entry` is the class in its file, None if it is not a file."""

    @property
    def protocol(self) -> str: ...

    @property
    def entry(self) -> str | None: ...

    @property
    def splits(self) -> Mapping[str, int]: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def has_demonstration(self) -> bool: ...

    @property
    def agent(self) -> AgentSpec | None:
        """How its episodes are played, if an agent plays them."""
        ...


class SubmittedBackend(EnvironmentBackend, Protocol):
    """Backend of a submission, validated before it is used.

    `splits_of` is the number of tasks of each split. `is_remote`: its episodes run on a server elsewhere and may not be
    reproducible. `log`: the newest lines that it printed, and the failures of its episodes.
    """

    @property
    def splits_of(self) -> Mapping[str, int]: ...

    @property
    def has_demonstration(self) -> bool: ...

    @property
    def is_remote(self) -> bool: ...

    @property
    def log(self) -> deque[str]: ...

    async def describe(self) -> EnvironmentDescription:
        """Raises VolleyError if it cannot be used."""
        ...
