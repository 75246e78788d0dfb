"""The real process over a real queue: killed, stopped and fenced, it ends with the weights of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.loop.ledger import LedgerFile
from shared.types import Group
from tests.trainer.process import BATCH, SIMULATED, deterministic, producing, trainer
from tools.embedded_redis import embedded_server
from tools.simulated.trainer import NumpyArrays

STEPS = 5


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    with embedded_server(tmp_path / "redis") as spec:
        yield spec.url


def final(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], Path]:
    run = folder / "r"
    restored = CheckpointFolders(run / "checkpoints", "r", 3, OrbaxArrays()).newest()
    assert restored is not None
    assert restored.state.step == STEPS
    return dict(restored.params), dict(restored.optimizer), run


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("plain")
    with (
        embedded_server(folder / "redis") as spec,
        trainer(folder, spec.url) as process,
        producing(spec.url, STEPS * BATCH),
    ):
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    return final(folder)


def lines(run: Path) -> list[dict]:
    return [orjson.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_killed_and_resumed_ends_bit_identical(tmp_path: Path, redis: str, uninterrupted):
    with trainer(tmp_path, redis) as process, producing(redis, STEPS * BATCH):
        process.wait(lambda s: s["step"] >= 2)
        process.kill()
        process.start()
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    params, optimizer, run = final(tmp_path)
    assert same(params, uninterrupted[0])
    assert same(optimizer, uninterrupted[1])
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5]
    assert {t: x["step"] for t, x in LedgerFile(run / "ledger.jsonl").settled().items()} == {
        t: (t - 1) // BATCH + 1 for t in range(1, 11)
    }
    before, after = (
        [{k: v for k, v in x.items() if k in ("loss", "kl", "reward_mean")} for x in lines(r)]
        for r in (uninterrupted[2], run)
    )
    assert before == after


def test_failed_and_poisoned_tickets_are_replaced(tmp_path: Path, redis: str):
    def make(ticket: int, version: str) -> Group:
        made = deterministic(ticket, version)
        if ticket == 2:
            return Group(ticket, made.env, made.task, (), failure="EnvironmentDied")
        if ticket == 4:
            return Group(ticket, made.env, made.task, made.trajectories * 2)
        return made

    with trainer(tmp_path, redis, SIMULATED, trainer__max_steps=2) as process, producing(redis, 2 * BATCH, make):
        status = process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    assert status["tickets"] == {"trained": 4, "failed": 1, "poison": 1}
    ledger = LedgerFile(tmp_path / "r" / "ledger.jsonl").settled()
    assert {t: x["disposition"] for t, x in ledger.items()} == {
        1: "trained",
        2: "failed",
        3: "trained",
        4: "poison",
        5: "trained",
        6: "trained",
    }


def test_a_newer_trainer_fences_the_older(tmp_path: Path, redis: str):
    with trainer(tmp_path / "old", redis, SIMULATED) as old:
        old.wait(lambda s: s["phase"] == "waiting")
        with trainer(tmp_path / "new", redis, SIMULATED) as new:
            new.wait(lambda s: s["phase"] == "waiting")
            assert old.process is not None
            assert old.process.wait(30) == 1
    failures = [line for line in old.log().splitlines() if '"level":"error"' in line]
    assert len(failures) == 1
    assert "Fenced" in failures[0]


def test_pause_checkpoint_and_sigterm_between_checkpoints(tmp_path: Path, redis: str):
    interval = {"trainer__checkpointing_options": {"save_interval_steps": 3}, "grpo_config__off_policy_steps": 2}
    with trainer(tmp_path, redis, SIMULATED, **interval) as process, producing(redis, BATCH, max_staleness=2):
        status = process.wait(lambda s: s["step"] == 1 and s["phase"] == "waiting")
        assert status["checkpoint_step"] == 0
        process.ask("checkpoint")
        process.wait(lambda s: s["checkpoint_step"] == 1)
        process.ask("pause")
        process.wait(lambda s: s["phase"] == "paused")
    with trainer(tmp_path, redis, SIMULATED, **interval) as process, producing(redis, 2 * BATCH, max_staleness=2):
        process.wait(lambda s: s["step"] == 2)
        assert process.status()["checkpoint_step"] == 1
        assert process.terminate() == 0
    restored = CheckpointFolders(tmp_path / "r" / "checkpoints", "r", 3, NumpyArrays()).newest()
    assert restored is not None
    assert restored.state.step == 2
