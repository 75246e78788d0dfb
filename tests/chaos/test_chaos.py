"""`make chaos` as a program: whole runs under faults, in which nothing may be lost, doubled, or different."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from volley.layout import PROJECT

KINDS = {"kill", "pause", "wipe", "zombie", "disk_full", "delay", "stall", "cut"}


def chaos(folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of a run that broke no requirement."""
    command = [sys.executable, "-m", "tools.chaos", "--json", "--dir", str(folder), *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
    return orjson.loads(done.stdout)


def proven(result: dict[str, Any]) -> None:
    assert result["violations"] == []
    assert (result["lost"], result["doubly_trained"], result["bit_identical"]) == (0, 0, True)
    assert result["recovered"] == sum(result["faults"].values())
    assert result["recovery_sec"]["run"]["median"] <= result["recovery_sec"]["run"]["max"]


@pytest.mark.timeout(900)
def test_some_thirty_faults_leave_the_weights_as_they_would_be(tmp_path: Path):
    """With a checkpoint every three steps: what lies between is made again from the log."""
    interval = ("--save-interval-steps", "3")
    result = chaos(tmp_path, "--seed", "1", "--kills", "15", "--wipes", "2", "--zombies", "4", *interval)
    proven(result)
    assert sum(result["kills"].values()) >= 15
    assert sum(result["faults"].values()) >= 25
    assert (result["faults"]["wipe"], result["faults"]["zombie"]) == (2, 4)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interval", [1, 50])
def test_the_interval_of_checkpoints_changes_nothing(tmp_path: Path, interval: int):
    amounts = ("--kills", "15", "--wipes", "2", "--zombies", "4")
    proven(chaos(tmp_path, "--seed", "2", *amounts, "--save-interval-steps", str(interval)))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_three_hundred_kills_leave_the_weights_as_they_would_be(tmp_path: Path):
    interval = ("--save-interval-steps", "50")
    result = chaos(tmp_path, "--seed", "1", "--kills", "300", "--wipes", "10", "--zombies", "20", *interval)
    proven(result)
    assert sum(result["kills"].values()) >= 300
    assert result["retried_episodes"] >= 20
    assert result["kills"].keys() == {"redis", "env", "trainer", "orchestrator", "rollout-0", "rollout-1"}
    assert (result["faults"]["wipe"], result["faults"]["zombie"]) == (10, 20)
    assert result["faults"].keys() == KINDS


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_real_stack_for_three_minutes(tmp_path: Path):
    result = chaos(tmp_path, "--seed", "1", "--real", "--minutes", "3", "--save-interval-steps", "5")
    proven(result)
    assert result["elapsed_sec"] >= 180
    assert result["steps"] > 10
