"""The process from which sandboxes are forked: `python -s -S zygote.py FD`, with an empty environment.

It is a fresh program, so it holds none of the service's memory, and it never reads a byte that a sandbox wrote.
Requests arrive on FD, a private socket of packets (JSON objects, with descriptors):

    {"op": "start", namespaces, landlock, root, folders, kind}   -> {"op": "ready", ...} or {"op": "failed", "error"}
    {"op": "filter", "program"}                            once, before the first sandbox; base64 of BPF
    {"op": "spawn", "id", "limits", "tmp"} + [channel, log]
    {"op": "kill" | "pause" | "resume", "id"}
    {"op": "look"}                                         -> {"op": "computed", "ids"}: computed since the last look
    <- {"op": "spawned", "id", "pid"} · {"op": "door", "id"} + [listening socket]
    <- {"op": "ended", "id", "status", "cpu_s", "max_rss_mb", "error"}

It ends when the other end is closed, and all sandboxes with it: each asks to be killed when its parent dies, and a pid
namespace ends with its first process. It has one thread.
"""

from __future__ import annotations

import array
import base64
import fcntl
import gc
import json
import os
import random  # noqa: F401 - what most submissions import is there already when they are forked
import select
import signal
import socket
import sys
import time
import traceback  # noqa: F401
from typing import Any

sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(os.path.abspath(__file__))]
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import confine  # noqa: E402
import host  # noqa: E402
import linux  # noqa: E402
import namespaces  # noqa: E402

del sys.path[0]

MAX_PACKET = 1 << 16
_COMPUTED_S = 0.1
_CLOCK = 2  # clock id of a process's CPU time, see clock_getcpuclockid(3)
_ABOVE = 100  # descriptors above this number do not collide with a sandbox's own
_SIGNALS = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "resume": signal.SIGCONT}
_OWN = ("adapters", "agents", "confine", "host", "interpreter", "linux", "namespaces", "programs", "values")


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    request = _receive(control)[0]
    if request is None:
        return
    try:
        confinement = _prepare(control, request)
    except OSError as error:
        _send(control, {"op": "failed", "error": str(error)})
        return
    Zygote(control, confinement).serve()


def _prepare(control: socket.socket, request: dict[str, Any]) -> confine.Confinement:
    """Enter namespaces if requested, report the abilities, and receive the filter. Raises OSError."""
    programs = request["kind"] == "agent"
    wanted = [*confine.python_folders(), *request["folders"], *(confine.system_folders() if programs else ())]
    folders = [path for path in wanted if os.path.exists(path)]
    proc = None
    reads_all = os.getuid() == 0 and confine.hides_python(folders, parents=not request["namespaces"])
    privileged = confine.is_privileged(reads_all)
    if request["namespaces"] and os.getuid() == 0 and not privileged:
        raise OSError("root lacks some capabilities here")  # the kernel does not bound root's threads
    if programs and not request["namespaces"]:
        raise OSError("programs need namespaces")
    confine.prefer_for_oom_kill()
    os.umask(0o022)  # other users must be able to pass through the new root
    if request["namespaces"]:
        hidden = [path for path in confine.site_packages() if not any(one.startswith(path) for one in folders)]
        proc = namespaces.enter(request["root"], privileged, folders, confine.DEVICES, hidden, programs)
        if proc is not None:
            proc = fcntl.fcntl(proc, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        _become_first(control)
    landlock = min(linux.landlock_abi(), request["landlock"])
    _send(
        control,
        {
            "op": "ready",
            "landlock": landlock,
            "namespaces": [*namespaces.NAMES, *(() if privileged else ("user",))] if request["namespaces"] else [],
            "tmp": namespaces.TMP if request["namespaces"] else None,
            "bounds_threads": privileged or request["namespaces"],
            "python": list(sys.version_info[:3]),
        },
    )
    filtered = _receive(control)[0]
    if filtered is None:
        os._exit(0)
    return confine.Confinement(
        landlock,
        base64.b64decode(filtered["program"]),
        tuple(folders),
        proc,
        request["namespaces"],
        reads_all and privileged and bool(landlock),
        privileged,
        programs,
        tuple(request["folders"]) if programs else (),
    )


def _become_first(control: socket.socket) -> None:
    """Return in the first process of the new pid namespace; the present process only waits for it."""
    outside = os.getpid()
    child = os.fork()
    if child == 0:
        linux.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() not in (0, outside):
            os._exit(1)
        return
    control.close()
    os.closerange(3, 256)
    os.waitpid(child, 0)
    os._exit(0)


class Zygote:
    """Server of requests from `control`."""

    def __init__(self, control: socket.socket, confinement: confine.Confinement) -> None:
        self._control, self._confinement = control, confinement
        self._ids: dict[int, int] = {}
        self._cpu_s: dict[int, float] = {}
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if linux.IS_LINUX else os.pipe()
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Serve requests until the other end is closed."""
        gc.collect()
        gc.freeze()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._answer():
                return

    def _answer(self) -> bool:
        """Handle one request; False if there will be no more."""
        request, descriptors = _receive(self._control)
        if request is None:
            return False
        if request["op"] == "spawn":
            self._spawn(request, descriptors)
        elif request["op"] in _SIGNALS:
            for pid, sandbox in self._ids.items():
                if sandbox == request["id"]:
                    os.kill(pid, _SIGNALS[request["op"]])
        elif request["op"] == "look":
            self._look()
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _look(self) -> None:
        pids = self._ids if linux.IS_LINUX else {}
        used = {pid: time.clock_gettime(~pid << 3 | _CLOCK) for pid in pids}
        computed = [self._ids[pid] for pid, cpu_s in used.items() if cpu_s - self._cpu_s.get(pid, 0) >= _COMPUTED_S]
        self._cpu_s = used
        _send(self._control, {"op": "computed", "ids": computed})

    def _spawn(self, request: dict[str, Any], descriptors: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send(self._control, {"op": "ended", "id": request["id"], "error": f"no process can be made: {error}"})
            return
        if pid == 0:
            try:
                self._be_sandbox(request, descriptors, parent)
            finally:
                os._exit(1)
        self._ids[pid] = request["id"]
        _send(self._control, {"op": "spawned", "id": request["id"], "pid": pid})

    def _be_sandbox(self, request: dict[str, Any], descriptors: list[int], parent: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        channel, log, control = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
            for descriptor in (*descriptors, self._control.fileno())
        )
        os.dup2(channel, confine.CHANNEL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            namespaces.enter_user(self._confinement.proc)
            alive = namespaces.enter_pid_namespace() if self._confinement.programs else None
            if self._confinement.programs:
                _hand_over_door(control, request["id"])
            confine.enter(self._confinement, request["id"], request["limits"], request["tmp"], parent, alive)
        except (OSError, ValueError) as error:
            host.say_unconfined(confine.CHANNEL, str(error))
            return
        self._ids.clear()
        for name in _OWN:
            sys.modules.pop(name, None)
        host.serve(confine.CHANNEL, request["limits"])

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox = self._ids.pop(pid, None)
            if sandbox is not None:
                rss = usage.ru_maxrss / (1024 if linux.IS_LINUX else 1 << 20)
                used = round(usage.ru_utime + usage.ru_stime, 3)
                _send(
                    self._control,
                    {"op": "ended", "id": sandbox, "status": status, "cpu_s": used, "max_rss_mb": round(rss, 1)},
                )


def _hand_over_door(control: int, number: int) -> None:
    """Open the sandbox's door and send its listening socket to the service. Raises OSError."""
    with namespaces.open_door() as door, socket.socket(fileno=control) as service:
        socket.send_fds(service, [json.dumps({"op": "door", "id": number}).encode()], [door.fileno()])


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive the next packet and its descriptors; None when the other end is closed."""
    packet, ancillary, _, _ = control.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4 * 4))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (json.loads(packet) if packet else None), list(descriptors)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


if __name__ == "__main__":
    main()
