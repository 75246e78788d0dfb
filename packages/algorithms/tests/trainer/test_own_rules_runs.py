"""Runs with rules from files: killed, proven, replayed, and forked with other rules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import load
from shared.run import rule_files
from tests.trainer.process import BATCH, in_use, producing, trainer
from tools.embedded_redis import embedded_server
from volley.reporting import jsonl
from volley.runs import record

ROOT = Path(__file__).parents[4]
ADVANTAGE = """
import numpy as np


def advantage(group):
    return np.linspace(-1, 1, len(group.rewards)) + group.rewards
"""
"""It differs within every group, also where all rewards are equal."""


LEFT_OUT = ("train/2", "train/5")
KEEPS = "def keeps(group):\n    return group.task not in {}\n"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_with_own_rules_is_proven_replayed_and_forked(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(ADVANTAGE, encoding="utf-8")
    trained(
        tmp_path, {"loss": "examples/rules/vespo.py:loss", "advantage": f"{tmp_path}/rule.py:advantage"}, name="own"
    )
    run, fork = tmp_path / "r", tmp_path / "r-fork"
    assert "bit-identical" in volley("replay", run, "--from-step", 0)
    volley("fork", run, "--from", 2, "algorithm.loss=examples/rules/luspo.py:loss")
    assert "bit-identical" in volley("replay", fork, "--from-step", 3)
    for folder in (run, fork):
        assert "proven" in volley("verify", folder)
    assert all(norms(run))
    assert norms(fork)[:2] == norms(run)[:2]
    assert norms(fork)[2] != norms(run)[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_with_a_credit_and_a_filter_is_proven_replayed_and_forked(tmp_path: Path) -> None:
    for name, left_out in (("rule", LEFT_OUT), ("stricter", ("train/8",))):
        (tmp_path / f"{name}.py").write_text(KEEPS.format(left_out), encoding="utf-8")
    trained(tmp_path, {"credit": "examples/rules/discounted.py:credit"}, f"{tmp_path}/rule.py:keeps", name="grpo")
    run, fork = tmp_path / "r", tmp_path / "r-fork"
    assert tickets(run, "trained") == [1, 3, 4, 6, 7, 8, 9, 10]
    assert tickets(run, "filtered") == [2, 5]
    assert "bit-identical" in volley("replay", run, "--from-step", 0)
    volley("fork", run, "--from", 2, f"trainer.filters.custom={tmp_path}/stricter.py:keeps")
    assert tickets(fork, "trained") == [1, 3, 4, 6, 7, 9]
    for folder in (run, fork):
        assert "proven" in volley("verify", folder)


def trained(folder: Path, algorithm: dict[str, str], keeps: str | None = None, *, name: str) -> None:
    """Train four steps; the trainer is killed in between, and the rule's file is gone when it starts again."""
    named = {"algorithm": algorithm, "trainer": {"filters": {"custom": keeps}}}
    tree = rule_files.replaced(named, rule_files.resolved(named, ROOT))
    saving, filters = {"save_interval_steps": 2}, tree["trainer"]["filters"]
    with (
        embedded_server(folder / "redis") as redis,
        trainer(
            folder,
            redis.url,
            algorithm={"name": name, **tree["algorithm"]},
            trainer__max_steps=4,
            trainer__checkpointing_options=saving,
            trainer__filters=filters,
        ) as process,
        producing(redis.url, 4 * BATCH + len(LEFT_OUT)),
    ):
        process.wait(lambda status: status["durable_step"] >= 3, 420)
        process.kill()
        (folder / "rule.py").unlink()
        process.start()
        assert process.wait(lambda status: status["phase"] == "done", 420)["branched"] is None
        assert process.terminate() == 0
    with record.claimed(load([folder / "config.yaml"])) as claim:
        record.mark_finished(claim.folder, claim.record)


def tickets(run: Path, end: str) -> list[int]:
    """Tickets of a run's ledger that ended like this."""
    return sorted(line["ticket"] for line in jsonl.read(run / "ledger.jsonl") if line["disposition"].startswith(end))


def volley(*arguments: object) -> str:
    """Output of a command that succeeds."""
    command = [sys.executable, "-m", "volley", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=in_use(), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def norms(run: Path) -> list[float]:
    """Norm of the gradient of each step."""
    return [json.loads(line)["grad_norm"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
