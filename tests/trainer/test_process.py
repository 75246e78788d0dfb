"""The trainer as a process, with the simulated learner: full disks, stops, trainers that wake up after they were
replaced.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.arrays import RestoredCheckpoint
from shared.config import load
from shared.queue.server import prepare
from tests.trainer.process import BATCH, SIMULATED, producing, trainer
from tools.embedded_redis import embedded_server, running
from tools.simulated.trainer import NumpyArrays
from volley.runs.record import claimed, mark_finished
from volley_proof.verify.command import verify

STEPS = 5
LATE = {"trainer__checkpointing_options": {"save_interval_steps": 3}, "grpo_config__off_policy_steps": 2}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    with embedded_server(tmp_path / "redis") as spec:
        yield spec.url


def newest(folder: Path) -> RestoredCheckpoint:
    restored = CheckpointFolders(folder / "r" / "checkpoints", "r", 3, NumpyArrays()).newest()
    assert restored is not None
    return restored


def check(folder: Path) -> None:
    """The run, which a trainer alone has begun, is taken up and proven, and its metrics have one line a step."""
    with claimed(load([folder / "config.yaml"])) as claim:
        mark_finished(claim.folder, claim.record)
    result = verify(claim.folder)
    assert result["ok"], result["violations"]
    steps = [orjson.loads(line)["step"] for line in claim.folder.metrics.read_bytes().splitlines()]
    assert steps == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RestoredCheckpoint:
    folder = tmp_path_factory.mktemp("plain")
    with (
        embedded_server(folder / "redis") as spec,
        trainer(folder, spec.url, SIMULATED) as process,
        producing(spec.url, STEPS * BATCH),
    ):
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    return newest(folder)


def same(a: RestoredCheckpoint, b: RestoredCheckpoint) -> bool:
    return a.state.step == b.state.step and all(np.array_equal(a.params[name], b.params[name]) for name in a.params)


def test_a_full_disk_is_waited_out_and_nothing_is_lost(tmp_path: Path, redis: str, uninterrupted: RestoredCheckpoint):
    with trainer(tmp_path, redis, SIMULATED) as process:
        process.wait(lambda s: s["phase"] == "waiting")
        with producing(redis, STEPS * BATCH):
            for step in (1, 3):
                process.wait(lambda s, step=step: s["step"] >= step)
                with process.full_disk():
                    process.wait(lambda s: (s["waiting_for"] and "disk" in s["waiting_for"]) or s["phase"] == "done")
            process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    assert same(newest(tmp_path), uninterrupted)
    check(tmp_path)


def test_sigterm_while_the_disk_is_full(tmp_path: Path, redis: str, uninterrupted: RestoredCheckpoint):
    with trainer(tmp_path, redis, SIMULATED) as process:
        process.wait(lambda s: s["phase"] == "waiting")
        with process.full_disk(), producing(redis, STEPS * BATCH):
            status = process.wait(lambda s: s["waiting_for"] and "disk" in s["waiting_for"])
            assert process.terminate() == 0
        assert re.fullmatch(r"no disk space under .*: \d+ MB free \(.*\)", status["waiting_for"])
        process.start()
        with producing(redis, STEPS * BATCH):
            process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    assert same(newest(tmp_path), uninterrupted)
    check(tmp_path)


def test_sigterm_while_loading_and_while_paused_with_a_redis_that_hangs(tmp_path: Path):
    spec = prepare(tmp_path / "redis")
    with running(spec) as server, trainer(tmp_path, spec.url, SIMULATED, **LATE) as process:
        process.wait(lambda s: True)
        assert process.terminate() == 0
        process.start()
        with producing(spec.url, BATCH, max_staleness=2):
            process.wait(lambda s: s["step"] == 1 and s["phase"] == "waiting")
        process.ask("pause")
        process.wait(lambda s: s["phase"] == "paused")
        server.send_signal(signal.SIGSTOP)
        try:
            assert process.terminate() == 0
        finally:
            server.send_signal(signal.SIGCONT)
        assert "the grace is over" not in process.log()
    assert newest(tmp_path).state.step == 1


def test_a_zombie_that_wakes_up_disturbs_nothing(tmp_path: Path, redis: str, uninterrupted: RestoredCheckpoint):
    with trainer(tmp_path, redis, SIMULATED) as zombie, producing(redis, STEPS * BATCH):
        zombie.wait(lambda s: s["step"] >= 2)
        assert zombie.process is not None
        zombie.process.send_signal(signal.SIGSTOP)
        with trainer(tmp_path, redis, SIMULATED) as process:
            process.wait(lambda s: s["step"] >= 4)
            zombie.process.send_signal(signal.SIGCONT)
            assert zombie.process.wait(30) == 1
            process.wait(lambda s: s["phase"] == "done")
            assert process.terminate() == 0
    assert same(newest(tmp_path), uninterrupted)
    check(tmp_path)
