"""Start the processes of a local run with their configuration and environment variables.

Order: Redis, then env (it checks the data), then trainer, rollout servers and orchestrator together.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shared import boot
from shared.clients.base import HttpClient
from shared.config import LoadedConfig
from shared.errors import ConfigError, QueueUnavailable, VolleyError
from shared.files.storage import replace
from shared.process.ports import free_port
from shared.queue import client as redis_client
from shared.queue import server as redis_server
from shared.run import commits
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.services import SERVICES
from shared.services_schema import ServicesSection, TokenFiles
from shared.web.access import Role, read_token, token_for
from volley.layout import python_of, variables_of
from volley.local import external, ports
from volley.local.devices import accelerators
from volley.local.hosts import RunHost
from volley.local.processes import ProcessSpec, Reaper
from volley.local.supervisor import (
    RestartPolicy,
    Say,
    Seen,
    SupervisedProcess,
    Supervision,
    keep_running,
    unseen,
)
from volley.runs import addresses
from volley.runs.record import secret
from volley.session_files import SessionFiles

_REDIS_START_S = 30.0
"""Time for Redis to answer after its start, in seconds."""
_STOP_MARGIN_S = 5.0
"""Time added to a service's own grace and cleanup before it is killed, in seconds."""
_QUEUE_FREE_S = 20.0
"""Time for the Redis server of a killed supervisor to release the queue's folder, in seconds."""


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack: addresses of its HTTP services, a viewer's token, and the local processes (`kept`)."""

    urls: dict[str, str]
    token: str | None
    ca_file: Path | None
    kept: list[Supervision]

    def client(self, name: str, timeout_s: float = 5.0) -> HttpClient:
        return HttpClient(self.urls[name], token=self.token, timeout_s=timeout_s, ca_file=self.ca_file)


@dataclass(frozen=True, slots=True)
class StackSeams:
    """Differences from a run on this machine alone.

    `modules`: by service, the module to run instead, in the environment `base` (for tests). `reach`: maps a process's
    name and address to the address at which other services reach it, such as a proxy's. `place`: this host, if the run
    takes several.
    """

    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    reach: Callable[[str, str], str] = lambda name, url: url
    place: RunHost | None = None


REAL = StackSeams()


@asynccontextmanager
async def running(
    loaded: LoadedConfig,
    folder: RunFolder,
    reaper: Reaper,
    say: Say,
    patience: RestartPolicy,
    seams: StackSeams = REAL,
    seen: Seen = unseen,
) -> AsyncIterator[LocalStack]:
    """Start all services of the run, and yield once they answer. Raises VolleyError, also inside an ExceptionGroup."""
    with ExitStack() as held:
        locks = (
            ()
            if loaded.config.services.redis_url or loaded.config.is_supervised
            else (await _queue_lock(held, folder),)
        )
        builder = _Builder(loaded, folder, seams, say)
        redis = [] if builder.redis is None else [builder.redis_member(builder.redis, locks)]
        await builder.check_redis()
        first_kinds = [name for name, service in SERVICES.items() if not service.needs]
        later_kinds = [name for name, service in SERVICES.items() if service.needs]
        for name in (*(member.spec.name for member in redis), *builder.urls):
            seen(name, "pending")

        def durable_steps() -> int:
            return max((version.step for version in commits.committed(folder)), default=0)

        async with (
            keep_running(redis, reaper, say, patience, seen, durable_steps) as first,
            keep_running(
                builder.members(*first_kinds), reaper, say, patience, seen, durable_steps, waits=False
            ) as second,
            keep_running(builder.members(*later_kinds), reaper, say, patience, seen, durable_steps) as third,
        ):
            for one in second:
                await one.up.wait()
            yield LocalStack(
                {**builder.urls, **builder.external}, builder.token, builder.ca_file, [*first, *second, *third]
            )


async def _queue_lock(held: ExitStack, folder: RunFolder) -> int:
    """Lock the queue's folder; the server inherits the lock. Raises ConfigError if an earlier server still has it."""
    deadline = time.monotonic() + _QUEUE_FREE_S
    while True:
        try:
            return held.enter_context(redis_server.folder_lock(folder.redis))
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


class _Builder:
    """Turns a configuration into processes, and writes chosen ports and secrets to the run's services.yaml."""

    def __init__(self, loaded: LoadedConfig, folder: RunFolder, seams: StackSeams, say: Say) -> None:
        self._folder, self._seams, self._say = folder, seams, say
        services, place = loaded.config.services, seams.place
        self.external = {} if place else external.find(services)
        counts = _counts(loaded.config, folder) if place is None else dict.fromkeys(SERVICES, 0) | dict(place.counts)
        self._accelerators = self._assigned(loaded.config, counts)
        self._engines = engines_of(loaded.config, counts["rollout"])
        given: Mapping[str, Any] = loaded.tree.get("services") or {}
        self._ports = ports.choose(services, given, counts, addresses.ports_before(folder), say)
        self._has_queue = not loaded.config.is_supervised
        is_ours = services.redis_url is None and self._has_queue
        self.redis = _prepared_redis(folder, place) if is_ours else None
        self.urls = ports.urls(services, self._ports, place.address if place else None)
        self._services = self._resolved(services)
        self.token, self.ca_file = token_for(self._services.token_files, Role.VIEWER), services.tls.ca_file
        self._stop_s = services.limits.grace_s + boot.CLEANUP_S + _STOP_MARGIN_S
        self._cpu = loaded.config.rollout.engine.device == "cpu"
        replace(
            folder.services,
            yaml.safe_dump({"services": self._services.model_dump(mode="json")}, sort_keys=True).encode(),
        )
        addresses.write(folder, self.urls, self.external, self._services)
        self._files = self._session_files()

    def _assigned(self, config: RunConfig, counts: Mapping[str, int]) -> Mapping[str, dict[str, str]]:
        """Return the environment variables that show each process its accelerators.

        Raises ConfigError if there are too few, or a process could not use them.
        """
        if (device := config.rollout.engine.device) == "cpu":
            return {}
        found = accelerators().shares(config, counts["rollout"], n_trainers=counts["trainer"])
        kinds = {kind for kind, info in SERVICES.items() if info.process(0) in found}
        for environment in sorted({self._environment_of(kind) for kind in kinds - self._seams.modules.keys()}):
            accelerators().check_backend(device, environment)
        return found

    def _session_files(self) -> SessionFiles:
        folder, services = self._folder, self._services
        paths = [folder.config, folder.services, folder.processes, services.redis_password_file]
        paths += services.token_files.model_dump().values()
        ours = [path for path in paths if path is not None and path.is_relative_to(folder.path)]
        folders = [folder.logs, folder.secrets]
        if self.redis is not None:
            ours.append(self.redis.config)
            folders.append(self.redis.folder)
        return SessionFiles.read(folder.path, ours, folders)

    async def check_redis(self) -> None:
        """Raises QueueUnavailable if an external Redis does not answer, ConfigError if it refuses us."""
        if self.redis is None and self._has_queue:
            try:
                await _ping(self._services)
            except QueueUnavailable as error:
                hint = "start it, or remove services.redis_url to use the embedded server"
                raise QueueUnavailable(f"services.redis_url: {error.detail}", hint) from error

    def redis_member(self, spec: redis_server.ServerSpec, locks: tuple[int, ...]) -> SupervisedProcess:
        async def answers() -> bool:
            try:
                await _ping(self._services)
            except VolleyError:
                return False
            return True

        log = self._folder.logs / "redis.log"
        return SupervisedProcess(
            ProcessSpec("redis", tuple(spec.argv), dict(os.environ), log, inherits=locks),
            answers,
            _REDIS_START_S,
            prepare=self._files.restore,
            mend=lambda start: self._set_aside(spec, log, start),
        )

    def _set_aside(self, spec: redis_server.ServerSpec, log: Path, start: int) -> bool:
        """Let Redis start empty if it cannot load its data. The trainer restores the queue from its log."""
        found = redis_server.set_aside(spec, log, start)
        if found is not None:
            self._say(f"redis could not load its data: it was moved to {found}, and the queue is restored from the log")
        return found is not None

    def members(self, *kinds: str) -> list[SupervisedProcess]:
        return [self._member(kind, i) for kind in kinds for i in range(len(self._ports[kind]))]

    def _member(self, kind: str, i: int) -> SupervisedProcess:
        info = SERVICES[kind]
        name = info.process(i)
        module, url = self._seams.modules.get(kind, info.module), self.urls[name]
        command = [str(python_of(self._environment_of(kind))), "-P", "-m", module]
        command += ["--config", str(self._folder.config), "--config", str(self._folder.services)]
        command += [f"services.{kind}.port={self._ports[kind][i]}"]
        command += [f"services.{kind}.process_id={i}"] if i and not info.replicated else []
        command += [f"rollout.engine.url={self._engines[i]}"] if kind == "rollout" and self._engines else []
        reached = self._seams.reach(name, url)
        command += [f"services.{kind}.url={reached}"] if reached != url or self._seams.place else []
        variables = variables_of(self._environment_of(kind), cpu=self._cpu) | self._accelerators.get(name, {})
        spec = ProcessSpec(name, tuple(command), variables, self._folder.logs / f"{name}.log", self._stop_s)
        return SupervisedProcess(
            spec, lambda: _is_healthy(url, self.ca_file), info.start_s, prepare=self._files.restore
        )

    def _environment_of(self, kind: str) -> str:
        return "base" if kind in self._seams.modules else SERVICES[kind].environment

    def _resolved(self, services: ServicesSection) -> ServicesSection:
        update: dict[str, Any] = {
            name: getattr(services, name).model_copy(update={"port": numbers[0]})
            for name, numbers in self._ports.items()
            if numbers
        }
        if services.trainer.num_processes > 1 and services.trainer.coordinator_address is None:
            address = {"coordinator_address": f"127.0.0.1:{free_port()}"}
            update["trainer"] = update["trainer"].model_copy(update=address)
        place = self._seams.place
        for name in update.keys() & {name for name, info in SERVICES.items() if info.shared or place}:
            url = self.urls[SERVICES[name].process(0)]
            if (reached := self._seams.reach(name, url)) != url or place:
                update[name] = update[name].model_copy(update={"url": reached})
        if self.redis is not None:
            address = place.host if place else "127.0.0.1"
            update |= {
                "redis_url": self._seams.reach("redis", f"redis://{address}:{self.redis.port}/0"),
                "redis_password_file": secret(self._folder, "redis", self.redis.password),
            }
        if services.token_files == TokenFiles():
            update["token_files"] = TokenFiles(
                **{role: secret(self._folder, f"token_{role}") for role in TokenFiles.model_fields}
            )
        return services.model_copy(update=update)


def _prepared_redis(folder: RunFolder, place: RunHost | None) -> redis_server.ServerSpec:
    """Raises ConfigError."""
    if place is None or place.redis_password is None:
        return redis_server.prepare(folder.redis)
    password = read_token(place.redis_password, "services.redis_password_file")
    return redis_server.prepare(folder.redis, host=place.listen, port=place.redis_port, password=password)


def engines_of(config: RunConfig, n_rollout: int) -> tuple[str, ...]:
    """Return the addresses of external engines that the rollout servers forward to, if any. Raises ConfigError."""
    urls = config.rollout.engine.urls
    if urls and len(urls) < n_rollout:
        raise ConfigError(
            f"rollout.engine.url has {len(urls)} address, but services.rollout_replicas is {n_rollout}",
            "give one address for each rollout server",
        )
    return urls


def _counts(config: RunConfig, folder: RunFolder) -> dict[str, int]:
    """Number of processes to start here, by service."""
    counts = config.local_processes()
    if config.is_supervised and folder.demonstrations.exists():
        counts["env"] = 0
    return counts


async def _ping(services: ServicesSection) -> None:
    assert services.redis_url is not None
    client = redis_client.connect(services.redis_url, services.redis_password_file, services.tls.ca_file)
    async with client:
        with redis_client.translated(client):
            await client.ping()


async def _is_healthy(url: str, ca_file: Path | None) -> bool:
    async with HttpClient(url, timeout_s=2.0, ca_file=ca_file) as client:
        try:
            await client.get("/health", attempts=1)
        except VolleyError:
            return False
        return True
