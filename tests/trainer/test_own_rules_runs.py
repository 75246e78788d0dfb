"""A run with a loss and an advantage from files: killed, proven, replayed, and forked with another loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import load
from shared.queue.server import embedded_server
from shared.run import rule_files
from tests.trainer.process import BATCH, in_use, producing, trainer
from volley.runs import record

ROOT = Path(__file__).parents[2]
ADVANTAGE = """
import numpy as np


def advantage(group):
    return np.linspace(-1, 1, len(group.rewards)) + group.rewards
"""
"""It differs within every group, also where all rewards are equal."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_with_own_rules_is_proven_replayed_and_forked(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(ADVANTAGE, encoding="utf-8")
    named = {"loss": "examples/rules/vespo.py:loss", "advantage": f"{tmp_path}/rule.py:advantage"}
    section = {"name": "own", **rule_files.resolved({"algorithm": named}, ROOT)}
    saving = {"save_interval_steps": 2}
    with (
        embedded_server(tmp_path / "redis") as redis,
        trainer(
            tmp_path, redis.url, algorithm=section, trainer__max_steps=4, trainer__checkpointing_options=saving
        ) as process,
        producing(redis.url, 4 * BATCH),
    ):
        process.wait(lambda status: status["durable_step"] >= 3, 420)
        process.kill()
        (tmp_path / "rule.py").unlink()
        process.start()
        assert process.wait(lambda status: status["phase"] == "done", 420)["branched"] is None
        assert process.terminate() == 0
    with record.claimed(load([tmp_path / "config.yaml"])) as claim:
        record.mark_finished(claim.folder, claim.record)
    run, fork = tmp_path / "r", tmp_path / "r-fork"
    assert "bit-identical" in volley("replay", run, "--from-step", 0)
    volley("fork", run, "--from", 2, "algorithm.loss=examples/rules/luspo.py:loss")
    assert "bit-identical" in volley("replay", fork, "--from-step", 3)
    for folder in (run, fork):
        assert "proven" in volley("verify", folder)
    assert all(norms(run))
    assert norms(fork)[:2] == norms(run)[:2]
    assert norms(fork)[2] != norms(run)[2]


def volley(*arguments: object) -> str:
    """Output of a command that succeeds."""
    command = [sys.executable, "-m", "volley", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=in_use(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def norms(run: Path) -> list[float]:
    """Norm of the gradient of each step."""
    return [json.loads(line)["grad_norm"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
