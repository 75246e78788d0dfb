"""Output that nobody reads, or that cannot be written: what reads and prints ends, what trains or serves goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from shared.process.ports import free_port
from volley.__main__ import all_commands
from volley.layout import PROJECT

VOLLEY = [sys.executable, "-m", "volley"]
TRAIN = """
import sys
from volley.commands import train
from volley.local.stack import StackSeams
from volley.printing import outlive_output
from volley.program import run_program
from tools.chaos.arena import SIMULATED
def command():
    outlive_output(True)
    return train.main(["configs/chaos.yaml"], sys.argv[1:], StackSeams(SIMULATED))
run_program(command)
"""


def unread_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def test_a_command_that_prints_ends_with_its_reader() -> None:
    command = [*VOLLEY, "config", "show", "--config", "configs/quickstart.yaml"]
    done = subprocess.run(
        command, cwd=PROJECT, stdout=unread_pipe(), stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_a_standard_stream_that_is_closed_is_one_line(closed: str) -> None:
    command = f"exec {' '.join(VOLLEY)} config show --config configs/quickstart.yaml {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr  # an error and its hint
    assert done.stderr.startswith("volley: standard output: Bad file descriptor")


def test_an_error_that_cannot_be_written_either_is_one_line() -> None:
    command = f"exec {' '.join(VOLLEY)} config show --config no-such-file.yaml --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr


def test_a_closed_standard_error_changes_no_result() -> None:
    command = f"exec {' '.join(VOLLEY)} config show --config no-such-file.yaml --json 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=PROJECT, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    assert (done.returncode, '"exit_code": 2' in done.stdout) == (2, True)


@pytest.mark.parametrize(
    ("output", "code", "errors"),
    [(unread_pipe, 0, None), (unread_pipe, 0, full_disk), (full_disk, 1, unread_pipe)],
)
def test_a_server_goes_on(
    tmp_path: Path, output: Callable[[], int], code: int, errors: Callable[[], int] | None
) -> None:
    """The dashboard stands for all: one place knows what becomes of output."""
    port = free_port()
    command = [*VOLLEY, "dashboard", str(tmp_path), "--port", str(port)]
    opened = [output(), errors() if errors else subprocess.PIPE]
    with subprocess.Popen(command, cwd=PROJECT, stdout=opened[0], stderr=opened[1], encoding="utf-8") as process:
        try:
            deadline = time.monotonic() + 60
            while not answers(port):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.terminate()
        told = process.stderr.read() if process.stderr else ""
        assert process.wait(60) == code
    if errors is None:
        assert len(re.findall("^volley: standard output: .*; the command goes on$", told, re.MULTILINE)) == 1


def answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.timeout(300)
@pytest.mark.parametrize("both", ["", pytest.param("2>&1", marks=pytest.mark.long)])
def test_a_run_goes_on_and_its_log_gets_the_lines(tmp_path: Path, both: str) -> None:
    small = ["services.rollout_replicas=1", "data.n_eval_tasks=4", "trainer.max_steps=2", "run.dashboard=false"]
    reading, writing = os.pipe()
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, *small, f"run.dir={tmp_path}"],
            cwd=PROJECT,
            stdout=writing,
            stderr=writing if both else errors,
            env=os.environ | {"PYTHONPATH": str(PROJECT)},
        )
    os.close(writing)
    try:
        with os.fdopen(reading, encoding="utf-8") as reader:
            assert "starting services" in reader.readline()
        code = process.wait(240)
    finally:
        process.terminate()
    log = (tmp_path / "chaos/logs/volley.log").read_text(encoding="utf-8")
    told = (tmp_path / "errors").read_text(encoding="utf-8")
    assert code == 0, told
    assert "DONE: steps=2" in log.splitlines()[-1]
    assert f"next: volley report {tmp_path}/chaos, volley trajectories " in log.splitlines()[-2]
    assert told.count("\n") == (0 if both else 1)
    assert both or f"Broken pipe; the command goes on, and lines that cannot be printed are added to {tmp_path}" in told


def test_each_command_that_starts_services_outlives_its_output() -> None:
    starts = re.compile(r"\b(supervise|start_or_continue|until_stopped|keep_running|make_server|sharing)\b")
    for name, command in all_commands().items():
        spec = find_spec(command.module)
        assert spec is not None
        source = Path(str(spec.origin)).read_text(encoding="utf-8")
        assert command.outlives_output or not starts.search(source), name
