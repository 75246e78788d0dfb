"""Extension of the env service: sandboxes, submitted environments, tools, rewards."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request

from services.env.api.state import state_of
from services.env.catalogue import Catalogue
from services.env.extension import Extension
from services.env.settings import ConfiguredSource, EnvSettings
from services.env.threads import ThreadRunner
from shared.errors import ConfigError, InputError
from volley_python.submissions.packing import content_of
from volley_sandbox.backends.equipment import EquippingToolbox
from volley_sandbox.backends.remote.site import open_access
from volley_sandbox.harbor.containers import Containers, HarborSettings
from volley_sandbox.players.backend import WithPlayers, open_players
from volley_sandbox.rewards.rewards import Rewards
from volley_sandbox.sandbox.limits import SandboxLimits
from volley_sandbox.sandbox.process.containers import ContainerSettings
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.installed import installed
from volley_sandbox.submissions.offers import Offers
from volley_sandbox.submissions.programs import AgentPrograms
from volley_sandbox.submissions.store import SubmissionStore
from volley_sandbox.submissions.submission import Submission
from volley_sandbox.submissions.submissions import Submissions
from volley_sandbox.tools.mcp import McpServers
from volley_sandbox.tools.toolset import ANY_TOOLS, ToolSet

MAX_TRIALS = 8
"""Concurrent requests that try tools; each may start a sandbox or call another server."""


class SandboxExtension(Extension):
    """Sandboxes, tools, rewards and submissions of the service.

    `tools` are those that any environment can have; `tool_places` bounds concurrent requests that try tools.
    """

    submissions: Submissions

    def __init__(self, settings: EnvSettings, runner: ThreadRunner) -> None:
        super().__init__(settings, runner)
        section = settings.section
        self._sandboxes = Sandboxes(max_running=settings.max_sandboxes, containers=_containers(settings))
        self._servers = McpServers()
        self.equipment = EquippingToolbox(self._sandboxes, runner, self._servers, section.unsandboxed)
        self.tools = ToolSet(self.equipment, ANY_TOOLS)
        self.tool_places = asyncio.Semaphore(MAX_TRIALS)

    @asynccontextmanager
    async def running(self, catalogue: Catalogue) -> AsyncIterator[None]:
        """Open sandboxes, servers and stores, and submit what the configuration names by file.

        Raises ConfigError, Unavailable, StorageUnavailable.
        """
        settings = self.settings
        section, folder = settings.section, settings.folder
        containers = Containers(HarborSettings(section.harbor, settings.run, folder / "trials", folder / "pythons"))
        rewarding = Rewards(settings.rewards, section.reward_servers, folder, settings.ca_file)
        playing = open_players(getattr(section, "players", None), folder, settings.ca_file)
        async with (
            self._sandboxes,
            self._servers,
            containers.running(),
            rewarding as self.rewards,
            playing as with_players,
        ):
            self.watcher = self.submissions = self._submissions(catalogue, containers, with_players)
            await self.submissions.open()
            for full_name, source in settings.sources.items():
                await submit_configured(self.submissions, full_name, source)
            yield

    def _submissions(self, catalogue: Catalogue, containers: Containers, with_players: WithPlayers) -> Submissions:
        """Raises ConfigError."""
        settings, section = self.settings, self.settings.section
        store = SubmissionStore(settings.submitted)
        remotes = open_access(section.remote_tokens_file, settings.ca_file, settings.deadline_s)
        programs = AgentPrograms(store, settings.folder, section.package_index, containers)
        limits = SandboxLimits(memory_mb=section.sandbox_memory_mb)
        known = (self._sandboxes, remotes, programs, limits, settings.deadline_s, settings.ca_file, with_players)
        offers = Offers(store, catalogue, *known)
        return Submissions(store, catalogue, self._sandboxes, programs, offers, unsandboxed=section.unsandboxed)

    def workers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return (self.submissions.validate_waiting, self.submissions.judge_canaries)

    def about(self) -> Mapping[str, Any]:
        tier = self._sandboxes.tier
        return {"sandbox": tier.describe() if tier else None}

    def names(self) -> frozenset[str]:
        return frozenset(version.full_name for version in self.submissions.all())

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [version.describe() for version in self.submissions.listed()]

    def trouble(self, env: str) -> str | None:
        return self.submissions.trouble(env)

    def installed(self) -> Sequence[Mapping[str, str]]:
        return [one.describe() for one in installed()]


def _containers(settings: EnvSettings) -> ContainerSettings | None:
    section = settings.section.sandbox
    if section.kind != "container":
        return None
    return ContainerSettings(section, settings.run, settings.folder / "sandboxes")


async def submit_configured(submissions: Submissions, full_name: str, source: ConfiguredSource) -> None:
    """Submit an environment that the configuration names by file.

    Raises ConfigError, Unavailable.
    """

    def read() -> Submission:
        content, archive = content_of(source.found)
        if hashlib.sha256(content).hexdigest() != source.sha256:
            raise ConfigError(
                f"{source.found.path} has changed since the run's configuration was made",
                "restore the file, or start another run",
            )
        return Submission(full_name.partition("@")[0], content, source.found.entry, source.config, 0.0, archive)

    try:
        await submissions.ensure(full_name, read)
    except InputError as error:
        raise ConfigError(f"{source.found.path}: {error.detail}", error.hint) from error


def extension_of(request: Request) -> SandboxExtension:
    """Return this package's part of the service's state."""
    extension = state_of(request).extension
    assert isinstance(extension, SandboxExtension)
    return extension
