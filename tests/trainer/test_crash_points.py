"""A trainer that is killed between any two parts of a step, over a real queue: what comes of it are the bits of the run
without faults, and nothing is lost or trained twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ready_group
from shared.config import load
from shared.types import WeightVersion
from tests.trainer.process import BATCH, deterministic, producing, trainer
from tools.embedded_redis import embedded_server
from tools.simulated.trainer import NumpyArrays, SimulatedBackend
from volley.runs.record import claimed, mark_finished
from volley_proof.verify.command import verify

STEPS = 24
"""Every kill lets a step or more pass; of those in a checkpoint, up to two of its intervals."""
POINTS = ["before record", "after record", "before ledger", "after ledger", "before commit", "after commit"]
CHECKPOINTS = ["before save", "after save"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    with embedded_server(tmp_path / "redis") as spec:
        yield spec.url


def without_faults(folder: Path, learning_rate: float) -> dict[str, np.ndarray]:
    backend = SimulatedBackend(CheckpointFolders(folder, "r", 3, NumpyArrays()), {}, 3, learning_rate=learning_rate)
    backend.build()
    for step in range(STEPS):
        groups = [deterministic(ticket, "e000001-s000000") for ticket in range(BATCH * step + 1, BATCH * step + 3)]
        backend.step([ready_group(one, b"", "") for one in groups], WeightVersion(1, step))
    return backend.params


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_between_any_two_parts_of_a_step(tmp_path: Path, redis: str, monkeypatch: pytest.MonkeyPatch):
    options = {
        "trainer__max_steps": STEPS,
        "trainer__checkpointing_options": {"save_interval_steps": 5},
    }
    monkeypatch.setenv("DIE_AT", POINTS[0])
    with (
        trainer(tmp_path, redis, "tests.support.dying_trainer", **options) as process,
        producing(redis, STEPS * BATCH),
    ):
        for following in [*POINTS[1:], *CHECKPOINTS, ""]:
            assert process.process is not None
            assert process.process.wait(60) == -9, process.log()[-3000:]
            monkeypatch.setenv("DIE_AT", following)
            process.start()
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    expected = without_faults(
        tmp_path / "calm", load([tmp_path / "config.yaml"]).config.trainer.optimizer_config.learning_rate
    )
    newest = CheckpointFolders(tmp_path / "r" / "checkpoints", "r", 3, NumpyArrays()).newest()
    assert newest is not None
    assert newest.state.step == STEPS
    assert all(np.array_equal(newest.params[name], expected[name]) for name in expected)
    with claimed(load([tmp_path / "config.yaml"])) as claim:
        mark_finished(claim.folder, claim.record)
    result = verify(claim.folder)
    assert result["ok"], result["violations"]
    assert result["by_disposition"] == {"trained": STEPS * BATCH}
    assert result["undone"] == []
