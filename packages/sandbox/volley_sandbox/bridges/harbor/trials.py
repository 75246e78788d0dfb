"""One trial of Harbor whose agent takes its commands from the service."""

import asyncio
import contextvars
import json
import time
import tomllib
import uuid
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from engines import ENGINES, owner_in
from folders import COMPOSE, notes, read_compose
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import NetworkMode, VerifierEnvironmentMode
from harbor.models.task.task import Task
from harbor.models.trial.config import ArtifactConfig, TrialConfig
from harbor.trial.trial import Trial
from shell import END_MARKED, END_OTHERS, NOTE, Lost, ask, probe, run_command

STORAGE_MB = 10_240
"""Limit of a container's files if task.toml has no `storage_mb`; Docker itself enforces none."""
EPISODE: contextvars.ContextVar["HarborTrial"] = contextvars.ContextVar("EPISODE")
"""The trial that runs in this context."""


@dataclass(frozen=True)
class Settings:
    """`owner` is the run's name. Times in seconds; `options` are keyword arguments of Harbor's environment."""

    environment: str
    options: dict[str, Any]
    folder: str
    owner: str
    max_starting: int
    max_judging: int
    max_lifetime_s: float
    network: str


class Player(BaseAgent):
    """Agent whose commands the service sends. Its episode is set after it is made."""

    capabilities = AgentCapabilities(skills=True, mcp_servers=True, mcp_http_headers=False)
    episode: "HarborTrial"

    @staticmethod
    def name() -> str:
        return "volley"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed: commands run in the container's own shell."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        await self.episode.play(instruction, environment)


@dataclass
class HarborTrial:
    """One trial in progress. `phase` is done when the next instruction, or the trial's result, is there.

    `why` is the reason of a reward of 0, `unjudged` that of none from tests that ran to their end, and `lost` that of
    none because the container, or what runs it, failed.
    """

    number: str
    task: Task
    settings: Settings
    place: Path
    starting: asyncio.Semaphore
    stopping: asyncio.Semaphore
    judging: asyncio.Semaphore
    fresh: bool = False
    commands: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[Any]] | None] = field(default_factory=asyncio.Queue)
    phase: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    trial: Any = None
    playing: bool = False
    last: bool = False
    over_disk: bool = False
    why: str = ""
    unjudged: str = ""
    lost: str = ""

    @property
    def has_compose(self) -> bool:
        """True if the task's own Compose file may share the processes, networks or files of the machine."""
        return (self.task.paths.environment_dir / "docker-compose.yaml").exists()

    @property
    def storage_mb(self) -> int:
        return self.task.config.environment.storage_mb or STORAGE_MB

    async def play(self, instruction: str, environment: BaseEnvironment) -> None:
        """Carry out commands until the service ends the phase, or none in a phase after the last. Raises Lost."""
        if self.last:
            return
        try:
            await self._play(instruction, environment)
        except BaseException as error:
            self.lost = self.lost or str(error) or "it was not played to its end"
            raise

    async def _play(self, instruction: str, environment: BaseEnvironment) -> None:
        kept = (await ask(environment, NOTE)).split()
        self.playing = True
        self.phase.set_result({"instruction": instruction + notes(self.task.config.environment)})
        try:
            while (asked := await self.commands.get()) is not None:
                request, answered = asked
                try:
                    began = time.monotonic()
                    found = await run_command(environment, self.number, request["command"], request["timeout_s"])
                    answered.set_result({**found, "seconds": time.monotonic() - began})
                except BaseException as error:
                    answered.set_exception(Lost(str(error) or "the episode was closed"))
                    raise
            apart = self.settings.environment in ENGINES and not self.has_compose
            end = END_OTHERS.format(kept=" ".join(kept)) if apart else END_MARKED.format(number=self.number)
            await ask(environment, end)
        finally:
            self.playing = False

    async def next_phase(self, *, last: bool) -> dict[str, Any]:
        """End this phase, and all others with `last`; return the next instruction or the rewards."""
        self.last = self.last or last
        self.phase = asyncio.get_running_loop().create_future()
        self.commands.put_nowait(None)
        return await self.phase


class Loader(Trial):
    """Loads a task as Harbor does, then applies the service's settings to it."""

    @classmethod
    async def _load_task(cls, config: TrialConfig) -> tuple[Task, Any]:
        task, download = await Trial._load_task(config)
        episode = EPISODE.get()
        if is_isolated(task, episode.settings.network):
            # the overlay isolates engines' containers, without the side car that Harbor would build for it
            public = episode.settings.environment in ENGINES
            mode = NetworkMode.PUBLIC if public else NetworkMode.NO_NETWORK
            task.config.environment.network_mode = mode
            for phase in (task.config.agent, task.config.verifier, task.config.verifier.environment):
                if phase is not None and phase.network_mode == NetworkMode.NO_NETWORK:
                    phase.network_mode = mode
        if episode.fresh and task.config.verifier.environment_mode is None and task.config.verifier.environment is None:
            task.config.verifier.environment_mode = VerifierEnvironmentMode.SEPARATE
            config.artifacts = [*config.artifacts, ArtifactConfig(source=working_folder(task))]
        return task, download


class Watched:
    """Part of the class of a trial's environments: labels and isolates them, and looks at them before their end."""

    def __init__(self, **kwargs: Any) -> None:
        episode = EPISODE.get()
        if episode.settings.environment in ENGINES:
            given = list(kwargs.get("extra_docker_compose") or ())
            kwargs["extra_docker_compose"] = [*given, write_overlay(episode, Path(kwargs["environment_dir"]))]
        super().__init__(**kwargs)

    async def start(self, force_build: bool) -> None:
        episode: HarborTrial = EPISODE.get()
        if episode.trial is None or self is episode.trial.agent_environment:  # its start is bounded by the worker
            await super().start(force_build)
        else:
            async with episode.starting:
                await super().start(force_build)

    async def stop(self, delete: bool) -> None:
        """Note whether the container still answers, then remove it."""
        episode: HarborTrial = EPISODE.get()
        async with episode.stopping:
            try:
                await probe(self)
            except Lost as error:
                episode.lost = episode.lost or str(error) or "it gave no answer"
            await super().stop(delete)


def container_class(environment: str) -> type:
    """Class of Harbor's environments of a type, or at MODULE:CLASS, watched."""
    if ":" in environment:
        base = EnvironmentFactory.get_environment_class(import_path=environment)
    else:
        base = EnvironmentFactory.get_environment_class(EnvironmentType(environment))
    return type("Container", (Watched, base), {})


def is_isolated(task: Task, network: str) -> bool:
    """True for a task that has no network at all; Harbor's own policies apply to the others."""
    data = tomllib.loads(task.paths.config_path.read_text(encoding="utf-8"))
    sections = [data.get(name, {}) for name in ("environment", "agent", "verifier")]
    sections += [step.get(name, {}) for step in data.get("steps", []) for name in ("agent", "verifier")]
    sections.append(data.get("verifier", {}).get("environment", {}))
    modes = {one["network_mode"] for one in sections if "network_mode" in one}
    if (internet := sections[0].get("allow_internet")) is not None:
        modes.add("public" if internet else "no-network")
    return modes == {"no-network"} or (not modes and network == "declared")


def write_overlay(episode: "HarborTrial", environment: Path) -> Path:
    """Write a Compose file for one environment: labels, a quick end, and no network for tasks without one."""
    run, number, owner = episode.settings.owner, episode.number, owner_in(Path(episode.settings.folder)).name
    main: dict[str, Any] = {
        "labels": {"volley.owner": owner, "volley.run": run, "volley.episode": number},
        "stop_grace_period": "1s",
    }
    extra: dict[str, Any] = {"services": {"main": main}}
    if is_isolated(episode.task, episode.settings.network):
        if (environment / "docker-compose.yaml").exists():
            extra["networks"] = {name: {"internal": True} for name in isolated_networks(environment)}
        else:
            main["network_mode"] = "none"
    path = episode.place / f"volley-{uuid.uuid4().hex[:8]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(extra), encoding="utf-8")
    return path


def isolated_networks(environment: Path) -> list[str]:
    """Networks of a task's Compose file. Raises ValueError if a service leaves them for the machine's."""
    compose = read_compose(environment)
    for name, service in compose["services"].items():
        if (mode := service.get("network_mode")) not in (None, "none") and not str(mode).startswith("service:"):
            raise ValueError(
                f"{COMPOSE}: the service {name} has network_mode = {mode!r}, but task.toml asks for no network "
                '(environment.network_mode = "public")'
            )
    return ["default", *compose["networks"]]


def working_folder(task: Task) -> str:
    """Folder of the model's work. Raises ValueError if the task names none."""
    found, dockerfile = task.config.environment.workdir, task.paths.environment_dir / "Dockerfile"
    if found is None and dockerfile.exists():
        found = last_workdir(dockerfile.read_text(encoding="utf-8"))
    if found in (None, "/"):
        raise ValueError("judge=fresh needs a WORKDIR below / in the Dockerfile, or environment.workdir in task.toml")
    return found


def last_workdir(dockerfile: str) -> str | None:
    """WORKDIR of the last stage, if it is plain text."""
    found = None
    for line in dockerfile.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            found = None
        elif word.upper() == "WORKDIR" and "$" not in rest:
            found = str(PurePosixPath(found or "/", rest.strip().strip('"')))
    return found
