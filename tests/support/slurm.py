"""A cluster of Slurm in one file: `sbatch`, `srun`, `scontrol`, `scancel` and `sinfo` start real processes here.

    with cluster(folder, ["127.0.0.2", "127.0.0.3"], redis) as slurm:
        job = slurm.submit(script)

The commands share the folder that STUB_SLURM names. Nodes are addresses of this machine, or of network namespaces that
are named after their addresses. As in Slurm, `scancel` reaches all processes of all steps but not the batch script,
SIGTERM makes `srun` kill its step, and a job that is queued again keeps its id and gets other nodes for those that are
down. Processes of a node are known by a mark in their environment, except Redis, which overwrites it and is known by
its working folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "STUB_SLURM_STEP"
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")


@dataclass
class Job:
    """A job as `sbatch --wait` runs it."""

    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8") if self.output.exists() else ""

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text(), re.MULTILINE):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)

    def wait(self, timeout_s: float = 180.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text()) from None


class Cluster:
    def __init__(self, folder: Path, nodes: Sequence[str], redis: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.nodes, self._variables = folder, list(nodes), variables
        (folder / "bin").mkdir(parents=True)
        (folder / "redis").write_text(str(redis), encoding="utf-8")
        (folder / "down").mkdir()
        (folder / "nodes").write_text("\n".join(nodes), encoding="utf-8")
        for name in COMMANDS:
            path = folder / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n', encoding="utf-8")
            path.chmod(0o755)

    def submit(self, script: Path, *options: str, **variables: str) -> Job:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "SLURM_"))}
        environment |= {"STUB_SLURM": str(self.folder), **self._variables, **variables}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        command = [str(self.folder / "bin" / "sbatch"), *options, str(script)]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return Job(process, script.parent / "slurm-7.log")

    def kill_node(self, node: str, *, ends_job: bool = False) -> None:
        """The node is gone for good, with all its processes.

        Without --no-kill this `ends_job`, which is queued again.
        """
        (self.folder / "down" / node).touch()
        if ends_job:
            (self.folder / "requeue").touch()
            os.killpg(int((self.folder / "batch").read_text(encoding="utf-8")), signal.SIGKILL)
        for one in self.nodes if ends_job else [node]:
            kill(self.folder, one, signal.SIGKILL)

    def left(self) -> list[int]:
        return [pid for node in self.nodes for pid in processes(self.folder, node)]


@contextlib.contextmanager
def cluster(folder: Path, nodes: Sequence[str], redis: Path, **variables: str) -> Iterator[Cluster]:
    """Args:
    redis: folder in which the run's Redis works.
    variables: environment variables of every job.
    """
    made = Cluster(folder, nodes, redis, variables)
    try:
        yield made
    finally:
        for node in nodes:
            kill(folder, node, signal.SIGKILL)


def processes(folder: Path, node: str) -> list[int]:
    """Ids of the node's processes."""
    mark, found = f"{_MARK}={folder}/{node}".encode(), []
    allocated = _words(folder / "allocated")
    redis = (folder / "redis").read_text(encoding="utf-8") if node in allocated[:1] else None
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0") or str((path / "cwd").readlink()) == redis:
                found.append(int(path.name))
    return found


def kill(folder: Path, node: str, number: signal.Signals) -> None:
    for pid in processes(folder, node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _down(folder: Path) -> set[str]:
    return {path.name for path in (folder / "down").iterdir()}


def _words(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def _nodes(folder: Path) -> list[str]:
    return _words(folder / "nodes")


def sbatch(folder: Path, arguments: list[str]) -> int:
    if "SLURM_JOB_ID" in os.environ:  # a job submits its script
        (folder / "requeue").touch()
        return 0
    script, text = arguments[-1], Path(arguments[-1]).read_text(encoding="utf-8")
    given = [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]
    options = dict(word.lstrip("-").partition("=")[::2] for word in [*given, *arguments[:-1]])
    output = Path(re.sub("%(.)", lambda found: {"j": "7", "%": "%"}[found[1]], options["output"]))
    again = folder / "requeue"
    for start in range(10):
        again.unlink(missing_ok=True)
        up = [node for node in _nodes(folder) if node not in _down(folder)][: int(options["nodes"])]
        (folder / "allocated").write_text("\n".join(up), encoding="utf-8")
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"stub[{len(up)}]", "SLURM_RESTART_COUNT": str(start)}
        with output.open("ab") as log:
            batch = subprocess.Popen(
                ["bash", script], env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
            )
        (folder / "batch").write_text(str(batch.pid), encoding="utf-8")
        code = batch.wait()
        for node in up:
            kill(folder, node, signal.SIGKILL)
        if not again.exists():
            return code if code >= 0 else 128 - code
    return 99


def srun(folder: Path, arguments: list[str]) -> int:
    options = [word for word in arguments if word.startswith("--")]
    n = next(i for i, word in enumerate(arguments) if not word.startswith("--"))
    node = next(word.partition("=")[2] for word in options if word.startswith("--nodelist="))
    if node in _down(folder):
        print(f"srun: error: Required node not available (down, drained or reserved): {node}", file=sys.stderr)
        return 1
    space = ["ip", "netns", "exec", node] if Path("/run/netns", node).exists() else []
    variables = os.environ | {_MARK: f"{folder}/{node}"}
    step = subprocess.Popen([*space, *arguments[n:]], env=variables, start_new_session=True, stdin=subprocess.DEVNULL)

    def stop(*_: object) -> None:
        print("srun: forcing job termination", file=sys.stderr)
        kill(folder, node, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    code = step.wait()
    if node in _down(folder):
        print(f"srun: error: Node failure on {node}", file=sys.stderr)
        return 0
    if code < 0:
        print(f"srun: error: {node}: task 0: {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def scontrol(folder: Path, arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print((folder / "allocated").read_text(encoding="utf-8"))
        return 0
    assert arguments == ["requeue", "7"], arguments
    (folder / "requeue").touch()
    os.killpg(int((folder / "batch").read_text(encoding="utf-8")), signal.SIGTERM)
    return 0


def scancel(folder: Path, arguments: list[str]) -> int:
    assert arguments == ["--quiet", "--signal=TERM", "7"], arguments
    for node in _nodes(folder):
        kill(folder, node, signal.SIGTERM)
    return 0


def squeue(folder: Path, arguments: list[str]) -> int:
    if "--format=%K" in arguments:
        print(os.environ.get("STUB_SLURM_TASK", "N/A"))
    else:
        print(len(set(_words(folder / "allocated")) - _down(folder)))
    return 0


def sinfo(folder: Path, arguments: list[str]) -> int:
    node = next(word.partition("=")[2] for word in arguments if word.startswith("--nodes="))
    print("down*" if node in _down(folder) else "allocated")
    return 0


if __name__ == "__main__":
    raise SystemExit(globals()[sys.argv[1]](Path(os.environ["STUB_SLURM"]), sys.argv[2:]))
