"""`volley train` as a process, for tests of the whole stack: what it prints, its services' processes, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.cli.layout import PROJECT, RunFolder

SMALL = (
    "sft.max_steps=2",
    "sft.n_demonstrations=16",
    "sft.batch_size=4",
    "data.n_eval_tasks=6",
    "orchestrator.eval_every_n_steps=100",
    "trainer.groups_per_step=2",
    "trainer.length_buckets=[320]",
    "trainer.optimizer_config.warmup_steps=0",
    "grpo_config.num_generations=4",
)
"""Overrides of the quickstart's configuration that make a step take a second or two."""
_MARK = "VOLLEY_TEST_RUN"


@dataclass(frozen=True)
class Training:
    """One `volley train`. Every process of it carries `mark` in its environment, wherever it ends up in the process tree."""

    process: subprocess.Popen[bytes]
    folder: RunFolder
    output: Path
    errors: Path
    mark: str

    def text(self) -> str:
        return self.output.read_text() + self.errors.read_text()

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
        """The process id of a service, or of redis: a child of the supervisor."""
        wanted = "valkey-server" if name == "redis" else f"services.{name}"
        for pid in _marked(self.mark):
            if _parent(pid) == self.process.pid and wanted in _command(pid):
                return pid
        raise AssertionError(f"no process {name}")

    def kill(self, name: str) -> None:
        """SIGKILL, to that one process."""
        os.kill(self.service(name), signal.SIGKILL)

    def leftovers(self, timeout_s: float = 20.0) -> list[str]:
        """Command lines of processes that are still there after the time it takes to end them."""
        deadline = time.monotonic() + timeout_s
        while (left := _marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [_command(pid) for pid in left]


@contextlib.contextmanager
def training(folder: Path, *overrides: str, config: str = "configs/quickstart.yaml") -> Iterator[Training]:
    """Starts it in `folder` (its runs/ and what it prints lie there); at the end, whatever is left is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    name, mark = "system", uuid.uuid4().hex
    command = [sys.executable, "-m", "services.cli", "train", "--config", config, f"run.dir={folder / 'runs'}", f"run.name={name}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {_MARK: mark}
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen([*command, *overrides], cwd=PROJECT, env=environment, stdout=out, stderr=err)
    running = Training(process, RunFolder(folder / "runs" / name), output, errors, mark)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _marked(mark: str) -> list[int]:
    """Process ids (zombies have no environment, so they don't count)."""
    entry, found = f"{_MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
