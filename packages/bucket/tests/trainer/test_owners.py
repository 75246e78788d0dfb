"""Whose a bucket is: other runs, older copies of a folder, trainers that were replaced."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from packages.bucket.tests.trainer.runs import Killed, Run, every, head, objects, restore, tree, writer
from shared.errors import ConfigError, Conflict, Fenced, Unavailable, WeightsError
from shared.run import archive
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.schema import RunSection
from shared.types import WeightVersion
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, MAX_BYTES, BucketHead, put_head
from volley_bucket.run.restore import FolderRestore


def test_a_prefix_of_another_run_is_refused_and_nothing_is_touched(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.upload()
    before = objects(bucket)
    other, same_name = Run(tmp_path / "other", bucket, name="other"), Run(tmp_path / "again" / "r", bucket)
    with pytest.raises(ConfigError, match="belongs to run r, not to other"):
        other.upload()
    with pytest.raises(ConfigError, match="belongs to run r, not to other"):
        restore(bucket, tmp_path / "empty", name="other")
    for call in (same_name.upload, same_name.writer.check):
        with pytest.raises(ConfigError, match="has continued from another folder of run r, up to e000001-s000001"):
            call()
    assert objects(bucket) == before


def test_a_prefix_with_anything_in_it_is_refused(s3: Bucket, tmp_path: Path) -> None:
    s3.upload("other/file", b"of somebody")
    run = Run(tmp_path / "r", s3)
    with pytest.raises(ConfigError, match="is not empty, and belongs to no run"):
        run.upload()
    with pytest.raises(ConfigError, match="is not empty, and belongs to no run"):
        restore(s3, tmp_path / "empty")
    assert every(s3) == ["other/file"]


@pytest.mark.parametrize("address", ["s3://v/..", "s3://v/a/../c", "s3://v/.", "s3://v/a//b", "s3://v/a b", "s4://v"])
def test_an_address_names_one_prefix(address: str) -> None:
    assert RunSection(bucket="s3://v.w/.a/b..c=d").bucket == "s3://v.w/.a/b..c=d"
    assert RunSection(bucket="s3://v.w/a//").bucket == "s3://v.w/a"
    with pytest.raises(ValidationError, match="is not an address"):
        RunSection(bucket=address)


def test_the_folder_of_a_console_is_none(s3: Bucket, server: dict[str, str], tmp_path: Path) -> None:
    """It is an object whose key is the address; one whose key is none to us is somebody's."""
    below = f"{server['AWS_ENDPOINT_URL']}/{s3.address.removeprefix('s3://')}"
    httpx.put(f"{below}/", content=b"", trust_env=False).raise_for_status()
    Run(tmp_path / "r", s3).upload()
    httpx.put(f"{below}-other/a//b", content=b"", trust_env=False).raise_for_status()
    with pytest.raises(ConfigError, match="is not empty"):
        restore(Bucket(f"{s3.address}-other"), tmp_path / "new" / "r")


def test_a_trainer_that_was_replaced_puts_nothing(s3: Bucket, tmp_path: Path) -> None:
    """Neither one of the same folder, nor one of the folder that the bucket followed before."""
    run = Run(tmp_path / "r", s3)
    run.step()
    run.upload()
    older, state = run.writer, run.state
    run.begin(2)
    run.upload()
    before = objects(s3)
    with pytest.raises(Fenced):
        older.upload(state, WeightVersion(1, 0))
    with pytest.raises(Fenced):
        writer(s3, run.folder).claim(1)
    assert restore(s3, tmp_path / "new" / "r") == run.state.version
    run.step(save=True)
    with pytest.raises(Fenced):
        run.upload()
    with pytest.raises(ConfigError, match="has continued from another folder"):
        writer(s3, run.folder).claim(3)
    assert objects(s3).items() >= {k: v for k, v in before.items() if k != HEAD}.items()
    assert head(s3).version == WeightVersion(2, 1)


def test_an_older_copy_of_the_folder_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.upload()
    shutil.copytree(run.folder.path, tmp_path / "copy")
    run.begin(2)
    run.upload()
    with pytest.raises(ConfigError, match="is an older copy"):
        writer(bucket, RunFolder(tmp_path / "copy")).claim(3)


def test_an_answer_that_was_lost_fences_nobody(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.upload()
    bucket.upload(HEAD, head(bucket).to_json() + b" ")  # as ours, of which we know no tag
    run.step()
    run.upload()
    assert head(bucket).version == WeightVersion(1, 1)


class DeafBucket(Bucket):
    """What is put is there, and answers `Conflict`: an answer was lost, and the request repeated."""

    def swap(self, *args: Any) -> Any:
        super().swap(*args)
        raise Conflict("it is another one by now")


def test_no_lost_answer_ends_a_trainer(s3: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", s3)
    run.writer = writer(DeafBucket(s3.address), run.folder)
    for step in range(1, 4):
        run.step(save=True)
        run.upload()
        assert head(s3).version == WeightVersion(1, step)
    s3.remove([HEAD])
    with pytest.raises(Unavailable, match="has lost its head"):
        run.upload()
    run.upload()
    assert restore(DeafBucket(s3.address), tmp_path / "new" / "r") == WeightVersion(1, 3)
    assert len(list((tmp_path / "new" / "r" / "archive").iterdir())) == 2


def test_a_head_that_changes_all_the_time_is_waited_for(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "r", bucket)
    run.upload()
    run.step()

    def never(*args: Any) -> Any:
        raise Conflict("it is another one by now")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "swap", never)
        with pytest.raises(Unavailable, match="keeps changing"):
            run.upload()
    run.upload()
    assert head(bucket).version == WeightVersion(1, 1)


def test_a_head_of_an_epoch_before_that_is_put_back_ends_no_trainer(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.upload()
    older = bucket.read(HEAD, MAX_BYTES)
    run.begin(2)
    run.upload()
    bucket.upload(HEAD, older)
    run.step()
    run.upload()
    assert head(bucket).version == run.state.version


def test_a_folder_owns_no_bucket_but_those_that_followed_it(bucket: Bucket, tmp_path: Path) -> None:
    run, other = Run(tmp_path / "r", bucket), Bucket(f"{bucket.address}-other")
    run.upload()
    other.upload("other/file", b"of somebody")
    follower = writer(other, run.folder)
    for call in (follower.check, lambda: follower.claim(1)):
        with pytest.raises(ConfigError, match="is not empty, and belongs to no run"):
            call()
    assert every(other) == ["other/file"]


def test_a_folder_that_lost_an_epoch_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    """What the bucket has can be gone on from."""
    run = Run(tmp_path / "r", bucket)
    run.step()
    run.upload()
    run.begin(2)
    run.step(save=True)
    run.upload()
    before = objects(bucket)
    shutil.rmtree(run.folder.archive / "e000001")
    run.begin(3)
    for call in (run.writer.check, run.upload):
        with pytest.raises(ConfigError, match="has epoch 1, which this folder lacks"):
            call()
    found, tag = bucket.read_tagged(HEAD, MAX_BYTES)
    with pytest.raises(WeightsError, match="has not seen"):
        put_head(bucket, replace(BucketHead.from_json(found), epochs=(2,)), tag)
    assert objects(bucket) == before
    assert restore(bucket, tmp_path / "new" / "r") == WeightVersion(2, 2)


def test_a_trainer_that_cannot_go_on_takes_nothing(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.step()
    run.upload()
    before = objects(bucket)

    def check(state: TrainerState) -> None:
        assert state == run.state  # the newest one
        raise ConfigError("the run was started with another configuration")

    new = tmp_path / "new" / "r"
    with pytest.raises(ConfigError, match="with another configuration"):
        restore(bucket, new, check=check)
    assert objects(bucket) == before
    run.step()
    run.upload()
    assert restore(bucket, new) == WeightVersion(1, 3)


def test_what_was_fetched_is_not_placed_once_another_folder_has_gone_on(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path / "r", bucket).upload()
    stale = tmp_path / "stale" / "r"
    with monkeypatch.context() as patch:
        patch.setattr(FolderRestore, "_place", lambda _: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            restore(bucket, stale)
    restore(bucket, tmp_path / "new" / "r")
    before = tree(stale)
    with pytest.raises(ConfigError, match="has continued from another folder"):
        restore(bucket, stale)
    assert tree(stale) == before


def test_no_epoch_comes_twice(bucket: Bucket, tmp_path: Path) -> None:
    """However often a folder is lost whose last epochs the bucket has not heard of."""
    run = Run(tmp_path / "r", bucket)
    run.upload()
    last = 1
    for n in range(3):
        new = RunFolder(tmp_path / str(n) / "r")
        restore(bucket, new.path)
        found = archive.Archive(new.archive, "r").last_epoch()
        assert found > last + 500
        last = found
    bucket.upload(HEAD, replace(head(bucket), epochs=(1, 2**30)).to_json())
    with pytest.raises(WeightsError, match="leaves none for another trainer"):
        restore(bucket, tmp_path / "hostile" / "r")


@pytest.mark.parametrize("name", ["download", "read"])
def test_a_folder_whose_trainer_goes_on_is_waited_for(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is fetched goes meanwhile: that is no damage."""
    run, calls = Run(tmp_path / "r", bucket), iter(range(1000))
    run.step(save=True)
    run.upload()
    real = getattr(Bucket, name)

    def slow(self: Bucket, key: str, *args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            run.begin(2)
            for _ in range(3):
                run.step(save=True)
                run.upload()
        return real(self, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, name, slow)
        with pytest.raises(Unavailable, match="changed while it was read"):
            restore(bucket, tmp_path / "new" / "r")
    assert restore(bucket, tmp_path / "new" / "r") == WeightVersion(2, 4)
