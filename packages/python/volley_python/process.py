"""A `volley` command that runs beside a Python program or notebook, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

from shared.errors import VolleyError
from volley.local.processes import Reaper

_STOP_S = 60.0
"""Time for a stopped command to end its processes, in seconds."""
_N_LINES = 20
"""Last lines of output to keep for an error."""
_PROGRAM = (sys.executable, "-P", "-m", "volley")


class CommandFailed(VolleyError):
    """A `volley` command that the program started has failed."""


class CommandProcess:
    """One running command. Its output goes to this program's, to `seen` line by line, or, if neither, nowhere.

    It is stopped when the program ends, as Ctrl-C would; the reaper ends it if the program is killed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        display: bool = True,
        seen: Callable[[str], None] | None = None,
        program: Sequence[str] = _PROGRAM,
    ) -> None:
        self._display, self._seen, self._lines = display, seen, deque[str](maxlen=_N_LINES)
        inherits = display and seen is None and _is_terminal()
        self._process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if inherits else subprocess.PIPE,
            stderr=None if inherits else subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        _running().add(self)
        self._reader = None if inherits else threading.Thread(target=self._read, daemon=True)
        if self._reader is not None:
            self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the command runs."""
        return self._process.poll()

    @property
    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises TimeoutError."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the command still runs after {timeout_s:g} s") from error
        if self._reader is not None:
            self._reader.join(timeout=5.0)
        _running().remove(self)
        return code

    def stop(self) -> int:
        """Interrupt the command, as Ctrl-C does, and return its exit code; kill it if it does not end in time."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            return self.wait(_STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            return self.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))
            if self._seen is not None:
                self._seen(line.rstrip("\n"))
            elif self._display:
                sys.stdout.write(line)
                sys.stdout.flush()


class _StartedCommands:
    """Commands of this program that have not ended."""

    def __init__(self) -> None:
        self._stack, self._commands = contextlib.ExitStack(), set[CommandProcess]()
        self._reaper = self._stack.enter_context(Reaper.running())
        self._owner = os.getpid()

    def add(self, command: CommandProcess) -> None:
        self._commands.add(command)
        self._reaper.watch(command.pid)

    def remove(self, command: CommandProcess) -> None:
        if command in self._commands:
            self._commands.discard(command)
            self._reaper.forget(command.pid)

    def end(self) -> None:
        """Stop what still runs, at the end of the program; a forked process leaves it to its parent."""
        if self._owner == os.getpid():
            for command in list(self._commands):
                command.stop()
            self._stack.close()


@cache
def _running() -> _StartedCommands:
    found = _StartedCommands()
    atexit.register(found.end)
    return found


def _is_terminal() -> bool:
    """Return True if this program's standard output is its process's own, and a terminal."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return sys.stdout.fileno() == 1 and os.isatty(1)
    return False
