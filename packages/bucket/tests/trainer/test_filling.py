"""A folder that is empty is filled from the bucket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.bucket.tests.trainer.runs import Killed, Run, head, objects, put_back, restore, tree
from shared.errors import WeightsError
from shared.run import commits
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from volley_bucket.objects import Bucket


@pytest.mark.long
def test_a_start_that_is_killed_while_it_fetches_begins_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "r", bucket)
    for _ in range(2):
        run.step(save=True)
    run.upload()
    shutil.rmtree(run.folder.path)
    assert restore(bucket, run.folder.path) == WeightVersion(1, 2)
    expected, n = tree(run.folder.path), 0
    while True:
        path, calls = tmp_path / str(n) / "r", iter(range(1000))

        def dying(call: Any, n: int = n, calls: Iterator[int] = calls) -> Any:
            def dies(*args: Any, **options: Any) -> Any:
                if next(calls) == n:
                    raise Killed
                return call(*args, **options)

            return dies

        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (Bucket, "download"), (Bucket, "swap"), (Path, "rmdir")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                restore(bucket, path)
            except Killed:
                pass
            else:
                break
        assert restore(bucket, path) == WeightVersion(1, 2)
        assert tree(path) == expected
        n += 1
    assert n > 10


def test_records_that_are_there_already_stay(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.folder.evals.write_bytes(b"first\nold\n")
    run.folder.samples.write_bytes(b"sample\n")
    run.upload()
    new = RunFolder(tmp_path / "new" / "r")
    new.path.mkdir(parents=True)
    new.evals.write_bytes(b"new\nold\nto")
    new.mixture.write_bytes(b"change\n")
    assert restore(bucket, new.path) == WeightVersion(1, 0)
    assert new.evals.read_bytes() == b"first\nold\nnew\n"
    assert (new.mixture.read_bytes(), new.samples.read_bytes()) == (b"change\n", b"sample\n")


def test_what_is_recorded_while_a_folder_is_placed_stays(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "r", bucket)
    run.folder.evals.write_bytes(b"first\n")
    run.upload()
    new = RunFolder(tmp_path / "new" / "r")
    new.path.mkdir(parents=True)
    new.evals.write_bytes(b"second\n")
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        if target == new.evals:
            with new.evals.open("ab") as file:
                file.write(b"third\n")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", late)
        restore(bucket, new.path)
    assert new.evals.read_bytes() == b"first\nsecond\nthird\n"


def test_a_run_that_never_got_to_the_bucket_begins_anew(bucket: Bucket, tmp_path: Path) -> None:
    assert restore(bucket, tmp_path / "r") is None
    mine = head(bucket)
    assert restore(bucket, tmp_path / "r") is None
    assert head(bucket) == mine
    assert restore(bucket, tmp_path / "elsewhere" / "r") is None
    assert head(bucket).folder != mine.folder


def test_a_checkpoint_that_is_damaged_is_passed_over(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    for step in range(1, 4):
        run.step(save=step > 1)
        run.upload()
    for version, expected in (("e000001-s000003", "e000001-s000002"), ("e000001-s000002", None)):
        key = bucket.keys(f"checkpoints/{version}/params")[0]
        bucket.upload(key, bytes(len(bucket.read(key, 2**20))))
        new = tmp_path / version / "r"
        if expected is None:
            with pytest.raises(WeightsError, match="none of the 2 checkpoints"):
                restore(bucket, new)
            assert tree(new) == {}
        else:
            before = objects(bucket)
            assert restore(bucket, new) == WeightVersion(1, 3)
            assert [path.name for path in (new / "checkpoints").iterdir()] == [expected]
            assert commits.versions(new / "archive") == [WeightVersion(1, 3)]
            put_back(bucket, before)
