"""The real trainer, and the run's bucket over a server of S3's protocol: killed, its folder taken away, the bucket
taken away.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.groups.group_buffer import ready_group
from shared.config import load
from shared.errors import NotFound
from shared.process.ports import free_port
from shared.run import archive, commits
from shared.run.lineage import epoch_of
from shared.run.state import TrainerState
from shared.types import Group, WeightVersion
from tests.support.bucket import s3_server
from tests.trainer.process import BATCH, SIMULATED, TrainerProcess, deterministic, producing, trainer
from tools.embedded_redis import embedded_server
from tools.simulated.trainer import NumpyArrays, SimulatedBackend
from volley.runs.record import claimed, mark_finished
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, MAX_BYTES, BucketHead
from volley_proof.verify.command import verify

STEPS = 12


@pytest.fixture
def bucket(s3: Bucket) -> Bucket:
    """One that processes can reach."""
    return s3


def options(bucket: Bucket, steps: int = STEPS) -> dict[str, Any]:
    return {
        "run__bucket": bucket.address,
        "trainer__max_steps": steps,
        "trainer__checkpointing_options": {"save_interval_steps": 3},
    }


def head(bucket: Bucket) -> BucketHead | None:
    try:
        return BucketHead.from_json(bucket.read(HEAD, MAX_BYTES))
    except NotFound:
        return None


def has_step(bucket: Bucket, step: int) -> bool:
    found = head(bucket)
    return found is not None and found.version is not None and found.version.step >= step


def finish(process: TrainerProcess) -> None:
    process.wait(lambda s: s["phase"] == "done")
    assert process.terminate() == 0


def check(folder: Path, bucket: Bucket, steps: int = STEPS) -> TrainerState:
    """The run is proven, and its log, also of the steps before its folder was lost, gives its weights bit by bit; the
    bucket has all of it. Returns the last state.
    """
    newest = CheckpointFolders(folder / "r" / "checkpoints", "r", 3, NumpyArrays()).newest()
    assert newest is not None
    assert newest.state.step == steps
    expected = trained_again(folder, newest.state)
    assert all(np.array_equal(newest.params[name], expected[name]) for name in expected)
    assert verified(folder, bucket) == newest.state
    return newest.state


def verified(folder: Path, bucket: Bucket) -> TrainerState:
    """The newest state, also of the bucket."""
    with claimed(load([folder / "config.yaml"])) as claim:
        mark_finished(claim.folder, claim.record)
    result = verify(claim.folder)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    found = head(bucket)
    assert found is not None
    state = commits.newest(claim.folder)
    assert state is not None
    assert found.version == state.version
    return state


def trained_again(folder: Path, state: TrainerState) -> dict[str, np.ndarray]:
    """From the first step on, by the archive."""
    rate = load([folder / "config.yaml"]).config.trainer.optimizer_config.learning_rate
    backend = SimulatedBackend(CheckpointFolders(folder / "again", "r", 3, NumpyArrays()), {}, 3, learning_rate=rate)
    backend.build()
    for step in range(1, state.step + 1):
        made = WeightVersion(epoch_of(step, state.lineage) or 0, step)
        groups = [Group.decode(payload) for payload in archive.read(folder / "r" / "archive", "r", made)]
        backend.step([ready_group(one, b"", "") for one in groups], WeightVersion(made.epoch, step - 1))
    return backend.params


def test_a_trainer_goes_on_without_its_folder(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made after the newest step in the bucket is undone, said, and made again."""
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path, spec.url, SIMULATED, **options(bucket)) as process,
    ):
        with producing(spec.url, 4 * BATCH):
            process.wait(lambda s: s["bucket_step"] == 4)
        process.kill()
        with monkeypatch.context() as away, producing(spec.url, 8 * BATCH):
            away.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
            process.start()
            process.wait(lambda s: s["durable_step"] == 8)
        process.kill()
        shutil.rmtree(tmp_path / "r")
        right, before = process.tree, head(bucket)
        process.tree = right | {"grpo_config": right["grpo_config"] | {"num_generations": 4}}
        process.start()
        assert process.process is not None
        assert process.process.wait(120) == 2
        assert "the run was started with another configuration" in process.log()
        assert head(bucket) == before
        process.tree = right
        process.start()
        with producing(spec.url, STEPS * BATCH):
            status = process.wait(lambda s: s["branched"])
            assert "from the bucket at e000001-s000004: 4 later steps" in status["branched"]
            finish(process)
    assert check(tmp_path, bucket).lineage == ((1, 0), (1002, 4))


@pytest.mark.long
def test_the_real_trainer_goes_on_without_its_folder(bucket: Bucket, tmp_path: Path) -> None:
    """With the reference of its first step; the log after the checkpoint that it finds is trained again, and gives the
    bits that the records tell.
    """
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path, spec.url, **options(bucket, 6)) as process,
    ):
        with producing(spec.url, 4 * BATCH):
            process.wait(lambda s: s["bucket_step"] == 4)
        process.kill()
        shutil.rmtree(tmp_path / "r")
        process.start()
        with producing(spec.url, 6 * BATCH):
            finish(process)
    found = verified(tmp_path, bucket)
    assert found.lineage == ((1, 0), (1002, 4))
    assert found.reference == "e000001-s000000"
    assert '"log replayed"' in process.log()


@pytest.mark.long
def test_the_folder_before_is_refused_once_another_is_filled(bucket: Bucket, tmp_path: Path) -> None:
    """A host that stands still is given up, and comes back: its trainer ends, and starts no more; the queue and the
    bucket stay those of the other.
    """
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path / "a", spec.url, SIMULATED, **options(bucket)) as first,
    ):
        assert first.process is not None
        with producing(spec.url, 5 * BATCH):
            first.wait(lambda s: s["bucket_step"] == 5)
        first.process.send_signal(signal.SIGSTOP)
        with trainer(tmp_path / "b", spec.url, SIMULATED, **options(bucket)) as second:
            with producing(spec.url, 8 * BATCH):
                second.wait(lambda s: s["bucket_step"] == 8)
                first.process.send_signal(signal.SIGCONT)
                assert first.process.wait(120) not in (0, -9)
                first.start()
                assert first.process.wait(120) == 2
                assert "has continued from another folder of run r" in first.log()
            with producing(spec.url, STEPS * BATCH):
                finish(second)
            assert second.log().count('"started"') == 1
        assert check(tmp_path / "b", bucket).lineage == ((1, 0), (1002, 5))


@pytest.mark.long
def test_the_folder_before_waits_for_a_bucket_that_does_not_answer_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue knows of a later trainer, which stands until the bucket has said whose the run is."""
    port = free_port()
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path / "a", spec.url, SIMULATED, **options(bucket)) as first,
    ):
        assert first.process is not None
        with producing(spec.url, 5 * BATCH):
            first.wait(lambda s: s["bucket_step"] == 5)
        first.kill()
        with trainer(tmp_path / "b", spec.url, SIMULATED, **options(bucket)) as second:
            with producing(spec.url, 8 * BATCH):
                second.wait(lambda s: s["bucket_step"] == 8)
            with monkeypatch.context() as away:
                away.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
                first.start()
            first.wait(lambda s: "the queue knows of a later trainer" in (s["waiting_for"] or ""))
            with producing(spec.url, STEPS * BATCH):
                finish(second)
            assert first.process.poll() is None
            first.kill()
            assert first.log().count('"started"') == 1
            assert second.log().count('"started"') == 1
        assert check(tmp_path / "b", bucket).lineage == ((1, 0), (1002, 5))


def slowly(ticket: int, version: str) -> Group:
    """A step takes a while, so that many uploads are of few steps."""
    time.sleep(0.03)
    return deterministic(ticket, version)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_while_it_uploads(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, and sometimes its folder is gone, too: no start fences itself, and no group is poison."""
    draw, steps, n_gone = random.Random(5), 60, 0
    points = [draw.randint(1, 24) for _ in range(6)]
    monkeypatch.setenv("DIE_AT", f"change {points[0]}")
    with (
        embedded_server(tmp_path / "redis") as spec,
        producing(spec.url, steps * BATCH, slowly),
        trainer(tmp_path, spec.url, "tests.support.dying_trainer", **options(bucket, steps)) as process,
    ):
        for following in [*(f"change {n}" for n in points[1:]), ""]:
            assert process.process is not None
            assert process.process.wait(120) == -9, process.log()[-3000:]
            if draw.random() < 0.3:
                shutil.rmtree(tmp_path / "r")
                n_gone += 1
            monkeypatch.setenv("DIE_AT", following)
            process.start()
        finish(process)
    assert n_gone > 1
    check(tmp_path, bucket, steps)
    assert '"poison"' not in (tmp_path / "r" / "ledger.jsonl").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_bucket_that_is_away_gets_it_later(
    server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer with a folder of its own starts without it, and trains on."""
    port = free_port()
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    bucket = Bucket("s3://volley/away")
    with (
        embedded_server(tmp_path / "redis") as spec,
        producing(spec.url, STEPS * BATCH),
        trainer(tmp_path, spec.url, SIMULATED, **options(bucket)) as process,
    ):
        process.wait(lambda s: "cannot be reached" in (s["waiting_for"] or ""))  # it may have begun elsewhere
        assert not (tmp_path / "r" / "archive").exists()
        with s3_server(port):
            process.wait(lambda s: s["bucket_step"] is not None)
            process.kill()
        process.start()
        status = process.wait(lambda s: s["phase"] == "done")
        assert "the run's bucket" in (process.wait(lambda s: s["waiting_for"])["waiting_for"])
        assert status["bucket_step"] is None
        with s3_server(port):  # another one, empty
            process.wait(lambda s: s["bucket_step"] == STEPS)
            assert process.terminate() == 0
            check(tmp_path, bucket)


@pytest.mark.long
def test_a_bucket_that_stands_still_keeps_no_trainer_from_its_end(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the end of a run, nor while an empty folder waits for it."""
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path, spec.url, SIMULATED, **options(bucket, 4)) as process,
        socket.create_server(("127.0.0.1", 0), backlog=128) as deaf,
    ):
        with producing(spec.url, 4 * BATCH):
            process.wait(lambda s: s["bucket_step"] == 4)
        process.kill()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        process.start()
        process.wait(lambda s: s["phase"] == "done" and "the run's bucket" in (s["waiting_for"] or ""))
        assert process.terminate() == 0
        assert "the bucket is behind at the end" in process.log()
        shutil.rmtree(tmp_path / "r")
        process.start()
        process.wait(lambda s: s["phase"] == "loading")
        assert process.terminate() == 0
