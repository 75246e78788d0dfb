"""Programs that a sandbox starts, supervised by the first process of its pid namespace, which has no rights of root.

All processes of a program end with it, so nothing runs between two calls or changes what the next call finds. Programs
cannot signal, trace or read this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Become = Callable[[], Any]
"""Runs in a new process, and ends it."""
PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOOK_S = 0.05
"""Seconds between checks of memory, or the duration of the last check if that is longer."""
_SHARED = 4
MEGA, _BLOCK = 1 << 20, 1 << 16
_REAPED = 256
_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
"""Signals that Python ignores or handles; programs expect the system's defaults."""


def supervise(
    become: Become, outputs: dict[int, Middle], writers: list[int], timeout_s: float, memory_mb: int, stop: int = -1
) -> tuple[int | None, str]:
    """Run `become` in a process until it ends, and kill every process that it has started.

    Args:
        outputs: where its output arrives, and who keeps it; `writers` are the other ends, closed here.
        stop: descriptor that ends it as soon as it can be read.

    Returns its status (None if it was killed), and the limit for which it was killed: "time", "memory", "stop", or "".
    """
    main = os.fork()
    if main == 0:
        _end_with(become)
    for writer in writers:
        os.close(writer)
    for reader in outputs:
        os.set_blocking(reader, False)
    status, ended = None, ""
    look = time.monotonic()
    deadline = look + timeout_s
    watched = [*outputs, stop] if stop >= 0 else [*outputs]
    while status is None and not ended:
        ready = select.select(watched, [], [], LOOK_S)[0]
        read = [outputs[one].read(one) for one in ready if one != stop]
        if ready and not any(read):
            time.sleep(LOOK_S / 5)  # all processes have closed their output and continue
        status = _reaped(main)
        now = time.monotonic()
        if status is None and stop in ready:
            ended = "stop"
        elif status is None and now > deadline:
            ended = "time"
        elif status is None and now > look:
            ended = "memory" if _hold_more(memory_mb * MEGA, deadline) else ""
            look = time.monotonic() + max(LOOK_S, time.monotonic() - now)
    _end_all()
    for reader, kept in outputs.items():
        while kept.read(reader):
            pass
        os.close(reader)
    return status, ended


def exit_code(status: int | None) -> int:
    """Exit code as a shell reports it; a killed process has 128 plus the signal."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end_with(become: Become) -> None:
    """Run `become` in a child process, which then ends."""
    try:
        become()
    except (OSError, ValueError, MemoryError) as error:
        os.write(2, f"the program cannot be started: {error}\n".encode())
    finally:
        os._exit(126)


def isolate(out: int, err: int, cpu_s: int, memory_mb: int, first: int) -> None:
    """Give a new process its output, limits and signals, and close descriptors from `first` on. Raises OSError."""
    for kind, most in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_mb * MEGA)):
        resource.setrlimit(kind, (most, most))
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(first, 256)


def _reaped(main: int) -> int | None:
    """Reap ended processes, at most _REAPED of them; return the status of `main` if it is among them."""
    for _ in range(_REAPED):
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == main:
            return status
    return None


def _end_all() -> None:
    """Kill every other process of this namespace; none is left on return."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _hold_more(most: int, deadline: float) -> bool:
    """True if all other processes of this namespace hold more than `most` bytes together.

    Stops at `deadline`. A page shared by several processes counts once; but resident sizes that sum to more than
    _SHARED times `most` exceed the limit in any case, which avoids a slow exact sum. Unmapped memory is not counted: it
    can only be files, whose disk is bounded, because memory shared without a file cannot be made here. A child of vfork
    shows its parent's pages until it starts its program, so an excess is checked twice.
    """

    def hold_more() -> bool:
        shown = _sum(_resident, deadline)
        return shown > _SHARED * most or (shown > most and _sum(_share, deadline) > most)

    return hold_more() and hold_more()


def _sum(size_of: Callable[[str], int], deadline: float) -> int:
    """Sum over all other processes, as far as `deadline` allows.

    `size_of` takes a thread's folder in /proc and returns 0 if the thread has ended.
    """
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1" and time.monotonic() < deadline:
            total += size_of(f"/proc/{name}") or _of_threads(f"/proc/{name}/task", size_of)
    return total


def _of_threads(folder: str, size_of: Callable[[str], int]) -> int:
    """Size of a process whose first thread has ended; its other threads share the same memory."""
    try:
        return max((size_of(f"{folder}/{name}") for name in os.listdir(folder)), default=0)
    except OSError:
        return 0


def _resident(folder: str) -> int:
    """Resident bytes, including pages shared with other processes."""
    with contextlib.suppress(OSError, IndexError), open(f"{folder}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _share(folder: str) -> int:
    """Bytes with each shared page divided among its processes. Unreadable programs count as `_resident`."""
    with contextlib.suppress(OSError), open(f"{folder}/smaps_rollup", "rb") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith((b"Pss:", b"SwapPss:")))
    return _resident(folder)


class Middle:
    """Keep the beginning and the end of the data read, `most` bytes in all."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def read(self, descriptor: int) -> bool:
        """Read what is available; False at the end, or if nothing is available."""
        try:
            data = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return False
        room = self._half - len(self._head)
        self._head += data[: max(0, room)]
        self._tail += data[max(0, room) :]
        if (over := len(self._tail) - self._half) > 0:
            self._left_out += over
            del self._tail[:over]
        return bool(data)

    def text(self) -> str:
        gap = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return (bytes(self._head) + gap + bytes(self._tail)).decode("utf-8", "replace")
