"""Interface for an installed package that adds submitted environments, tools, sandboxes and rewards to the service.

The part `environments` of the group `volley.parts` is a subclass of `Extension`. The service works without one, with
built-in environments alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from services.env.backend import LiveEpisode
from services.env.catalogue import Catalogue
from services.env.episode_slots import EpisodeWatcher
from services.env.equipment import Equipment
from services.env.settings import EnvSettings
from services.env.threads import ThreadRunner


class AddedRewards(Protocol):
    """Rewards that the configuration adds to those of environments."""

    def describe(self, env: str) -> Mapping[str, Any] | None:
        """Return the settings of an environment's rewards; None if it has none."""
        ...

    def wrap(self, env: str, episode: LiveEpisode) -> LiveEpisode:
        """Add the environment's rewards to an episode; without any, return it unchanged."""
        ...


class Extension:
    """Additions to the service. This class adds none; a package's subclass overrides what it adds."""

    equipment: Equipment | None = None
    rewards: AddedRewards | None = None
    watcher: EpisodeWatcher | None = None

    def __init__(self, settings: EnvSettings, runner: ThreadRunner) -> None:
        self.settings, self.runner = settings, runner

    @asynccontextmanager
    async def running(self, catalogue: Catalogue) -> AsyncIterator[None]:
        """Open what it adds, and offer its environments in the catalogue. Raises VolleyError."""
        yield

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return coroutine functions that run as long as the service."""
        return ()

    def about(self) -> Mapping[str, Any]:
        """Return its fields in `GET /health`."""
        return {}

    def names(self) -> frozenset[str]:
        """Return the full names of its environments in the catalogue."""
        return frozenset()

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of its environments in `GET /environments`."""
        return ()

    def trouble(self, env: str) -> str | None:
        """Return why episodes of one of its environments fail at present; None if they do not."""
        return None

    def installed(self) -> Sequence[Mapping[str, str]]:
        """Return environments of installed packages that can be submitted. Blocks on disk."""
        return ()
