"""Child processes that do not outlive this one.

Each leads its own session. A separate process, the reaper, ends them if this one is killed.

Invariant: after `stop`, and after the context of `Reaper`, no process of a started group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from shared.errors import ConfigError
from shared.process.events import CANNOT_START, parse

_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process.

    Its output is appended to `log`. `stop_s`: seconds between SIGTERM and SIGKILL. `inherits`: file descriptors to
    pass on, such as a lock's. `cwd`: its working directory, None for ours.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    stop_s: float = 15.0
    inherits: tuple[int, ...] = ()
    cwd: Path | None = None


class Reaper:
    """Helper process that kills all children if this process is killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._groups: set[int] = set()
        self.closed = False

    @classmethod
    @contextmanager
    def running(cls, holds: Sequence[int] = ()) -> Iterator[Self]:
        """Start the reaper.

        Args:
            holds: file descriptors, such as a lock's, to keep open until all groups have ended, even if we are killed.
        """
        command = [sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "reaper.py")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=holds)
        reaper = cls(process)
        try:
            yield reaper
        finally:
            reaper.kill_all()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._send(f"-{group}\n")

    def kill_all(self) -> None:
        """Kill every group at once, without grace; nothing is restarted afterwards."""
        self.closed = True
        for group in self._groups:
            _kill_group(group)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


class Child:
    """One running process group. `log_start`: offset of its output in the log, in bytes."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, reaper: Reaper, log_start: int) -> None:
        self.spec, self._process, self._reaper, self.log_start = spec, process, reaper, log_start

    @classmethod
    async def start(cls, spec: ProcessSpec, reaper: Reaper) -> Self:
        """Raises ConfigError if the program or its log cannot be opened."""
        try:
            with spec.log.open("a+b", buffering=0) as log:
                _end_line(log)
                log_start = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(spec.environment),
                    cwd=spec.cwd,
                    start_new_session=True,
                    pass_fds=spec.inherits,
                )
        except OSError as error:
            raise ConfigError(
                f"cannot start {spec.name}: {error.filename or spec.command[0]}: {error.strerror}"
            ) from error
        reaper.watch(process.pid)
        return cls(spec, process, reaper, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code: None while it runs, negative if a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        _kill_group(self.pid)

    async def stop(self) -> None:
        """Send SIGTERM to the leader; once it has ended, or after `stop_s`, send SIGKILL to the group."""
        try:
            if self.exit_code is None:
                self._process.terminate()
                async with asyncio.timeout(self.spec.stop_s):
                    await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
            await self._process.wait()
            self._reaper.forget(self.pid)


def last_error(log: Path, start: int = 0) -> str:
    """Return the last error in a log from byte `start` on, else its last line; empty if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        events = [_readable(line) for line in lines]
        errors = [text for text, is_error in events if is_error]
        return (errors or [text for text, _ in events] or [""])[-1][:600]
    return ""


def _end_line(log: IO[bytes]) -> None:
    """Complete a line cut off by a killed process or a full disk, before the next process writes."""
    if size := log.seek(0, os.SEEK_END):
        log.seek(size - 1)
        if log.read(1) != b"\n":
            with contextlib.suppress(OSError):
                log.write(b"\n")
        log.seek(0, os.SEEK_END)


def _readable(line: str) -> tuple[str, bool]:
    """Text of a log line, structured or not, and whether it is an error."""
    event = parse(line)
    if not event:
        return line.strip(), "Error" in line.split(":")[0]
    if event.get("event") == CANNOT_START or event.get("error") == ConfigError.__name__:
        return f"{event.get('service')}: {event.get('detail')}", True
    fields = [str(event.get(key)) for key in ("event", "error", "detail") if event.get(key)]
    traceback = str(event.get("traceback") or "").strip().splitlines()
    return ": ".join(fields + traceback[-1:]), event.get("level") == "error"


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
