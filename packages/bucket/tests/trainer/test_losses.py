"""What a bucket or a folder has lost is put again, or named."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from packages.bucket.tests.trainer.runs import (
    FailingBucket,
    Killed,
    Run,
    every,
    fill,
    head,
    objects,
    restore,
    tree,
    writer,
)
from shared.errors import ConfigError, Unavailable
from shared.run import archive
from shared.run.checkpoint_files import MANIFEST
from shared.run.folder import RunFolder
from shared.run.state import STATE
from shared.types import WeightVersion
from volley_bucket.objects import Bucket, Tag
from volley_bucket.run.head import HEAD, MAX_BYTES


@pytest.mark.parametrize("name", ["ledger.jsonl", "evals.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("how", ["gone", "shorter", "another"])
def test_what_the_folder_lost_is_not_taken_from_the_bucket(bucket: Bucket, tmp_path: Path, name: str, how: str) -> None:
    run = Run(tmp_path / "r", bucket)
    for record in (run.folder.evals, run.folder.metrics):
        record.write_bytes(b'{"step":0}\n{"step":2}\n')
    run.step()
    run.upload()
    path, before = run.folder.path / name, objects(bucket)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.read_bytes().find(b"\n") + 1] if how == "shorter" else b"{}\n" * 99)
    if how == "shorter" and name == "ledger.jsonl":
        path.write_bytes(b"")
    run.begin(2)
    run.writer.check()
    path.touch()  # as a repair leaves it
    if name == "metrics.jsonl" and how != "gone":  # steps that were undone have left it
        run.upload()
        assert b"".join(bucket.read(piece.key, 2**20) for piece in head(bucket).lines[name]) == path.read_bytes()
        return
    with pytest.raises(ConfigError, match="has lost lines"):
        run.upload()
    assert objects(bucket) == before


def test_a_bucket_that_was_emptied_is_filled_again(s3: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", s3)
    run.upload()
    s3.remove(every(s3))
    run.step()
    with pytest.raises(Unavailable, match="has lost its head"):
        run.upload()
    run.upload()
    assert restore(s3, tmp_path / "new" / "r") == WeightVersion(1, 1)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_live", [True, False])
def test_a_head_that_is_lost_is_put_again_by_its_owner(s3: Bucket, tmp_path: Path, is_cut: bool, is_live: bool) -> None:
    run = Run(tmp_path / "r", s3)
    run.step(save=True)
    run.upload()
    s3.upload(HEAD, s3.read(HEAD, MAX_BYTES)[:50]) if is_cut else s3.remove([HEAD])
    if not is_live:
        run.begin(2)
        run.writer.check()
        with pytest.raises(ConfigError, match="is malformed" if is_cut else "is not empty"):
            Run(tmp_path / "other" / "r", s3).upload()
    run.step()
    if is_live:
        with pytest.raises(Unavailable, match="is uploaded again"):
            run.upload()
    run.upload()
    assert restore(s3, tmp_path / "new" / "r") == run.state.version


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("is_live", [True, False])
def test_a_host_that_is_lost_while_a_lost_head_is_made_up_for_leaves_no_new_beginning(
    bucket: Bucket, tmp_path: Path, is_cut: bool, is_live: bool
) -> None:
    """Killed at any object: what was there is there, and an empty folder is refused until there is a whole head."""
    run, new = Run(tmp_path / "r", bucket), tmp_path / "new" / "r"
    for step in range(1, 6):
        run.step(save=step % 2 == 0)
        run.upload()
    bucket.upload(HEAD, b"{") if is_cut else bucket.remove([HEAD])
    before = {key: data for key, data in objects(bucket).items() if not key.startswith(("lines", HEAD))}
    run.step()
    if is_live:
        with pytest.raises(Unavailable, match="has lost its head"):
            run.upload()
    for n in range(1, 9):
        dying = FailingBucket(bucket.address, n, Killed())
        if is_live:
            run.writer._bucket = dying
        else:
            run.begin(n + 1)
            run.writer = writer(dying, run.folder)
        with pytest.raises(Killed):
            run.upload()
        assert objects(bucket).items() >= before.items()
        with pytest.raises(ConfigError, match="is malformed" if is_cut else "is not empty"):
            restore(bucket, new)
    run.writer._bucket = bucket
    run.upload()
    assert restore(bucket, new) == run.state.version


def test_a_bucket_that_is_being_filled_is_no_new_one(bucket: Bucket, tmp_path: Path) -> None:
    """An empty folder that comes meanwhile neither begins anew nor takes anything away."""
    run = Run(tmp_path / "r", bucket)
    fill(run, 4)
    run.writer = writer(FailingBucket(bucket.address, 5, Unavailable("away")), run.folder)
    with pytest.raises(Unavailable):
        run.upload()
    before = objects(bucket)
    assert head(bucket).version is None
    with pytest.raises(ConfigError, match="is being filled by another folder"):
        restore(bucket, tmp_path / "new" / "r")
    assert objects(bucket) == before
    run.begin(2)
    run.upload()
    assert restore(bucket, tmp_path / "new" / "r") == run.state.version


@pytest.mark.parametrize("how", ["fault", "restart"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_backlog_ends_however_often_that_fails(bucket: Bucket, tmp_path: Path, how: str, is_begun: bool) -> None:
    """No object of the log is put twice: not after a fault, and not by the next trainer."""
    run, failing = Run(tmp_path / "r", bucket), FailingBucket(bucket.address, 50, Unavailable("away"))
    if is_begun:
        run.step()
        run.upload()
    fill(run, 200)
    run.writer = writer(failing, run.folder)
    for n_tries in range(1, 20):
        try:
            run.upload()
            break
        except Unavailable:
            if how == "restart":
                run.begin(n_tries + 1)
                run.writer = writer(failing, run.folder)
    assert n_tries < 15
    assert head(bucket).version == run.state.version
    assert len([key for key in failing.keys_put if key.startswith("archive/")]) < 425
    assert restore(bucket, tmp_path / "new" / "r") == run.state.version


@pytest.mark.parametrize("lost", ["group", "lines", "manifest", "state", "refused"])
def test_what_a_bucket_lost_is_put_again_at_the_next_start(bucket: Bucket, tmp_path: Path, lost: str) -> None:
    run = Run(tmp_path / "r", bucket)
    refused = archive.refused_path(run.folder.refused_groups, WeightVersion(1, 6), 1)
    refused.parent.mkdir(parents=True)
    refused.write_bytes(b"groups")
    run.folder.refused.write_bytes(orjson.dumps({"version": "e000001-s000006", "step": 6}) + b"\n")
    for step in range(1, 6):
        run.step(save=step % 2 == 0)
        run.upload()
    named = head(bucket)
    keys = {
        "group": "archive/e000001/s000002.zst",
        "lines": named.lines["ledger.jsonl"][0].key,
        "manifest": f"checkpoints/{named.checkpoints[-1][0]}/{MANIFEST}",
        "state": f"checkpoints/{named.checkpoints[-1][0]}/{STATE}",
        "refused": refused.relative_to(run.folder.path).as_posix(),
    }
    bucket.remove([keys[lost]])
    run.begin(2)
    run.writer.claim(2)
    assert head(bucket) == named
    run.upload()
    assert restore(bucket, tmp_path / "new" / "r") == run.state.version


@pytest.mark.parametrize("lost", ["checkpoints", "archive", "ledger.jsonl"])
def test_a_folder_that_lost_a_part_is_not_filled(bucket: Bucket, tmp_path: Path, lost: str) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.upload()
    run.step()
    path = run.folder.path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = tree(run.folder.path)
    assert restore(bucket, run.folder.path) is None
    assert tree(run.folder.path) == before


class LateBucket(Bucket):
    """Does not take the first head."""

    n_refused = 0

    def swap(self, key: str, data: bytes, tag: Tag | None) -> Tag:
        if not self.n_refused:
            self.n_refused += 1
            raise Unavailable("not yet")
        return super().swap(key, data, tag)


def test_a_first_head_that_fails_leaves_an_empty_bucket_to_the_next_try(bucket: Bucket, tmp_path: Path) -> None:
    """Nothing is put below an address before its head."""
    run = Run(tmp_path / "r", LateBucket(bucket.address))
    run.step(save=True)
    with pytest.raises(Unavailable, match="not yet"):
        run.upload()
    assert objects(bucket) == {}
    run.writer.claim(run.epoch)
    assert set(objects(bucket)) == {HEAD}
    assert head(bucket).version is None
    run.upload()
    assert head(bucket).version == run.state.version


def test_an_older_copy_of_the_same_epoch_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.upload()
    shutil.copytree(run.folder.path, tmp_path / "copy" / "r")
    run.step()
    run.upload()
    with pytest.raises(ConfigError, match="is an older copy"):
        writer(bucket, RunFolder(tmp_path / "copy" / "r")).check()
    assert writer(bucket, run.folder).check()
