"""What a trainer puts into its run's bucket, and what it removes there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from packages.bucket.tests.trainer.runs import (
    RUN_ID,
    FailingBucket,
    Killed,
    Run,
    fill,
    head,
    objects,
    put_back,
    restore,
    tree,
    writer,
)
from services.trainer.loop.ledger import LedgerFile
from shared.errors import Conflict, NotFound, Unavailable
from shared.run import archive, ledger
from shared.run.checkpoint_files import MANIFEST
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from volley_bucket.objects import Bucket
from volley_bucket.run.head import HEAD, BucketHead
from volley_bucket.run.lines import FollowedLines


def test_the_bucket_decides_who_puts_an_object(s3: Bucket) -> None:
    first = s3.swap("a", b"1", None)
    with pytest.raises(Conflict):
        s3.swap("a", b"2", None)
    second = s3.swap("a", b"2", first)
    with pytest.raises(Conflict):
        s3.swap("a", b"3", first)
    assert s3.read_tagged("a", 9) == (b"2", second)
    s3.remove(["a", "a"])
    with pytest.raises(Conflict):
        s3.swap("a", b"3", second)
    with pytest.raises(NotFound, match="no such bucket"):
        Bucket("s3://nowhere/a").swap("a", b"3", None)


def test_a_lost_folder_comes_back_as_it_was(s3: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", s3)
    for step in range(1, 6):
        run.step(save=step == 3)
        run.upload()
    before = tree(run.folder.path)
    shutil.rmtree(run.folder.path)
    assert restore(s3, run.folder.path) == WeightVersion(1, 5)
    after = tree(run.folder.path)
    assert after.items() <= before.items()
    assert {name for name in before.keys() - after.keys() if not name.startswith("checkpoints/e000001-s000000/")} == {
        "checkpoints.jsonl",  # made again by the next trainer
        *(f"archive/e000001/s00000{step}.json" for step in (1, 2, 3)),
    }
    assert (run.folder.published / "beginning").read_text(encoding="utf-8") == RUN_ID
    assert restore(s3, run.folder.path) is None  # it is not empty


def test_the_step_under_way_is_not_in_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    """It may be refused, and others be made in its place."""
    run = Run(tmp_path / "r", bucket)
    run.step()
    under_way = WeightVersion(1, 2)
    run.archive.write(under_way, [b"refused"])
    LedgerFile(run.folder.ledger).append([ledger.line(2, ledger.TRAINED, under_way)])
    run.upload()
    assert [key for key in bucket.keys("archive") if "s000002" in key] == []
    shutil.rmtree(run.folder.path)
    restore(bucket, run.folder.path)
    assert [line["ticket"] for line in LedgerFile(run.folder.ledger).read()] == [1]


def test_groups_of_refused_steps_are_with_their_lines(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    run.step()
    for n in (1, 2):
        path = archive.refused_path(run.folder.refused_groups, WeightVersion(1, 2), n)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"groups")
        with run.folder.refused.open("ab") as file:
            file.write(orjson.dumps({"version": "e000001-s000002", "step": 2}) + b"\n")
        run.upload()
    with run.folder.refused.open("ab") as file:
        file.write(b'{"version":"e000001-s0000\n')  # torn by a crash; another line was written after it
    archive.refused_path(run.folder.refused_groups, WeightVersion(1, 2), 3).write_bytes(b"without a line yet")
    run.upload()
    assert head(bucket).refused == (("e000001-s000002", 2),)
    shutil.rmtree(run.folder.path)
    restore(bucket, run.folder.path)
    assert len(archive.refused(run.folder.refused_groups)) == len(run.folder.refused.read_bytes().splitlines()) - 1 == 2


def test_what_no_head_names_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    for _ in range(5):
        run.step(save=True)
        run.upload()
    names = {key.split("/")[1] for key in bucket.keys("checkpoints")}
    assert names == {"e000001-s000004", "e000001-s000005"} == {name for name, _ in head(bucket).checkpoints}
    pieces = [piece.key for piece in head(bucket).lines["ledger.jsonl"]]
    assert len(pieces) == 5
    run.begin(2)
    run.upload()
    assert bucket.keys("lines") == sorted(piece.key for piece in head(bucket).lines["ledger.jsonl"])
    assert len(bucket.keys("archive")) == 10


def test_a_checkpoint_that_takes_longer_than_it_is_retained_gets_there(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are made while one is put, and the log up to then is in the bucket first."""
    run, real = Run(tmp_path / "r", s3), Bucket.upload
    run.step(save=True)
    run.upload()
    heads = list[BucketHead]()

    def slow(self: Bucket, key: str, source: Any) -> None:
        if key.startswith("checkpoints/"):
            heads.append(head(s3))
            run.step(save=True)
        real(self, key, source)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", slow)
        for _ in range(3):
            run.step(save=True)
            now, saved = run.state.version, run.saved
            run.upload()
            assert {found.version for found in heads} == {now}
            assert head(s3).version == now
            assert head(s3).checkpoints[-1][0] == str(saved)
            assert not (run.folder.checkpoints / str(saved)).exists()
            heads.clear()
    assert {key.split("/")[1] for key in s3.keys("checkpoints")} == {name for name, _ in head(s3).checkpoints}
    assert not [path for path in run.folder.path.iterdir() if path.name.startswith(".")]
    assert restore(s3, tmp_path / "new" / "r") == head(s3).version


def test_what_a_failed_upload_made_is_removed(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = Run(tmp_path / "r", bucket), Bucket.upload
    run.step(save=True)
    run.upload()
    run.step(save=True)

    def failing(self: Bucket, key: str, source: Any) -> None:
        if key.endswith(MANIFEST):
            raise Unavailable("away")
        real(self, key, source)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", failing)
        with pytest.raises(Unavailable):
            run.upload()
    assert bucket.keys("checkpoints/e000001-s000002")
    assert head(bucket).version == WeightVersion(1, 2)
    run.step(save=True)
    run.upload()
    assert not bucket.keys("checkpoints/e000001-s000002")
    assert restore(bucket, tmp_path / "new" / "r") == WeightVersion(1, 3)


class DyingBucket(Bucket):
    """Dies before the n-th change."""

    def __init__(self, address: str, n: int) -> None:
        super().__init__(address)
        self.n_left = n

    def _change(self) -> None:
        if self.n_left == 0:
            raise Killed
        self.n_left -= 1

    def upload(self, *args: Any) -> None:
        self._change()
        super().upload(*args)

    def swap(self, *args: Any) -> Any:
        self._change()
        return super().swap(*args)

    def remove(self, keys: Any) -> None:
        for key in keys:
            self._change()
            super().remove([key])


@pytest.mark.long
def test_killed_between_any_two_changes_it_goes_on(s3: Bucket, tmp_path: Path) -> None:
    """The bucket then holds the version before or the new one, whole; the next start of the same trainer goes on, and
    leaves nothing behind.
    """
    run = Run(tmp_path / "r", s3)
    run.step(save=True)
    run.upload()
    run.step()
    run.step(save=True)
    at_first, n, found = objects(s3), 0, set[WeightVersion | None]()
    for epoch in (2, 3):
        assert run.archive.claim(epoch)
    while True:
        put_back(s3, at_first)
        dying = writer(DyingBucket(s3.address, n), run.folder)
        try:
            dying.claim(2)
            dying.upload(run.state, WeightVersion(1, 3))
        except Killed:
            left = objects(s3)
        else:
            break
        found.add(restore(s3, tmp_path / f"lost{n}" / "r"))
        put_back(s3, left)
        again = writer(s3, run.folder)
        again.claim(3)
        again.upload(run.state, WeightVersion(1, 3))
        assert s3.keys("lines") == sorted(piece.key for piece in head(s3).lines["ledger.jsonl"])
        assert restore(s3, tmp_path / f"new{n}" / "r") == WeightVersion(1, 3)
        n += 1
    assert n > 10
    assert found == {WeightVersion(1, 1), WeightVersion(1, 3)}


def test_what_a_start_follows_is_not_put_again(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of lines what was added, and with it now and then the small pieces at its end, as one."""
    monkeypatch.setattr("volley_bucket.run.lines.MAX_PIECE_BYTES", 100)
    run = Run(tmp_path / "r", bucket)
    lines = [b'{"step":%d}\n' % n for n in range(100, 160)]
    run.folder.evals.write_bytes(b"".join(lines[:20]))
    run.upload()
    old = head(bucket).lines["evals.jsonl"]
    assert [piece.size for piece in old] == [91, 91, 78]
    for n in range(20, 24):
        run.folder.evals.write_bytes(b"".join(lines[: n + 1]))
        run.upload()
    assert [piece.size for piece in head(bucket).lines["evals.jsonl"]] == [91, 91, 78, 13, 13, 13, 13]
    run.begin(2)
    for n in range(24, 29):
        run.folder.evals.write_bytes(b"".join(lines[:n]))
        run.upload()
    new = head(bucket).lines["evals.jsonl"]
    assert new[:3] == old
    assert [(piece.epoch, piece.size) for piece in new[3:]] == [(1, 13)] * 4 + [(2, 13)] * 4
    run.folder.evals.write_bytes(b"".join(lines[:29]))
    run.upload()
    assert [piece.size for piece in head(bucket).lines["evals.jsonl"]] == [91, 91, 78, 91, 26]
    shutil.rmtree(run.folder.path)
    restore(bucket, run.folder.path)
    assert run.folder.evals.read_bytes() == b"".join(lines[:29])


def test_a_file_that_grows_is_put_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda *_: None)
    folder, sent = RunFolder(tmp_path), list[int]()
    followed, n = FollowedLines(folder, lambda piece, data: sent.append(len(data))), 2000
    with folder.metrics.open("ab", buffering=0) as file:
        for step in range(n):
            file.write(b"1234567\n")
            pieces = followed.put(WeightVersion(1, step), 1)["metrics.jsonl"]
            assert len(pieces) <= 32
    assert sum(piece.size for piece in pieces) == 8 * n
    assert sum(sent) < 4.5 * 8 * n


def test_what_a_killed_upload_left_is_swept(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its folder is lost."""
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    run.upload()
    named, state = objects(bucket), run.state
    run.step()
    run.step(save=True)
    path = archive.refused_path(run.folder.refused_groups, WeightVersion(1, 4), 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"groups")
    run.folder.refused.write_bytes(orjson.dumps({"version": "e000001-s000004", "step": 4}) + b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "swap", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run.upload()
    assert len(objects(bucket)) > len(named) + 3
    new = tmp_path / "new" / "r"
    assert restore(bucket, new) == WeightVersion(1, 1)
    follower = writer(bucket, RunFolder(new))
    assert archive.Archive(RunFolder(new).archive, "r").claim(1002)
    follower.claim(1002)
    follower.upload(state, WeightVersion(1, 1))
    assert {k: v for k, v in objects(bucket).items() if k != HEAD} == {k: v for k, v in named.items() if k != HEAD}


def test_an_object_that_was_cut_is_put_again(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    fill(run, 40)
    run.writer = writer(FailingBucket(bucket.address, 60, Unavailable("away")), run.folder)
    with pytest.raises(Unavailable):
        run.upload()
    key = "archive/e000001/s000002.zst"
    bucket.upload(key, b"cut")
    run.upload()
    assert bucket.read(key, 2**20) == (run.folder.path / key).read_bytes()


def test_a_store_that_names_versions_only_of_what_it_is_asked_for(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose versioning is suspended."""
    real = Bucket.read_tagged

    def tagged(self: Bucket, *args: Any) -> Any:
        data, tag = real(self, *args)
        return data, {**tag, "version": "null"}

    monkeypatch.setattr(Bucket, "read_tagged", tagged)
    run = Run(tmp_path / "r", bucket)
    for _ in range(4):
        run.step(save=True)
        run.upload()
    assert {key.split("/")[1] for key in bucket.keys("checkpoints")} == {name for name, _ in head(bucket).checkpoints}


def test_what_a_removal_left_is_removed_later(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "r", bucket)
    for _ in range(2):
        run.step(save=True)
        run.upload()
    run.step(save=True)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "remove", lambda *_: (_ for _ in ()).throw(Unavailable("away")))
        with pytest.raises(Unavailable):
            run.upload()
    assert head(bucket).version == run.state.version
    run.upload()
    assert {key.split("/")[1] for key in bucket.keys("checkpoints")} == {name for name, _ in head(bucket).checkpoints}


def test_what_a_stop_left_of_an_upload_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    run = Run(tmp_path / "r", bucket)
    left = run.folder.path / ".to-bucket" / "e000001-s000000" / "params"
    left.mkdir(parents=True)
    run.writer.check()
    assert not left.parents[1].exists()


def test_lines_of_a_later_trainer_of_the_folder_are_not_put(bucket: Bucket, tmp_path: Path) -> None:
    """It has begun, and not claimed the bucket yet."""
    run = Run(tmp_path / "r", bucket)
    run.step(save=True)
    own = run.folder.ledger.read_bytes()
    LedgerFile(run.folder.ledger).append((ledger.line(2, ledger.TRAINED, WeightVersion(2, 1), digest="0" * 64),))
    run.upload()
    (piece,) = head(bucket).lines["ledger.jsonl"]
    assert bucket.read(piece.key, 2**20) == own
