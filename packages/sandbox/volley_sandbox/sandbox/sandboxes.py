"""Sandboxes: processes that run untrusted code and can do nothing but answer calls.

    async with Sandboxes() as sandboxes:
        sandbox = await sandboxes.start(EnvironmentProgram(source), SandboxLimits())
        try:
            opened = await sandbox.call("reset", {"split": "train", "index": 0, "seed": 1}, deadline_s=30)
        finally:
            await sandbox.close()

Invariants: a failing sandbox does not affect others; a sandbox is killed, and not called again, after a call that timed
out or was cancelled; all sandboxes end with the service, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from shared.errors import InputError, RateLimited, SandboxFailed
from shared.files.locks import try_lock
from shared.files.storage import storage
from shared.process import telemetry
from shared.process.descriptors import HINT, exhausted
from volley_sandbox.sandbox.limits import (
    MAX_SOURCE,
    EnvironmentProgram,
    Program,
    SandboxKind,
    SandboxLimits,
    ScriptProgram,
)
from volley_sandbox.sandbox.long_calls import Turns
from volley_sandbox.sandbox.process import workspace
from volley_sandbox.sandbox.process.containers import ContainerSettings, ContainerSpawner
from volley_sandbox.sandbox.process.spawned import Spawner
from volley_sandbox.sandbox.process.zygote import MAX_LANDLOCK, ZygoteProcess, open_zygote
from volley_sandbox.sandbox.repeated_call import OutlivingCalls
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.tier import Tier

MAX_RUNNING = 4096
_PREFIX = "volley-sandbox-"
MAX_ZYGOTES = 16
LOOK_S = 0.5
_RUNNING = telemetry.Gauge("volley_env_sandboxes", "Sandboxes that run", registry=telemetry.REGISTRY)
_START_SECONDS = telemetry.Histogram(
    "volley_env_sandbox_start_seconds",
    "Duration of starting a sandbox and loading its program",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
    registry=telemetry.REGISTRY,
)
_log = telemetry.Log("sandbox")

type _Key = tuple[Path, tuple[Path, ...], SandboxKind]


class Sandboxes:
    """All sandboxes of a service; an async context manager.

    Args:
        max_running: sandboxes at once; further ones are refused with RateLimited.
        n_long_calls: long calls that may compute at once, see `turns`; the default follows the number of processors.
        folder: parent of private folders where sandboxes have no tmpfs; by default a temporary folder.
        namespaces: use namespaces where they are allowed.
        landlock: newest version of Landlock to use.
        containers: settings of containers for programs that a model writes; without them, processes run those, too.
    """

    def __init__(
        self,
        *,
        max_running: int = 512,
        n_long_calls: int | None = None,
        folder: Path | None = None,
        namespaces: bool = True,
        landlock: int = MAX_LANDLOCK,
        containers: ContainerSettings | None = None,
    ) -> None:
        self.tier: Tier | None = None
        self._max_running = min(max_running, MAX_RUNNING)
        self._given, self.folder = folder, Path()
        self._lock: int | None = None
        self._remaking = asyncio.Lock()
        self._namespaces, self._landlock = namespaces and sys.platform == "linux", landlock
        self._zygotes: dict[_Key, ZygoteProcess] = {}
        self._given_containers = containers
        self._containers: ContainerSpawner | None = None
        self._opening: dict[_Key, asyncio.Lock] = {}
        self._n_opening = 0
        self._running: dict[int, Sandbox] = {}
        # User ids follow the numbers, and the kernel counts processes by user on the whole machine. Numbers do not
        # start at 0, because those of other services may.
        self._numbers, self._names = count(secrets.randbelow(MAX_RUNNING)), count()
        self._turns = Turns[Sandbox](n_long_calls)
        self.calls = OutlivingCalls()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._make_own_folder()
        self._stack.push_async_callback(self._remove_own_folder)
        self._stack.push_async_callback(self._close_all)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        await self._stack.enter_async_context(self.calls)
        watcher = tasks.create_task(self._watch())
        self._stack.callback(watcher.cancel)
        if self._given_containers is not None:
            try:
                await self._open_containers(self._given_containers, tasks)
            except BaseException:
                await self._stack.aclose()
                raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _open_containers(self, settings: ContainerSettings, tasks: asyncio.TaskGroup) -> None:
        """Raises Unavailable."""
        self._containers = containers = ContainerSpawner(settings, tasks)
        self._stack.push_async_callback(containers.close)
        await containers.open()

    @property
    def has_containers(self) -> bool:
        """True if programs that a model writes run in containers."""
        return self._containers is not None

    async def _make_own_folder(self) -> None:
        """Make this process's private folder, again if a cleaner has removed it."""
        async with self._remaking:
            if self._lock is not None:
                if _is_at(self._lock, self.folder):
                    return
                _log.warning("the folder of the sandboxes was removed; making it again", folder=str(self.folder))
                os.close(self._lock)
                self._lock = None
            with storage(self._given or Path(tempfile.gettempdir())):
                self.folder, self._lock = await asyncio.to_thread(_make_folder, self._given)

    async def _remove_own_folder(self) -> None:
        await asyncio.to_thread(workspace.remove, self.folder)
        if self._lock is not None:
            os.close(self._lock)

    async def probe(self) -> Tier:
        """Start a zygote to find what this machine can enforce. Raises Unavailable."""
        return (await self._zygote_of(_plain_key())).tier

    async def probe_programs(self) -> None:
        """Raises Forbidden if sandboxes cannot start programs here; Unavailable."""
        await self._zygote_of((_service_python(), (), "agent"))

    async def start(
        self, program: Program, limits: SandboxLimits | None = None, deadline_s: float = 15.0, owner: str = ""
    ) -> Sandbox:
        """Start a confined process and load `program` in it.

        Long calls of sandboxes with the same `owner` share turns. Without an owner they take none: for programs with a
        CPU limit of seconds, whose duration affects a reward.

        Raises SandboxFailed, RateLimited, Unavailable, InputError (the source is too long, or an agent has an owner),
        Forbidden (programs cannot be started here), StorageUnavailable (the folder cannot be made).
        """
        if isinstance(program, EnvironmentProgram) and len(program.source or "") > MAX_SOURCE:
            raise InputError(f"the source has {len(program.source or '')} characters", f"send at most {MAX_SOURCE}")
        program = _absolute(program)
        if program.kind != "plain" and owner:  # pausing would stop the process that waits, not its programs
            raise InputError("a sandbox that starts programs takes no turns", "remove its owner")
        await self._make_own_folder()
        spawner = await self._spawner_of(program)
        sandbox = self._enroll(limits or SandboxLimits(), spawner, owner)
        began = time.perf_counter()
        try:
            if not spawner.tier.namespaces:
                with storage(self.folder):
                    await asyncio.to_thread(sandbox.tmp.mkdir, 0o700)
            await sandbox.connect()
            method, params = _opening(program)
            said = await sandbox.call(method, params, deadline_s)
            sandbox.description = said if isinstance(program, EnvironmentProgram) else None
        except OSError as error:
            await sandbox.close()
            lacking = exhausted(error)
            raise RateLimited(f"a sandbox cannot be started: {lacking or error}", HINT if lacking else "") from error
        except BaseException:
            await sandbox.close()
            raise
        _START_SECONDS.observe(time.perf_counter() - began)
        return sandbox

    def _forget(self, sandbox: Sandbox) -> None:
        """Free the number of a sandbox whose process has ended."""
        self._running.pop(sandbox.number, None)
        _RUNNING.set(len(self._running))

    def _enroll(self, limits: SandboxLimits, spawner: Spawner, owner: str) -> Sandbox:
        if len(self._running) >= self._max_running:
            raise RateLimited(f"{len(self._running)} sandboxes run already", "try again later", 1.0)
        number = next(n for n in (i % MAX_RUNNING for i in self._numbers) if n not in self._running)
        tmp = self.folder / f"tmp-{next(self._names)}"
        sandbox = Sandbox(number, limits, spawner, tmp, owner, self._turns, self._forget)
        self._running[number] = sandbox
        _RUNNING.set(len(self._running))
        return sandbox

    async def _spawner_of(self, program: Program) -> Spawner:
        """Raises Unavailable, Forbidden."""
        if self._containers is not None and isinstance(program, ScriptProgram):
            return self._containers
        return await self._zygote_of((program.python or _service_python(), program.folders, program.kind))

    async def _zygote_of(self, key: _Key) -> ZygoteProcess:
        """The zygote for an interpreter and folders, started if none is alive. Raises Unavailable.

        Requests for different zygotes do not wait for each other.
        """
        async with self._opening.setdefault(key, asyncio.Lock()):
            zygote = self._zygotes.get(key)
            if zygote is not None and zygote.alive:
                return zygote
            if zygote is not None:
                _log.error("zygote lost; starting another", python=str(key[0]))
                await self._zygotes.pop(key).close()
            self._n_opening += 1
            try:
                await self._make_room()
                root = self.folder / f"root-{next(self._names)}"
                python, folders, kind = key
                zygote = await open_zygote(
                    python, folders, root, namespaces=self._namespaces, landlock=self._landlock, kind=kind
                )
            finally:
                self._n_opening -= 1
            self._zygotes[key] = zygote
            if self.tier is None or key == _plain_key():
                self.tier = zygote.tier
                _log.info("sandboxes can be started", **zygote.tier.describe())
            return zygote

    async def _make_room(self) -> None:
        """Make room for the zygotes being opened. Raises RateLimited."""
        if len(self._zygotes) + self._n_opening <= MAX_ZYGOTES:
            return
        idle = next((key for key, zygote in self._zygotes.items() if zygote.n_children == 0), None)
        if idle is None:
            raise RateLimited(f"sandboxes of {MAX_ZYGOTES} interpreters run already", "try again later", 5.0)
        await self._zygotes.pop(idle).close()

    async def _watch(self) -> None:
        """Watch for what the kernel does not bound.

        That is: private folders without a tmpfs, threads of an ordinary user, and computing between calls.
        """
        idle: dict[Sandbox, int] = {}
        while True:
            idle = await self._pause_computing(idle)
            await asyncio.sleep(LOOK_S)
            for sandbox in list(self._running.values()):
                if not sandbox.spawner.tier.namespaces and sandbox.alive:
                    await self._check_usage(sandbox)

    async def _pause_computing(self, idle: Mapping[Sandbox, int]) -> dict[Sandbox, int]:
        """Pause sandboxes that computed between calls since the last look.

        Args:
            idle: the previous return value.

        Returns the sandboxes without a call at present, with their numbers of calls.
        """
        now = {one: one.n_calls for one in self._running.values() if not one.is_called}
        for zygote in [zygote for zygote in self._zygotes.values() if zygote.n_children]:
            for number in await zygote.look():
                one = self._running.get(number)
                if one is not None and not one.is_called and idle.get(one) == one.n_calls:
                    one.pause_between_calls()
        return now

    async def _check_usage(self, sandbox: Sandbox) -> None:
        limits = sandbox.limits
        most = workspace.MAX_FILES_PER_MB * limits.disk_mb
        used, entries = await asyncio.to_thread(workspace.usage, sandbox.tmp, most)
        if used > limits.disk_mb * 2**20:
            sandbox.end("output", f"its files take more than {limits.disk_mb} MiB")
        elif entries >= most:
            sandbox.end("output", f"it made more than {most} files")
        elif not sandbox.spawner.tier.bounds_threads:
            n = await asyncio.to_thread(_n_threads, sandbox.pid)
            if n > limits.threads:
                sandbox.end("refused", f"it had {n} threads; {limits.threads} are allowed")

    async def _close_all(self) -> None:
        for sandbox in list(self._running.values()):
            with contextlib.suppress(SandboxFailed, OSError):
                await sandbox.close()
        for zygote in list(self._zygotes.values()):  # a start may be in progress
            await zygote.close()


def _absolute(program: Program) -> Program:
    """Make folders absolute, because a zygote has another working folder."""
    return replace(program, folders=tuple(Path(os.path.abspath(folder)) for folder in program.folders))


def _opening(program: Program) -> tuple[str, dict[str, Any]]:
    """First call to a sandbox, which loads the program."""
    if not isinstance(program, EnvironmentProgram):
        return "paths", {"paths": [str(folder) for folder in program.folders]}
    return "load", {
        "source": program.source,
        "filename": program.filename,
        "entry": program.entry,
        "config": dict(program.config),
        "paths": [str(folder) for folder in program.folders],
        "module": program.module,
        "programs": program.kind == "agent",
    }


def _plain_key() -> _Key:
    return _service_python(), (), "plain"


def _service_python() -> Path:
    """This process's interpreter, without its virtual environment."""
    return Path(sys.executable).resolve()


def _make_folder(given: Path | None) -> tuple[Path, int]:
    """Make a folder for this process and lock it; return both.

    Removes folders that killed processes left behind. Other users may pass through the folder but not list it, because
    root's sandboxes run as users of their own.
    """
    place = given or Path(tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    for left in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = _locked(left)
            try:
                workspace.remove(left)
            finally:
                os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        try:
            lock = _locked(folder)
            folder.chmod(0o711)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process that starts now removed it as a leftover
        return folder, lock


def _is_at(descriptor: int, folder: Path) -> bool:
    """Tell if an open folder still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.lstat())
    except OSError:
        return False


def _locked(folder: Path) -> int:
    """Lock a folder. Raises OSError if another process or user has it, ConfigError without file locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if not try_lock(descriptor):
            raise BlockingIOError(errno.EAGAIN, "another process uses it", str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _n_threads(pid: int | None) -> int:
    """Number of threads of a process; 0 if it has ended or is unknown."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
