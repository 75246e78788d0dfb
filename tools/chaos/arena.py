"""Stack of real processes with a proxy on every link, for fault injection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.clients.base import HttpClient
from shared.config import LoadedConfig
from shared.errors import QueueUnavailable, VolleyError
from shared.queue.client import command, connect
from shared.run import commits
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tools.chaos.plan import LINKS
from tools.chaos.proxy import Proxy
from volley.local import stack
from volley.local.processes import Child, ProcessSpec, Reaper
from volley.local.stack import LocalStack, StackSeams
from volley.local.supervisor import RestartPolicy, Supervision

_POLL_S = 0.1
_PROBE_S = 2.0
_TIRELESS = RestartPolicy(restarts=10**9, window_s=0.0, pause_s=0.1, longest_pause_s=0.1, hung_s=120.0)
SIMULATED = {"trainer": "tools.simulated.trainer", "rollout": "tools.simulated.rollout"}


class RecoveryTimeout(VolleyError):
    """The run did not recover in time."""

    title = "No recovery in time"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A durable version, and the monotonic time at which it was first observed."""

    at: float
    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Zombie:
    """A trainer that resumed or continued after it was replaced.

    `at`: newest durable version then. `fenced`: it ended itself because it was replaced. `last_words`: its last error.
    """

    at: WeightVersion
    fenced: bool
    last_words: str


class Arena:
    """A running stack.

    `durable`: newest durable versions in order of appearance. `zombies`: trainers that were replaced while alive.
    `deadline_s`: time for each recovery.
    """

    def __init__(
        self, folder: RunFolder, running: LocalStack, links: dict[str, Proxy], reaper: Reaper, deadline_s: float
    ) -> None:
        self.folder, self.links, self.reaper, self.deadline_s = folder, links, reaper, deadline_s
        self._running, self._clients = running, dict[str, HttpClient]()
        self.durable: list[Sighting] = []
        self.zombies: list[Zombie] = []

    @property
    def services(self) -> Sequence[str]:
        return [kept.name for kept in self._running.kept]

    @property
    def supervised(self) -> Sequence[Supervision]:
        return self._running.kept

    def kept(self, name: str) -> Supervision:
        return next(kept for kept in self._running.kept if kept.name == name)

    def child(self, name: str) -> Child:
        child = self.kept(name).child
        assert child is not None
        return child

    def spec(self, name: str) -> ProcessSpec:
        return self.kept(name).member.spec

    async def redis(self, *words: str) -> object:
        """Send a command, bypassing the proxy, until Redis answers: it may run twice. Raises QueueUnavailable."""
        end = time.monotonic() + self.deadline_s
        while True:
            try:
                return await self._redis(*words)
            except QueueUnavailable:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_POLL_S)

    async def _redis(self, *words: str) -> object:
        """Send a command once. Raises QueueUnavailable, also if there is no answer in time."""
        host, port = self.links["redis"].target or ("", 0)
        async with connect(f"redis://{host}:{port}/0", self.folder.secrets / "redis") as client:
            try:
                async with asyncio.timeout(_PROBE_S):
                    return await command(client, *words)
            except TimeoutError as error:
                raise QueueUnavailable(f"Redis did not answer in {_PROBE_S:g} s") from error

    async def ready(self, name: str) -> bool:
        """Tell if the service answers /ready (Redis: PING), bypassing the proxies."""
        if self.child(name).exit_code is not None:
            return False
        try:
            if name == "redis":
                await self._redis("PING")
            else:
                await self._client(name).get("/ready", attempts=1)
        except VolleyError:
            return False
        return True

    async def until_ready(self, name: str) -> None:
        """Wait until the service is ready. Raises RecoveryTimeout."""
        await self.until(lambda: self.ready(name), f"{name} did not become ready")

    async def until(self, what: Callable[[], object], failure: str) -> None:
        """Poll a plain or an async condition. Raises RecoveryTimeout."""
        end = time.monotonic() + self.deadline_s
        while True:
            holds = what()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return
            if time.monotonic() > end:
                raise RecoveryTimeout(f"{failure} within {self.deadline_s:g} s")
            await asyncio.sleep(_POLL_S)

    @property
    def newest(self) -> WeightVersion:
        """The newest durable version; epoch 0 before there is one."""
        return self.durable[-1].version if self.durable else WeightVersion(0, 0)

    async def until_step(self, step: int, failure: str) -> None:
        """Wait until this step is durable. Raises RecoveryTimeout."""
        await self.until(lambda: self.newest.step >= step, failure)

    async def watch(self) -> None:
        """Keep `durable` up to date, until cancelled."""
        while True:
            found = await asyncio.to_thread(commits.committed, self.folder)
            if found and found[-1] != self.newest:
                self.durable.append(Sighting(time.monotonic(), found[-1]))
            await asyncio.sleep(_POLL_S)

    async def trainer_waits(self) -> dict[str, str]:
        """Reasons by service that the trainer waits for (see `Wait`); empty also if it does not answer."""
        try:
            answer = await self._client("trainer").get("/status", attempts=1)
        except VolleyError:
            return {}
        return {wait["on"]: wait["why"] for wait in answer["waits"]}

    async def run_state(self) -> tuple[str, str]:
        """State of the run in the orchestrator, and its reason; `unknown` while it does not answer."""
        try:
            answer = await self._client("orchestrator").get(f"/runs/{self.folder.name}", attempts=1)
        except VolleyError as error:
            return "unknown", str(error)
        return str(answer.get("state")), str(answer.get("reason") or "")

    def _client(self, name: str) -> HttpClient:
        return self._clients[name]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Arena]:
        async with AsyncExitStack() as opened:
            for name in self._running.urls:
                self._clients[name] = await opened.enter_async_context(self._running.client(name, _PROBE_S))
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self.watch())
                try:
                    yield self
                finally:
                    watching.cancel()


@asynccontextmanager
async def open_arena(
    loaded: LoadedConfig,
    folder: RunFolder,
    *,
    simulated: bool,
    linked: bool,
    deadline_s: float,
    say: Callable[[str], None],
    patience: RestartPolicy = _TIRELESS,
) -> AsyncIterator[Arena]:
    """Start all services of the run and wait until they answer. Raises as `stack.running`.

    Args:
        linked: services reach each other through proxies.
    """
    async with AsyncExitStack() as opened:
        links = {name: await opened.enter_async_context(Proxy.listening()) for name in LINKS}
        reaper = opened.enter_context(Reaper.running())
        seams = StackSeams(SIMULATED if simulated else {}, lambda name, url: _through(links, name, url, linked=linked))
        running = await opened.enter_async_context(stack.running(loaded, folder, reaper, say, patience, seams))
        yield await opened.enter_async_context(Arena(folder, running, links, reaper, deadline_s).watched())


def _through(links: dict[str, Proxy], name: str, url: str, *, linked: bool) -> str:
    """Address of the process's proxy if there is one and `linked`, else its own."""
    if name not in links:
        return url
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    links[name].target = parts.hostname, parts.port
    return parts._replace(netloc=f"127.0.0.1:{links[name].port}").geturl() if linked else url
