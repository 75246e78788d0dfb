"""A few grading processes for the environments of one library.

Library code that is heavy, has global state, or evaluates model-written text runs there and not in the service
(`worker.py`). A process that misses a call's deadline is killed, and the next call starts another. One that is still
importing its library, which can take a minute on a busy machine, goes on with that for the next call.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from shared import errors
from shared.errors import GradingBusy, GradingEnded, InputError, Unavailable, VolleyError
from volley_sandbox.grading import worker

START_S = 25.0
"""Seconds that a call waits for the import of a library."""
IMPORT_S = 300.0
"""Seconds after which a process that still imports is killed."""

CALL_S = worker.CONFINED_WALL_S + 4.0

_ROOT = Path(errors.__file__).resolve().parents[1]
_HINT = "try again; another process is started"
_PASSED_ON = ("PATH", "LANG", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH")


class GradingPool:
    """Caller of `module`'s functions in separate processes, from any thread.

    Args:
        n_processes: calls that run at once; further calls wait up to `wait_s` seconds.
    """

    def __init__(self, module: str, n_processes: int = 2, wait_s: float = CALL_S) -> None:
        self._module, self._wait_s = module, wait_s
        self._free = threading.BoundedSemaphore(n_processes)
        self._idle: SimpleQueue[_Process] = SimpleQueue()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call `function` and return its result.

        Raises its InputErrors, GradingBusy (no process was free), Unavailable (no answer in time), VolleyError (a
        defect).
        """
        return self._ask({"function": function, "arguments": arguments, "confined": False})

    def grade(self, function: str, *arguments: Any) -> Any:
        """Call `function`, confined, with model-written arguments. Also raises GradingEnded."""
        return self._ask({"function": function, "arguments": arguments, "confined": True})

    def close(self) -> None:
        """End the idle processes, which would also end with the service."""
        while (process := self._idle_process()) is not None:
            process.kill()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        if not self._free.acquire(timeout=self._wait_s):
            raise GradingBusy(f"{self._module}: all grading processes are busy", "try again later")
        try:
            process = self._take()
            try:
                answer = process.ask(request) if process.wait_started() else None
            except BaseException:
                process.kill()
                raise
            self._idle.put(process)
        finally:
            self._free.release()
        if answer is None:
            raise Unavailable(f"{self._module} is still being imported after {START_S:g} s", "try again")
        return _value(self._module, request["function"], answer)

    def _take(self) -> _Process:
        while (process := self._idle_process()) is not None:
            if process.is_alive:
                return process
            process.kill()
        return _Process(self._module)

    def _idle_process(self) -> _Process | None:
        try:
            return self._idle.get_nowait()
        except Empty:
            return None


class _Process:
    """One running worker."""

    def __init__(self, module: str) -> None:
        self._module, self._rest = module, b""
        self._ready, self._began = False, time.monotonic()
        scrubbed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, module],
            cwd="/",
            env={**scrubbed, **single, "PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_started(self) -> bool:
        """Wait for the import of the library; False if it is still going on after START_S.

        Raises InputError if it fails, and Unavailable.
        """
        if not self._ready:
            answer = self._answer(START_S)
            if answer is None and time.monotonic() - self._began < IMPORT_S:
                return False
            _value(self._module, "import", answer or self._late(IMPORT_S))
            self._ready = True
        return True

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises Unavailable if the process dies or is late, and is then unusable.
        """
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._popen.stdin.flush()
        except OSError as error:
            raise self._lost(f"died ({error.strerror})") from error
        return self._answer(CALL_S) or self._late(CALL_S)

    def kill(self) -> None:
        """Kill the process and wait for it. A fork of its own ends by its limits."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent data
                    continue

    def _answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none in time. Raises Unavailable if the process dies."""
        assert self._popen.stdout is not None
        descriptor, deadline = self._popen.stdout.fileno(), time.monotonic() + timeout_s
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while b"\n" not in self._rest:
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            more = os.read(descriptor, 65536)
            if not more:
                raise self._lost("died")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _late(self, after_s: float) -> NoReturn:
        raise self._lost(f"did not answer within {after_s:g} s")

    def _lost(self, what: str) -> Unavailable:
        return Unavailable(f"the grading process of {self._module} {what}", _HINT)


def _value(module: str, function: str, answer: Mapping[str, Any]) -> Any:
    match answer:
        case {"value": value}:
            return value
        case {"error": "input", "detail": detail, "hint": hint}:
            raise InputError(detail, hint)
        case {"error": "ended", "detail": detail}:
            raise GradingEnded(f"{module}.{function}: {detail}")
        case {"error": "late", "detail": detail}:
            raise Unavailable(f"{module}.{function}: {detail}", "the machine is overloaded; try again later")
        case _:
            raise VolleyError(f"{module}.{function} failed: {answer.get('detail')}", "a defect of the environment")
