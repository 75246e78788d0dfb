"""`volley train` and `volley up` as processes, for tests of the whole stack, also around a simulated engine and
trainer: output, services, and what is left of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.run.folder import RunFolder
from volley.layout import PROJECT, python_of

SMALL = "tests/system/small.yaml"
SIMULATED = "configs/chaos.yaml"
_NAME = "system"
_MARK = "VOLLEY_TEST_RUN"
_PROGRAM = """
import pathlib, sys
from volley.commands import train
from volley.local.stack import StackSeams
from shared.errors import VolleyError
from tools.chaos.arena import SIMULATED
command, where, *overrides = sys.argv[1:]
seams = StackSeams(SIMULATED)
try:
    begun = train.main([where], overrides, seams) if command == "train" else None
    code = train.resume(pathlib.Path(where), overrides, seams) if begun is None else begun
except VolleyError as error:
    code = f"volley: {error}"
raise SystemExit(code)
"""
"""The two commands, but for the engine and the trainer. Every error has the exit code 1."""


@dataclass(frozen=True)
class Training:
    """One `volley train` or `volley up`. Its processes carry `mark` in their environment, wherever they end up in the
    process tree.
    """

    process: subprocess.Popen[bytes]
    folder: RunFolder
    output: Path
    errors: Path
    mark: str

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8") + self.errors.read_text(encoding="utf-8")

    def wait_for(self, pattern: str, timeout_s: float = 240.0) -> re.Match[str]:
        """The first match in what it has printed. Raises AssertionError, with all of it, when it ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.text(), re.MULTILINE)
            if found:
                return found
            assert not ended, f"ended with {self.process.returncode} before {pattern!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)

    def wait(self, timeout_s: float = 240.0) -> int:
        return self.process.wait(timeout_s)

    def service(self, name: str) -> int:
        """The process id of a service, of redis, or of the reaper: a child of the supervisor."""
        wanted = {"redis": "-server", "reaper": r"reaper\.py", "trainer-1": r"\.process_id=1"}.get(
            name, rf"(services|simulated)\.{name}\b(?!.*process_id)"
        )
        for pid in self._processes():
            if _parent(pid) == self.process.pid and re.search(wanted, _command(pid)):
                return pid
        raise AssertionError(f"no process {name}")

    def kill(self, name: str) -> None:
        """SIGKILL, to that one process."""
        os.kill(self.service(name), signal.SIGKILL)

    def kill_next(self, name: str, before: set[int], timeout_s: float = 240.0) -> int:
        """SIGKILL to the first process of this name that is not one of `before`, once it is there; its id."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError):
                if (pid := self.service(name)) not in before:
                    os.kill(pid, signal.SIGKILL)
                    return pid
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no new process {name} within {timeout_s} s:\n{self.text()}"
            time.sleep(0.01)

    def leftovers(self, timeout_s: float = 20.0) -> list[str]:
        """Command lines of processes that are still there after the time it takes to end them."""
        deadline = time.monotonic() + timeout_s
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [_command(pid) for pid in left]

    def _processes(self) -> list[int]:
        """Ids of all processes of the run. Redis writes its title over its environment; it is known by its working
        folder.
        """
        entry, found = f"{_MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    entry in (path / "environ").read_bytes().split(b"\0")
                    or (path / "cwd").readlink() == self.folder.redis
                ):
                    found.append(int(path.name))
        return found

    def end(self) -> None:
        """Ctrl-C, then SIGKILL for whatever is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def training(folder: Path, *overrides: str, simulated: bool = False) -> Iterator[Training]:
    """`volley train` of a run in `folder` (its runs/ and what it prints lie there); at the end, whatever is left is
    killed.
    """
    config = [SIMULATED] if simulated else ["--config", SMALL]
    places = [f"run.dir={folder / 'runs'}", f"run.name={_NAME}"]
    with _volley(folder, simulated, "train", *config, *places, *overrides) as running:
        yield running


@contextlib.contextmanager
def continued(folder: Path, *, simulated: bool = False) -> Iterator[Training]:
    """`volley up` on the run that `training` has begun in `folder`."""
    with _volley(folder, simulated, "up", str(folder / "runs" / _NAME)) as running:
        yield running


@contextlib.contextmanager
def _volley(folder: Path, simulated: bool, *arguments: str) -> Iterator[Training]:
    folder.mkdir(parents=True, exist_ok=True)
    mark, output, errors = uuid.uuid4().hex, folder / "output", folder / "errors"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {_MARK: mark}
    with output.open("wb") as out, errors.open("wb") as err:
        program = ["-c", _PROGRAM] if simulated else ["-m", "volley"]
        command = [sys.executable, *program, *arguments]
        process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=out, stderr=err)
    running = Training(process, RunFolder(folder / "runs" / _NAME), output, errors, mark)
    try:
        yield running
    finally:
        running.end()


def random_model(folder: Path) -> Path:
    """Copy of the tiny model with random weights, written where safetensors is installed."""
    shutil.copytree(PROJECT / "configs/models/tiny", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    program = (
        "import json, sys; from pathlib import Path; from tests.support import models;"
        "config = json.loads(sys.argv[2]); models.write_hf(Path(sys.argv[1]), config, models.random_weights(config, 5))"
    )
    subprocess.run([python_of("rollout"), "-c", program, folder, json.dumps(config)], cwd=PROJECT, check=True)
    return folder


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
