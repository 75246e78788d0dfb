"""Commit records: written whole or not at all, by the newest trainer alone, and read as they were written or not at
all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from shared.errors import Fenced, WeightsError
from shared.run import commits
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.lineage import surviving
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion

E1 = initial_state(0).starting_epoch(1, keep_reference=False)


def state(step: int, of: TrainerState = E1) -> TrainerState:
    return replace(of, step=step, done=(7, 9), metrics=({"step": step, "version": str(of.version), "loss": 0.1},))


def log_of(folder: Path, *epochs: int) -> CommitLog:
    log = CommitLog(folder / "archive", "r")
    for epoch in epochs:
        assert Archive(log.root, "r").claim(epoch)
        log.fence(epoch)
    return log


def test_a_record_is_read_as_it_was_written(tmp_path: Path):
    log = log_of(tmp_path, 1)
    log.append(state(3), "abc")
    log.append(state(3), "abc")  # after an error nobody knows whether it is there
    record = commits.read(log.root, WeightVersion(1, 3))
    assert (record.run, record.checksum, record.state) == ("r", "abc", state(3))
    assert commits.versions(log.root) == [WeightVersion(1, 3)]
    assert commits.metrics(log.root) == list(state(3).metrics)


@pytest.mark.parametrize("at", [0.02, 0.3, 0.6, 0.99])
def test_a_flipped_byte_or_a_cut_is_found(tmp_path: Path, at: float):
    log = log_of(tmp_path, 1)
    log.append(state(3), "abc")
    path = commits.path_of(log.root, WeightVersion(1, 3))
    text = bytearray(path.read_bytes())
    whole = bytes(text)
    text[int(at * len(text))] ^= 1
    path.write_bytes(text)
    with pytest.raises(WeightsError):
        commits.read(log.root, WeightVersion(1, 3))
    path.write_bytes(whole[: int(at * len(text))])
    with pytest.raises(WeightsError):
        commits.read(log.root, WeightVersion(1, 3))


def test_a_record_that_is_missing_or_of_another_version_is_refused(tmp_path: Path):
    log = log_of(tmp_path, 1)
    log.append(state(3), "abc")
    with pytest.raises(WeightsError):
        commits.read(log.root, WeightVersion(1, 4))
    commits.path_of(log.root, WeightVersion(1, 3)).rename(commits.path_of(log.root, WeightVersion(1, 4)))
    with pytest.raises(WeightsError, match="e000001-s000003"):
        commits.read(log.root, WeightVersion(1, 4))


def test_a_changed_value_breaks_the_seal(tmp_path: Path):
    log = log_of(tmp_path, 1)
    log.append(state(3), "abc")
    path = commits.path_of(log.root, WeightVersion(1, 3))
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"checksum": "abd"}))
    with pytest.raises(WeightsError, match="seal"):
        commits.read(log.root, WeightVersion(1, 3))


def test_once_a_later_trainer_has_fenced_nobody_else_adds_a_record(tmp_path: Path):
    older = log_of(tmp_path, 1)
    older.append(state(1), "a")
    newer = log_of(tmp_path, 2)
    with pytest.raises(Fenced):
        older.append(state(2), "b")
    newer.append(state(2, replace(E1, epoch=2)), "c")
    assert commits.versions(newer.root) == [WeightVersion(1, 1), WeightVersion(2, 2)]
    assert sorted(path.name for path in newer.root.iterdir()) == [".commits-e000002", "e000001", "e000002"]


def test_a_draft_that_a_crash_left_is_no_record_and_goes_with_the_next_fence(tmp_path: Path):
    log = log_of(tmp_path, 1)
    (log.root / ".commits-e000001" / "e000001-s000002").write_bytes(b"{")
    assert commits.versions(log.root) == []
    log_of(tmp_path, 2)
    assert not (log.root / ".commits-e000001").exists()


def test_the_newest_state_is_that_of_the_newest_whole_record(tmp_path: Path):
    log, folder = log_of(tmp_path, 1), RunFolder(tmp_path)
    assert commits.newest(folder) is None
    log.append(state(1), "a")
    log.append(state(2), "b")
    commits.path_of(log.root, WeightVersion(1, 2)).write_bytes(b"{}")
    assert commits.newest(folder) == state(1)


def test_records_before_the_oldest_checkpoint_are_forgotten(tmp_path: Path):
    log = log_of(tmp_path, 1)
    for step in range(1, 6):
        log.append(state(step), "a")
    log.forget(3)
    assert [version.step for version in commits.versions(log.root)] == [3, 4, 5]


def test_what_a_later_epoch_began_behind_is_undone():
    made = [WeightVersion(*pair) for pair in ((1, 0), (1, 2), (1, 4), (2, 4), (2, 6), (3, 5), (3, 7), (4, 7))]
    assert [(version.epoch, version.step) for version in surviving(made)] == [
        (1, 0),
        (1, 2),
        (1, 4),
        (2, 4),
        (3, 5),
        (3, 7),
        (4, 7),
    ]
