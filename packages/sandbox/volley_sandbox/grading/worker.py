"""Grading process: loads one library, and grades model-written text in forks of itself.

    python -m volley_sandbox.grading.worker MODULE

MODULE's public functions are called by name with JSON values. A request is one JSON line on stdin, the answer one line
on stdout; the end of stdin ends the process. The library's output goes to stderr. The last argument of a confined call
is model-written text; MODULE's `prepare` receives the other arguments first, outside the fork.

Invariants
- A call with model-written text is `confined`: it runs in a fork with limits on CPU and memory, which ends with the
  call. It cannot affect how another answer is graded, and a loop or a leak costs only that call. If the kernel has
  Landlock and libseccomp is installed, the fork writes no file, opens no socket, starts and signals no process.
- The process has one thread, so its forks are complete. Its random numbers and PYTHONHASHSEED are fixed: the same call
  gives the same answer in every process.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from shared.errors import InputError, Unavailable
from volley_sandbox.sandbox.inside import linux
from volley_sandbox.sandbox.process.seccomp import build_program

MEMORY_BYTES = 4 * 2**30
"""Address space of the process, including mappings that libraries never use."""

CONFINED_CPU_S = 2
CONFINED_WALL_S = 24.0
CONFINED_MEMORY_BYTES = 2**30
"""Memory that a confined call may use in addition to the library's."""

MAX_ANSWER = 2**20


def main(module: str) -> int:
    answers = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        library = importlib.import_module(module)
    except ImportError as error:
        _send(answers, {"error": "input", "detail": str(error), "hint": "install the package, or choose another one"})
        return 1
    filter_ = _filter()
    _send(answers, {"value": "ready"})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        function, arguments = request["function"], request["arguments"]
        if request["confined"]:
            _send(answers, _confined(library, function, arguments, filter_))
        else:
            _send(answers, _called(library, function, arguments))
    return 0


def _filter() -> bytes:
    """Seccomp filter of a fork, as for sandboxes; empty without libseccomp."""
    try:
        return build_program(signals=False, metadata=False)
    except Unavailable:
        return b""


def _called(library: ModuleType, function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    random.seed(0)
    try:
        return {"value": getattr(library, function)(*arguments)}
    except InputError as error:
        return {"error": "input", "detail": error.detail, "hint": error.hint}
    except (MemoryError, RecursionError):
        return {"error": "ended", "detail": "its limits on memory or depth ended it"}
    except Exception as error:  # noqa: BLE001 - the caller receives and raises it
        return {"error": "defect", "detail": f"{type(error).__name__}: {error}"[:300]}


def _confined(library: ModuleType, function: str, arguments: Sequence[Any], filter_: bytes) -> dict[str, Any]:
    """Call a function in a fork.

    Returns its answer, {"error": "ended"} if its limits ended it, or {"error": "late"} if the machine was too slow to
    reach them.
    """
    if "error" in (prepared := _called(library, "prepare", arguments[:-1])):
        return prepared
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _grade_and_exit(library, function, arguments, filter_, writable)
    os.close(writable)
    try:
        received, in_time = _read(readable, time.monotonic() + CONFINED_WALL_S)
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not in_time:
        return {"error": "late", "detail": f"no answer within {CONFINED_WALL_S:g} s"}
    try:
        return json.loads(received)
    except ValueError:
        return {"error": "ended", "detail": "its limits on CPU or memory ended it"}


def _grade_and_exit(
    library: ModuleType, function: str, arguments: Sequence[Any], filter_: bytes, writable: int
) -> None:
    """Main function of the fork; never returns. It closes all other descriptors, so it cannot affect other answers."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        mine = os.dup2(writable, 3)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            _confine(filter_)
        except (OSError, ValueError) as error:
            answer = {"error": "defect", "detail": f"it cannot be confined: {error}"}
        else:
            answer = _called(library, function, arguments)
        os.write(mine, json.dumps(answer).encode()[:MAX_ANSWER])
    except BaseException:  # noqa: BLE001, S110 - an incomplete answer reports the failure
        pass
    finally:
        os._exit(0)


def _confine(filter_: bytes) -> None:
    with open("/proc/self/statm", "rb") as pages:
        size = int(pages.read().split()[0]) * resource.getpagesize()
    memory = min(size + CONFINED_MEMORY_BYTES, MEMORY_BYTES)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, CONFINED_CPU_S),
        (resource.RLIMIT_FSIZE, MAX_ANSWER),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        resource.setrlimit(limit, (value, value))
    linux.forbid_new_privileges()
    if version := linux.landlock_abi():
        linux.restrict_files(version, ["/"], [], [], [])
    if filter_:
        linux.install_filter(filter_)


def _read(readable: int, deadline: float) -> tuple[bytes, bool]:
    """Read until the end of the pipe; False if the end did not come by the deadline."""
    received = b""
    while len(received) <= MAX_ANSWER:
        ready, _, _ = select.select([readable], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return received, False
        more = os.read(readable, 65536)
        if not more:
            return received, True
        received += more
    return b"", True


def _send(answers: int, answer: Mapping[str, Any]) -> None:
    rest = json.dumps(answer).encode() + b"\n"
    while rest:
        rest = rest[os.write(answers, rest) :]


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
