"""The archive: what is written comes back in order, and every kind of damage is named."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
import zstandard

from shared.errors import DecodeError, Fenced
from shared.run import archive
from shared.run.archive import Archive
from shared.types import WeightVersion

V1 = WeightVersion(1, 1)
GROUPS = [bytes([i]) * 1000 * i for i in (3, 1, 2)]


def written(root: Path, groups: list[bytes] = GROUPS, version: WeightVersion = V1) -> Path:
    one = Archive(root, "r")
    one.claim(version.epoch)
    one.write(version, groups)
    return archive.path_of(root, version)


def test_groups_come_back_in_their_order(tmp_path: Path):
    one = Archive(tmp_path / "a", "r")
    assert one.claim(1)
    digests = one.write(V1, GROUPS)
    assert list(archive.read(tmp_path / "a", "r", V1)) == GROUPS
    assert digests == [archive.digest(x) for x in GROUPS]
    assert archive.path_of(tmp_path / "a", V1).stat().st_size < 300


def test_steps_of_two_epochs_lie_apart_and_a_repeated_one_is_replaced(tmp_path: Path):
    for version in (V1, WeightVersion(2, 1), WeightVersion(1, 12)):
        written(tmp_path, version=version)
    written(tmp_path, GROUPS[:1])
    assert archive.versions(tmp_path) == [V1, WeightVersion(1, 12), WeightVersion(2, 1)]
    assert list(archive.read(tmp_path, "r", V1)) == GROUPS[:1]
    assert archive.versions(tmp_path / "missing") == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path):
    leftover = written(tmp_path).with_name(".s000002.zst.tmp")
    leftover.write_bytes(b"half")
    later = written(tmp_path, version=WeightVersion(3, 1)).with_name(".s000002.zst.tmp")
    later.write_bytes(b"of a later trainer")
    assert Archive(tmp_path, "r").claim(2)
    assert not leftover.exists()
    assert later.exists()
    assert archive.versions(tmp_path) == [V1, WeightVersion(3, 1)]


def test_an_epoch_is_claimed_once(tmp_path: Path):
    one, other = Archive(tmp_path / "a", "r"), Archive(tmp_path / "a", "r")
    assert one.last_epoch() == 0
    assert [one.claim(3), other.claim(3), other.claim(4)] == [True, False, True]
    assert one.last_epoch() == 4


def test_it_is_an_ordinary_zstandard_file(tmp_path: Path):
    with zstandard.open(written(tmp_path), "rb") as file:
        values = list(msgpack.Unpacker(file))
    digests = [archive.digest(group) for group in GROUPS]
    assert values == [{"schema": 1, "run": "r", "version": "e000001-s000001", "n": 3, "digests": digests}, *GROUPS]


def test_every_truncation_and_every_flipped_byte_is_damage(tmp_path: Path):
    path = written(tmp_path)
    data = path.read_bytes()
    flipped = [data[:i] + bytes([data[i] ^ 0x5A]) + data[i + 1 :] for i in range(len(data))]
    damaged = [data[:n] for n in range(len(data))] + flipped + [bad[:-4] for bad in flipped[:-4]]
    for bad in [*damaged, data + b"x", data * 2]:
        path.write_bytes(bad)
        with pytest.raises(DecodeError, match=str(path)):
            list(archive.read(tmp_path, "r", V1))


@pytest.mark.parametrize(
    ("run", "version", "named"), [("other", V1, "run r"), ("r", WeightVersion(1, 2), "No such file")]
)
def test_another_run_and_a_missing_step_are_named(tmp_path: Path, run: str, version: WeightVersion, named: str):
    written(tmp_path)
    with pytest.raises(DecodeError, match=named):
        list(archive.read(tmp_path, run, version))


def test_a_writer_whose_file_a_successor_has_cleared_away_is_fenced(tmp_path: Path):
    class Overtaken(list[bytes]):
        def __iter__(self):
            yield from super().__iter__()
            if any(tmp_path.rglob("*.tmp")):
                assert Archive(tmp_path / "a", "r").claim(2)

    one = Archive(tmp_path / "a", "r")
    one.claim(1)
    with pytest.raises(Fenced, match=r"s000001\.zst\.tmp was removed"):
        one.write(V1, Overtaken(GROUPS))
