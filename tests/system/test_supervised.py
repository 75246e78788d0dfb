"""Supervised runs as processes: demonstrations of an environment, a trainer that is killed, and RL from what comes of
it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.run.checkpoint_files import newest, read_manifest
from shared.run.folder import RunFolder
from tests.support.stack import Training, training
from volley.reporting import jsonl
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SFT = (
    "mode=sft",
    "sft.max_steps=12",
    "sft.save_interval_steps=4",
    "sft.eval_fraction=0.25",
    "sft.eval_every_n_steps=5",
)


def ended(run: Training) -> RunFolder:
    assert run.wait(400) == 0, run.text()
    assert run.leftovers() == []
    return run.folder


def lines(folder: RunFolder) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")) for row in jsonl.read(folder.sft)]


def computed(folder: RunFolder) -> Any:
    """By the last weights: log-probabilities of 64 tokens, in all their digits."""
    last = newest(folder.checkpoints)
    assert last is not None
    return read_manifest(last).probe


def test_a_killed_trainer_changes_nothing_and_rl_begins_with_what_it_has_learned(tmp_path: Path) -> None:
    with training(tmp_path / "whole", *SFT) as run:
        whole = ended(run)
    with training(tmp_path / "killed", *SFT) as run:
        while not any(row["step"] == 6 for row in jsonl.read(run.folder.sft)):
            assert run.process.poll() is None, run.text()
            time.sleep(0.02)
        run.kill("trainer")
        killed = ended(run)
    assert "trainer ended with signal 9" in run.text()
    assert lines(killed) == lines(whole)
    assert computed(killed) == computed(whole)
    assert killed.demonstrations.read_bytes() == whole.demonstrations.read_bytes()
    assert not killed.redis.exists()
    for folder in (whole, killed):
        assert verify(folder)["violations"] == []
    origin = f"model.path={killed.path}@latest"
    with training(tmp_path / "rl", origin, "sft.max_steps=0", "trainer.max_steps=1") as run:
        rl = ended(run)
    assert orjson.loads(rl.record.read_bytes())["origin"]["run"] == killed.name
    assert read_manifest(rl.checkpoints / "e000001-s000000").probe == computed(killed)
