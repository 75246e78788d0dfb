"""A run in its life: finished, extended and retuned, killed, finished again; another one started from its weights.
Simulated services.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.run import pinned
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, newest_state
from volley.layout import PROJECT
from volley.reporting import jsonl
from volley.runs.run_file import RunRecord, read_record
from volley_dashboard.report import report
from volley_proof.verify.command import verify

PROGRAM = """
import pathlib, sys
from volley.commands import train
from tools.chaos.arena import SIMULATED
from volley.local.stack import StackSeams
what, where, *overrides = sys.argv[1:]
seams = StackSeams(SIMULATED)
begun = train.main([where], overrides, seams) if what == "train" else None
raise SystemExit(train.resume(pathlib.Path(where), overrides, seams) if begun is None else begun)
"""
CONFIG = str(PROJECT / "configs/chaos.yaml")

pytestmark = pytest.mark.timeout(600)


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of simulated services, in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def told(folder: Path, *arguments: str) -> str:
    """What a run that comes to its end has said."""
    with started(folder, *arguments) as process:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
        return text


def record_of(run: RunFolder) -> RunRecord:
    record = read_record(run)
    assert record is not None
    return record


def state_of(run: RunFolder) -> TrainerState:
    state = newest_state(run.checkpoints)
    assert state is not None
    return state


def killed(folder: Path, run: RunFolder, step: int, *arguments: str) -> float:
    """The seconds that the run had been worked on when its supervisor was killed, after `step`."""
    with started(folder, *arguments) as process:
        deadline = time.monotonic() + 240
        while not any(line["step"] >= step for line in jsonl.read(run.metrics)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        elapsed = record_of(run).elapsed_s
        process.kill()
    return elapsed


def proven(run: RunFolder) -> None:
    result = verify(run)
    assert result["ok"], result["violations"]


def model(path: str) -> Sequence[str]:
    return ("run.dir=runs", f"model.path={path}", "orchestrator.lease_s=2")


@pytest.mark.long
def test_a_run_is_extended_retuned_killed_and_another_is_started_from_it(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "configs/models/tiny", tmp_path / "tiny")
    elsewhere, run = tmp_path / "elsewhere", RunFolder(tmp_path / "runs/a")
    elsewhere.mkdir()
    assert "DONE: steps=4" in told(tmp_path, "train", CONFIG, "run.name=a", "trainer.max_steps=4", *model("tiny"))
    assert (record_of(run).finished, record_of(run).final) == (True, "e000001-s000004")
    worked = record_of(run).elapsed_s

    changes = ("trainer.max_steps=8", "trainer.optimizer_config.learning_rate=1e-6")
    at_kill = killed(elsewhere, run, 6, "up", str(run.path), *changes)
    assert at_kill > worked
    text = told(elsewhere, "up", str(run.path))
    assert "DONE: steps=8" in text
    assert "changed from step 4 on" in text
    record, state = record_of(run), state_of(run)
    assert record.elapsed_s > at_kill
    assert (record.finished, record.final, state.step, state.phase) == (True, str(state.version), 8, "done")
    assert [(one.from_step, set(one.changes)) for one in record.amendments] == [
        (4, {change.partition("=")[0] for change in changes})
    ]
    assert pinned.in_force(state.settings, 1)["trainer.max_steps"] == 4
    assert [line["step"] for line in jsonl.read(run.metrics)] == list(range(1, 9))
    proven(run)

    other = RunFolder(tmp_path / "runs/b")
    text = told(tmp_path, "train", CONFIG, "run.name=b", "trainer.max_steps=2", *model("runs/a@latest"))
    assert f"{record.final} of run a" in text
    assert record_of(other).config["model.path"] == f"{run.path}@{record.final}"
    shutil.rmtree(run.path)
    assert "DONE: steps=3" in told(elsewhere, "up", str(other.path), "trainer.max_steps=3")
    assert report.make(other)["started_from"]["version"] == record.final
    proven(other)
