"""Containers of task folders: one process of Harbor's own environment, which the service starts when it needs it.

Invariants
- A request is sent once and answered once; its caller may wait for the answer in several calls.
- A container that is gone raises SandboxLost, and so does the end of the process. Neither gives a reward.
- The process ends with the service, and removes its containers; the next one removes those of a killed process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from shared.errors import Busy, Forbidden, SandboxLost, Unavailable
from shared.process import telemetry
from shared.services_schema import HarborSection
from volley_python.installing.foreign import python_with
from volley_sandbox import wire
from volley_sandbox.bridges.harbor.engines import ENGINES
from volley_sandbox.sandbox.repeated_call import WAIT_S

type Agent = Literal["player", "oracle", "nop"]
PROGRAM = Path(__file__).resolve().parents[1] / "bridges" / "harbor" / "worker.py"
READ_S, START_S, RESTART_S, STOP_S = 300.0, 60.0, 1.0, 20.0
AWAY_S = 5.0
"""Seconds after which a start is tried again while the engine does not answer."""
REFUSED = 3
"""Exit code of the program if its environment cannot be used."""
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_KEPT_PREFIXES = ("DOCKER_", "CONTAINER_", "PODMAN_", "COMPOSE_", "BUILDX_")
"""Variables that Harbor's process gets. Others would be readable for tasks, whose settings may hold ${VARIABLE}."""
_log = telemetry.Log("containers")


@dataclass(frozen=True, slots=True)
class HarborSettings:
    """Settings of containers.

    Attributes:
        section: `services.env.harbor`.
        run: name of the run, a label of its containers.
        folder: folder of trials in progress.
        cache: folder of installed environments of Python.
    """

    section: HarborSection = field(default_factory=HarborSection)
    run: str = "volley"
    folder: Path = Path("harbor")
    cache: Path = Path(".cache")


class Containers:
    """Starts, uses and removes containers of tasks."""

    def __init__(self, settings: HarborSettings) -> None:
        self._settings = settings
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._wanted, self._ready = asyncio.Event(), asyncio.Event()
        self._trouble = self._owner = self._away = ""

    def check(self) -> None:
        """Raises Forbidden if this service starts no containers."""
        if self._settings.section.environment is None:
            raise Forbidden(
                "task folders of Harbor run in containers, and this service starts none",
                "set services.env.harbor.environment=docker, or another environment of Harbor's; "
                "whoever submits task folders then decides what runs there",
            )

    def read(self, folders: Sequence[Path]) -> Sequence[Mapping[str, Any]]:
        """Read task folders with Harbor. Blocks, the first time until Harbor is installed.

        Raises Forbidden, Unavailable.
        """
        self.check()
        command = [str(self._python()), str(PROGRAM), "read", orjson.dumps(self._given()).decode(), *map(str, folders)]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", timeout=READ_S, check=False, env=self._variables()
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"Harbor did not read {len(folders)} task folders in {READ_S:g} s", "try again") from None
        except OSError as error:
            raise Unavailable(f"Harbor cannot be started: {error}", _PACKAGE_HINT) from None
        printed = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()] or [
            "it printed nothing"
        ]
        if done.returncode == REFUSED:
            raise Unavailable(f"services.env.harbor.environment: {' '.join(printed)}", "see docs/harbor.md")
        if done.returncode:  # the last line of a traceback is the error
            raise Unavailable(f"Harbor cannot be started: {printed[-1][-500:]}", _PACKAGE_HINT)
        return [json.loads(line) for line in done.stdout.splitlines()]

    async def keep(self) -> None:
        """Run the process from its first use on, and start it again if it ends."""
        await self._wanted.wait()
        while True:
            try:
                await self._run()
            except (OSError, TimeoutError, Unavailable) as error:
                self._trouble = str(error) or "it did not become ready"
                _log.error("process of containers cannot be started", reason=self._trouble)
            await asyncio.sleep(RESTART_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the process meanwhile, from its first use on. Errors of the body are raised as they are."""
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.keep())
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised below, outside of the group
                failure = error
            finally:
                task.cancel()
        if failure is not None:
            raise failure

    async def start(
        self, folder: Path, agent: Agent, *, fresh: bool = False
    ) -> tuple[str, asyncio.Future[dict[str, Any]]]:
        """Start a trial of a task; return its number and the answer to come: {"instruction"}, or its verdict.

        Args:
            fresh: judge in a fresh container that gets the working folder only.

        Raises Forbidden, Busy while the process is being started or the engine is away.
        """
        self.check()
        self._wanted.set()
        try:
            async with asyncio.timeout(WAIT_S):
                await self._ready.wait()
        except TimeoutError:
            why = f": {self._trouble}" if self._trouble else ""
            raise Busy(f"the process of containers is being started{why}", "try again later", 1.0) from None
        if why := self.stuck_reason():
            raise Busy(why, "start the engine", AWAY_S)
        number = f"{self._owner}-{secrets.token_hex(4)}"
        return number, self.send("start", number, folder=str(folder), agent=agent, fresh=fresh)

    def stuck_reason(self) -> str | None:
        """Reason why no trial can be started now."""
        return f"the container engine does not answer: {self._away}" if self._away else None

    def send(self, call: str, number: str, **params: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a request about a trial. Raises SandboxLost if the process has ended."""
        if self._writer is None:
            raise SandboxLost("the process of containers has ended", _LOST_HINT)
        key = next(self._numbers)
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writer.write(wire.encode({"id": key, "call": call, "episode": number, **params}))
        return future

    def close(self, number: str) -> None:
        """End a trial, and remove its containers."""
        if self._writer is not None:
            self._writer.write(wire.encode({"call": "close", "episode": number}))

    async def _run(self) -> None:
        """Start the process and deliver its answers until it ends."""
        own = self._settings
        await asyncio.to_thread(own.folder.mkdir, parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, (own.folder / "worker.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(await asyncio.to_thread(self._python)), str(PROGRAM), "serve", str(theirs.fileno())),
                orjson.dumps(self._given()).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a signal to the service's group must not end it before its containers
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=wire.MAX_LINE)
        try:
            async with asyncio.timeout(START_S):
                if (ready := await wire.read(reader)) is None:
                    raise OSError(f"it ended at once; see {own.folder / 'worker.log'}")
            self._owner = str(ready["ready"])
            self._writer, self._trouble, self._away = writer, "", ""
            self._ready.set()
            _log.info("process of containers started", pid=process.pid, environment=own.section.environment)
            await self._listen(reader)
            _log.error("process of containers ended", pid=process.pid)
        finally:
            self._writer = None
            self._ready.clear()
            writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(SandboxLost("the process of containers has ended", _LOST_HINT))
            self._waiting.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):  # it removes its containers meanwhile
                    await asyncio.shield(process.wait())

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while (answer := await wire.read(reader)) is not None:
                if "away" in answer:
                    self._away = str(answer["away"])
                    if self._away:
                        _log.warning("container engine does not answer", reason=self._away)
                    else:
                        _log.info("container engine answers again")
                    continue
                future = self._waiting.pop(answer["id"], None)
                if future is None or future.done():
                    continue
                if "lost" in answer:
                    future.set_exception(SandboxLost(f"the container failed: {answer['lost']}", _LOST_HINT))
                else:
                    future.set_result(answer["value"])

    def _given(self) -> dict[str, Any]:
        section = self._settings.section
        return {
            "environment": section.environment,
            "options": section.options,
            "folder": str(self._settings.folder.absolute()),
            "owner": self._settings.run,
            "max_starting": section.max_starting,
            "max_judging": section.max_judging
            or (2 * (os.cpu_count() or 1) if section.environment in ENGINES else 4096),
            "max_lifetime_s": section.max_lifetime_s,
            "network": section.network,
        }

    def _python(self) -> Path:
        section = self._settings.section
        return section.python or python_with("harbor", (section.package,), self._settings.cache, _PACKAGE_HINT)

    def _variables(self) -> dict[str, str]:
        wanted = {*_KEPT, *self._settings.section.variables}
        kept = {k: v for k, v in os.environ.items() if k in wanted or k.startswith(_KEPT_PREFIXES)}
        return {**kept, "HARBOR_TELEMETRY": "0"}


_LOST_HINT = "the episode gives no reward and can be played again; see the service's log"
_PACKAGE_HINT = (
    "check that the package index is reachable, or name an interpreter that has harbor: services.env.harbor.python"
)
