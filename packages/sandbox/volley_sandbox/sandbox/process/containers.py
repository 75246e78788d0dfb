"""Containers whose only program is a sandbox: started, kept ready, and removed by the command of a container engine.

The engine's command carries the channel and the log of the sandbox (see inside/container.py). Nothing is mounted.

Invariants
- The end of the channel ends the container, and so does the end of the service. The next service that sees it has
  ended (see bridges/harbor/engines.py) removes what an engine has kept in spite of that; it knows it by its labels.
- A container that is gone for another reason than its code ends with an `error`, so its episode gets no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import orjson

from shared.errors import RateLimited, Unavailable
from shared.process import telemetry
from shared.services_schema import ContainerSandbox
from volley_sandbox.bridges.harbor.engines import owner_in
from volley_sandbox.sandbox.limits import SandboxLimits
from volley_sandbox.sandbox.process.spawned import ProcessEnd, ProcessSignal, SpawnedProcess, open_ends
from volley_sandbox.sandbox.tier import Tier

START_S, PULL_S, ENGINE_S = 60.0, 1800.0, 30.0
WAIT_S = 10.0
"""Longest wait for a place to start a container."""
STOP_S = 3.0
"""Seconds for the end of a container whose channel was closed, before the engine removes it."""
TMP = "/tmp"  # noqa: S108 - inside a container
BOOT = """
import importlib.util, json, os, sys
def take(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
given = json.loads(take(int.from_bytes(take(4), "big")))
class Bundle:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in given["modules"] else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(given["modules"][name], name + ".py", "exec"), vars(module))
sys.path[:] = [path for path in sys.path if path]
sys.meta_path.insert(0, Bundle())
import container
del sys.meta_path[0]
container.main(given["limits"], given["lifetime_s"], list(given["modules"]))
"""
_MODULES = (
    "adapters",
    "agents",
    "confine",
    "container",
    "host",
    "interpreter",
    "linux",
    "namespaces",
    "programs",
    "values",
)
_USER = "65534:65534"
_READY, _LATE, _OF_CODES, _OF_SIGNALS, _MAX_SIGNAL = b"+", 110, 10, 64, 36
"""As in inside/container.py."""
_SPARE_PROCESSES = 3
"""Processes of the container besides the sandbox's."""
_MAX_WHY = 500
_START_SECONDS = telemetry.Histogram(
    "volley_env_container_start_seconds",
    "Duration of starting a sandbox's container",
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60),
    registry=telemetry.REGISTRY,
)
_log = telemetry.Log("containers")

type _Key = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """Settings of containers: `services.env.sandbox`, the run's name as their label, and a folder of the service."""

    section: ContainerSandbox
    run: str
    folder: Path


@dataclass(frozen=True, slots=True)
class _Container:
    """One container. `kept` is the other end of its channel."""

    name: str
    process: asyncio.subprocess.Process
    kept: socket.socket
    spawned: SpawnedProcess


class ContainerSpawner:
    """Spawner whose processes run in containers, one in each.

    Args:
        tasks: where the containers are watched.
    """

    tmp: str | None = TMP
    tier = Tier(namespaces=("network", "ipc", "uts", "pid", "mount"), bounds_threads=True)

    def __init__(self, settings: ContainerSettings, tasks: asyncio.TaskGroup) -> None:
        self._section, self._run, self._tasks = settings.section, settings.run, tasks
        self._folder, self._owner = settings.folder, owner_in(settings.folder)
        self._starting = asyncio.Semaphore(settings.section.max_starting)
        self._containers: dict[str, _Container] = {}
        self._running: dict[int, _Container] = {}
        self._ready: dict[_Key, deque[_Container]] = {}
        self._filling: set[_Key] = set()
        self._ending: set[str] = set()
        self._closing = self._is_podman = False

    async def open(self) -> None:
        """Remove containers of services that were killed, have the image, and try it. Raises Unavailable."""
        section = self._section
        listed = await self._engine("ps", "--all", "--filter", "label=volley.sandbox", "--format", "{{.Names}}")
        left = [name for name in listed.split() if self._is_orphaned(name)]
        if left:
            _log.warning("removing containers of a service that was killed", containers=left)
            await self._engine("rm", "--force", *left)
        self._is_podman = "podman" in await self._engine("--version")
        try:
            await self._engine("image", "inspect", "--format", "{{.Id}}", section.image)
        except Unavailable:
            _log.info("pulling the image of the sandboxes", image=section.image)
            try:
                await self._engine("pull", "--quiet", section.image, timeout_s=PULL_S)
            except Unavailable as error:
                raise Unavailable(f"the image {section.image} of the sandboxes: {error.detail}", _HINT) from error
        tried = await self._started(asdict(SandboxLimits()))
        if said := _read(tried):
            _log.warning("the engine started a container with a warning", warning=said)
        self._discard(tried)

    async def spawn(self, number: int, limits: Mapping[str, int], tmp: str) -> SpawnedProcess:
        """Take a container that is ready, or start one. Raises Unavailable, RateLimited, OSError."""
        key = tuple(limits.items())
        ready = self._ready.setdefault(key, deque())
        while ready and ready[0].spawned.end.done():
            ready.popleft().spawned.close()
        container = ready.popleft() if ready else await self._started(limits)
        self._running[number] = container
        container.spawned.end.add_done_callback(lambda end: self._running.pop(number, None))
        self._refill(key)
        return container.spawned

    def signal(self, number: int, what: ProcessSignal) -> None:
        """End a container. Sandboxes in containers take no turns, so they are never paused."""
        if what == "kill" and (container := self._running.get(number)) is not None:
            self._end(container)

    async def close(self) -> None:
        """End all containers, and wait for their end."""
        self._closing = True
        for container in list(self._containers.values()):
            self._end(container)
        for ready in self._ready.values():
            while ready:
                ready.popleft().spawned.close()
        if waiting := [container.spawned.end for container in self._containers.values()]:
            await asyncio.wait(waiting, timeout=STOP_S + ENGINE_S)

    def _is_orphaned(self, name: str) -> bool:
        """Return True if the container was left behind by a process that has exited."""
        owner = name.rpartition("-")[0]
        return owner != self._owner.name and self._owner.may_remove(owner)

    def _refill(self, key: _Key) -> None:
        if self._section.warm > len(self._ready[key]) and key not in self._filling:
            self._filling.add(key)
            self._tasks.create_task(self._fill(key))

    async def _fill(self, key: _Key) -> None:
        """Start containers until enough are ready."""
        try:
            while not self._closing and len(self._ready[key]) < self._section.warm:
                self._ready[key].append(await self._started(dict(key)))
        except (Unavailable, OSError) as error:
            _log.warning("no container could be kept ready", reason=str(error))
        finally:
            self._filling.discard(key)

    async def _started(self, limits: Mapping[str, int]) -> _Container:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._starting.acquire()
        except TimeoutError:
            raise RateLimited(f"{self._section.max_starting} containers are starting", "try again later", 1.0) from None
        began = time.perf_counter()
        try:
            container = await self._start(limits)
        finally:
            self._starting.release()
        _START_SECONDS.observe(time.perf_counter() - began)
        return container

    async def _start(self, limits: Mapping[str, int]) -> _Container:
        if self._closing:
            raise Unavailable("the service is stopping")
        name = f"{self._owner.name}-{secrets.token_hex(6)}"
        with open_ends() as ends:
            channel = ends.other_channel.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(name, limits),
                    stdin=channel,
                    stdout=channel,
                    stderr=ends.other_log.fileno(),
                    cwd=self._folder if self._is_podman else None,  # its monitor leaves a file `oom` there
                    start_new_session=True,  # a signal to the service's group must not end it before its sandbox
                )
            except OSError as error:
                raise Unavailable(f"{self._section.engine} cannot be started: {error}", _HINT) from error
            container = _Container(name, process, ends.other_channel.dup(), SpawnedProcess(ends.channel, ends.log))
            self._containers[name] = container
            self._tasks.create_task(self._watch(container))
        if self._closing:
            self._end(container)
        try:
            await _introduce(ends.channel, limits, self._section.max_lifetime_s)
        except (OSError, TimeoutError):
            self._end(container)
            await asyncio.wait([container.spawned.end], timeout=STOP_S)
            code = container.process.returncode
            why = _read(container) or ("it gave no answer" if code is None else f"it ended with exit code {code}")
            container.spawned.close()
            raise Unavailable(f"a container of {self._section.image} did not start: {why}", _HINT) from None
        except BaseException:
            self._discard(container)
            raise
        return container

    def _command(self, name: str, limits: Mapping[str, int]) -> Sequence[str]:
        memory = f"{limits['memory_mb'] + limits['disk_mb']}m"  # its files are memory, too
        section = self._section
        # Podman cannot limit the number of files, and copies the image's. It would make other folders writable, too.
        files = "notmpcopyup" if self._is_podman else f"nr_inodes={64 * limits['disk_mb']}"
        return (
            *(section.engine, "run", "--interactive", "--rm", "--pull=never", f"--name={name}"),
            *("--label=volley.sandbox", f"--label=volley.owner={self._owner.name}", f"--label=volley.run={self._run}"),
            *(f"--network={section.network}", "--read-only", f"--user={_USER}", f"--workdir={TMP}"),
            f"--tmpfs={TMP}:rw,nosuid,nodev,size={limits['disk_mb']}m,mode=1777,{files}",
            *(["--read-only-tmpfs=false"] if self._is_podman else []),
            *(
                f"--memory={memory}",
                f"--memory-swap={memory}",
                f"--pids-limit={limits['threads'] + _SPARE_PROCESSES}",
                "--cpus=1",
            ),
            *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--no-healthcheck"),
            *("--log-driver=none", "--stop-timeout=1"),
            *(f"--env={key}={value}" for key, value in _VARIABLES.items()),
            *section.options,
            *("--entrypoint=python3", section.image, "-u", "-s", "-B", "-X", "utf8", "-c", BOOT),
        )

    async def _watch(self, container: _Container) -> None:
        """Note the end of a container."""
        code = await container.process.wait()
        container.kept.close()
        del self._containers[container.name]
        end = _end_of(code)
        if end.error and container.name not in self._ending:
            _log.warning("container of a sandbox ended", container=container.name, code=code)
        self._ending.discard(container.name)
        container.spawned.end.set_result(end)
        container.spawned.forget()

    def _end(self, container: _Container) -> None:
        """Close its channel; remove it if it goes on all the same."""
        if not container.spawned.end.done():
            self._ending.add(container.name)
            with contextlib.suppress(OSError):
                container.kept.shutdown(socket.SHUT_RDWR)
            self._tasks.create_task(self._remove(container))

    def _discard(self, container: _Container) -> None:
        """End a container that no sandbox has."""
        self._end(container)
        container.spawned.close()

    async def _remove(self, container: _Container) -> None:
        done, _ = await asyncio.wait([container.spawned.end], timeout=STOP_S)
        if not done:
            with contextlib.suppress(Unavailable):
                await self._engine("rm", "--force", container.name)
            with contextlib.suppress(ProcessLookupError):
                container.process.kill()

    async def _engine(self, *arguments: str, timeout_s: float = ENGINE_S) -> str:
        """Output of the engine's command. Raises Unavailable with what it says."""
        command = f"{self._section.engine} {arguments[0]}"
        try:
            process = await asyncio.create_subprocess_exec(
                *(self._section.engine, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise Unavailable(f"{command} cannot be started: {error}", _HINT) from error
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        except TimeoutError:
            raise Unavailable(f"{command} gave no answer in {timeout_s:g} s", _HINT) from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise Unavailable(f"{command}: {errors.decode(errors='replace').strip()[-_MAX_WHY:]}", _HINT)
        return output.decode(errors="replace")


async def _introduce(channel: socket.socket, limits: Mapping[str, int], lifetime_s: float) -> None:
    """Send the program, and wait until it is ready. Raises OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    given = orjson.dumps({"modules": _sources(), "limits": dict(limits), "lifetime_s": lifetime_s})
    async with asyncio.timeout(START_S):
        await loop.sock_sendall(channel, len(given).to_bytes(4, "big") + given)
        if await loop.sock_recv(channel, 1) != _READY:
            raise ConnectionError


@cache
def _sources() -> Mapping[str, str]:
    """Sources of the modules inside a container, by name."""
    inside = resources.files("volley_sandbox.sandbox").joinpath("inside")
    return {name: inside.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}


def _read(container: _Container) -> str:
    """End of what a container, or its engine, has printed."""
    os.set_blocking(container.spawned.log.fileno(), False)
    text = (container.spawned.log.read(2**16) or b"").decode(errors="replace").strip()
    return text[-_MAX_WHY:]


def _end_of(code: int) -> ProcessEnd:
    """End of a sandbox from the exit code of its engine's command."""
    if _OF_CODES <= code < _OF_SIGNALS:
        return ProcessEnd((code - _OF_CODES) << 8)
    if _OF_SIGNALS < code <= _OF_SIGNALS + _MAX_SIGNAL:
        return ProcessEnd(code - _OF_SIGNALS)
    if code == _LATE:
        return ProcessEnd(error="its container is older than services.env.sandbox.max_lifetime_s")
    return ProcessEnd(error=f"its container is gone, with exit code {code}")


_HINT = "see that the engine runs, and check services.env.sandbox"
_VARIABLES = {
    "PYTHONHASHSEED": "0",
    "HOME": TMP,
    "TMPDIR": TMP,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "OPENBLAS_NUM_THREADS": "1",
}
