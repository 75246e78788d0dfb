"""First process of a container: starts the sandbox's process, carries its channel, and reports its end.

The program in `python3 -c` (see process/containers.py) imports this module from stdin. Requests follow there, until
stdin ends, which ends the container. stdout has READY once the sandbox is confined, then the answers; stderr is the
output of the sandbox.

The exit code says how the sandbox's process has ended: from 10 on by its own exit code, from 64 on by a signal. After
any other code something else has ended the container; engines use 0, 1 and 2 when they lose it. The sandbox cannot
choose one: no signal of it reaches this process, the first one of its namespace, which it cannot trace, read or limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

import confine
import host
import linux

READY = b"+"
LATE, FAILED = 110, 120
"""Exit codes: the container is older than its limit; this program has failed."""
OF_CODES, MAX_CODE, OF_SIGNALS, MAX_SIGNAL = 10, 49, 64, 36
END_S = 1.0
"""Seconds for the end of a process that has closed its channel."""
_BLOCK = 1 << 16
_ABOVE = 100
_CALLS = (
    (0xC000003E, 302, 56, 272, 248),  # x86-64
    (0xC000003E, 1 << 30 | 302, 1 << 30 | 56, 1 << 30 | 272, 1 << 30 | 248),  # x32
    (0x40000003, 340, 120, 310, 286),  # x86
    (0xC00000B7, 261, 220, 97, 217),  # arm64
    (0x40000028, 369, 120, 337, 309),  # arm
    (0xC00000F3, 261, 220, 97, 217),  # riscv64
    (0xC0000015, 325, 120, 282, 269),  # ppc64le
)
"""Architecture, and numbers of the calls prlimit64, clone, unshare and add_key there.

Those of request_key and keyctl follow add_key's.
"""
_CLONE3 = (435, 1 << 30 | 435)


def main(limits: dict[str, Any], lifetime_s: float, modules: list[str]) -> None:
    """Run the sandbox and end this process.

    Args:
        limits: the fields of SandboxLimits. The engine enforces those of memory, threads and the private folder.
        lifetime_s: seconds after the first request.
        modules: names of the sandbox's own modules, which a program does not see.
    """
    code = FAILED
    try:
        code = _Carrier(limits, lifetime_s, modules).run()
    except BaseException:  # noqa: BLE001 - it goes to the log
        traceback.print_exc()
    finally:
        os._exit(code)


class _Carrier:
    """Carries requests from stdin to the sandbox's process, and its answers to stdout."""

    def __init__(self, limits: dict[str, Any], lifetime_s: float, modules: list[str]) -> None:
        self._limits, self._lifetime_s = limits, lifetime_s
        self._deadline: float | None = None
        self._pending = b""
        self._woken, wake = os.pipe()
        for descriptor in (self._woken, wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._child = os.fork()
            if self._child == 0:
                try:
                    _be_sandbox(theirs.fileno(), limits, modules)
                finally:
                    os._exit(1)
        self._ours.setblocking(False)
        linux.forbid_inspection()

    def run(self) -> int:
        """Carry until the process or stdin ends; return the container's exit code."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._ours, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return LATE
            ready = dict(poll.poll(None if left_s is None else 1000 * left_s + 1))
            if 0 in ready and not self._take(ready[0]):
                return 0
            if self._woken in ready:
                os.read(self._woken, _BLOCK)
                if (code := self._ended()) is not None:
                    self._pass_answers()
                    return code
            if self._ours.fileno() in ready and not self._pass_answers():
                return self._closed()
            self._send()
            poll.modify(0, 0 if self._pending else select.POLLIN)
            poll.modify(self._ours, select.POLLIN | (select.POLLOUT if self._pending else 0))

    def _take(self, event: int) -> bool:
        """Read requests; False at the end of stdin."""
        if self._pending or not event & select.POLLIN:
            return not event & (select.POLLHUP | select.POLLERR)
        self._pending = os.read(0, _BLOCK)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._lifetime_s
        return bool(self._pending)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._pending = self._pending[self._ours.send(self._pending) :] if self._pending else b""
            except (BrokenPipeError, ConnectionResetError):
                self._pending = b""

    def _pass_answers(self) -> bool:
        """Write all answers that are there; False if the channel is closed."""
        while True:
            try:
                data = self._ours.recv(_BLOCK)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            _write(data)

    def _ended(self) -> int | None:
        """Reap ended processes; return the exit code if the sandbox's is among them."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if pid == self._child:
                return code_of(status, usage.ru_utime + usage.ru_stime, self._limits["cpu_s"])

    def _closed(self) -> int:
        """Wait for a process that has closed its channel; return the exit code."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            if (code := self._ended()) is not None:
                return code
            time.sleep(0.01)
        return OF_CODES + 1


def code_of(status: int, cpu_s: float, most_cpu_s: float) -> int:
    """Exit code of the container that tells how the sandbox's process has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and cpu_s >= most_cpu_s:
        code = -signal.SIGXCPU
    return OF_CODES + min(code, MAX_CODE) if code >= 0 else OF_SIGNALS + min(-code, MAX_SIGNAL)


def _be_sandbox(channel: int, limits: dict[str, Any], modules: list[str]) -> None:
    """Become the sandbox's process: limits, descriptors, then requests. Raises OSError, ValueError."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.umask(0o077)
    confine.prefer_for_oom_kill()
    linux.forbid_inspection()
    channel = fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.dup2(channel, confine.CHANNEL)
    confine.set_limits(limits, left_out=("AS", "NPROC", "SIGPENDING"))
    os.closerange(confine.CHANNEL + 1, max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], _ABOVE + 1))
    linux.forbid_new_privileges()
    linux.install_filter(_filter())
    for name in modules:
        sys.modules.pop(name, None)
    os.write(confine.CHANNEL, READY)
    host.serve(confine.CHANNEL, limits)


def _filter() -> bytes:
    """BPF that refuses calls which not every engine refuses. Raises OSError.

    - prlimit64 on other processes: a lower limit would end the first one
    - user namespaces, in which a program would have capabilities; clone3 is not there, as its flags cannot be read
    - keys of the kernel, which containers of one user share
    """
    if sys.byteorder != "little":
        raise OSError(errno.ENOTSUP, "sandboxes in containers need a little-endian machine")

    def one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, value)

    load, equal, above, from_, any_bit = 0x20, 0x15, 0x25, 0x35, 0x45
    refuse, lack = one(0x06, 0x00050000 | errno.EPERM), one(0x06, 0x00050000 | errno.ENOSYS)
    number, argument = one(load, 0), one(load, 16)
    program = b""
    for machine, prlimit, clone, unshare, add_key in _CALLS:
        rules = number + one(equal, prlimit, 0, 3) + argument + one(equal, 0, 1, 0) + refuse
        for call in (clone, unshare):
            rules += number + one(equal, call, 0, 3) + argument + one(any_bit, linux.CLONE_NEWUSER, 0, 1) + refuse
        rules += number + one(from_, add_key, 0, 2) + one(above, add_key + 2, 1, 0) + refuse
        program += one(load, 4) + one(equal, machine, 0, len(rules) // 8) + rules
    program += number + b"".join(one(equal, call, 0, 1) + lack for call in _CLONE3)
    return program + one(0x06, 0x7FFF0000)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
