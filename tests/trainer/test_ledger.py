import asyncio
import os
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from services.trainer.loop.ledger import LedgerFile
from services.trainer.step_log import FencedLog, StepLog
from shared.errors import Fenced, WeightsError
from shared.run.archive import Archive
from shared.run.chain import Chain
from shared.run.lineage import in_lineage
from shared.run.progress import TicketProgress
from shared.run.state import initial_state
from shared.types import WeightVersion


def line(ticket: int, disposition: str = "trained", step: int = 1, epoch: int = 1) -> dict:
    version = str(WeightVersion(epoch, step))
    return {
        "ticket": ticket,
        "disposition": disposition,
        "step": step,
        "epoch": epoch,
        "version": version,
        "versions": None,
        "reason": None,
    }


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    return LedgerFile(tmp_path / "r" / "ledger.jsonl")


def state(step: int, trained: int, recent: tuple = ()):
    return (
        initial_state(0)
        .starting_epoch(1, keep_reference=False)
        .at(step, TicketProgress(trained), issued=trained, done=False, chain=Chain(), recent=recent)
    )


def test_lines_lost_after_a_durable_checkpoint_are_added_once(ledger: LedgerFile):
    ledger.append([line(1)])
    checkpoint = state(2, 2, recent=(line(1), line(2, step=2)))
    for _ in range(2):
        ledger.repair(checkpoint, 2)
    assert [x["ticket"] for x in ledger.read()] == [1, 2]


def test_tickets_that_ended_after_the_checkpoint_stay_ended(ledger: LedgerFile):
    ledger.append([line(3, "stale"), line(5, "failed")])
    known = ledger.with_ended_tickets(state(1, 2))
    assert (known.low, known.done, known.void, known.issued) == (3, (5,), 2, 5)


def test_a_fallback_to_an_older_checkpoint_rolls_the_ledger_back(ledger: LedgerFile):
    ledger.append([line(1), line(2, step=2)])
    ledger.repair(state(1, 1), 2)
    assert ledger.settled().keys() == {1}
    ledger.append([line(2, step=2, epoch=2)])
    assert ledger.settled()[2]["epoch"] == 2


def test_a_replaced_trainer_that_mends_late_undoes_nothing_of_its_successor(ledger: LedgerFile):
    ledger.append([line(1), line(2, step=2, epoch=3)])
    ledger.repair(state(1, 1), 2)
    assert ledger.settled().keys() == {1, 2}
    ledger.append([orjson.loads(orjson.dumps({"rollback": 1, "epoch": 2}))])
    assert ledger.settled().keys() == {1, 2}


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(ledger: LedgerFile):
    ledger.repair(initial_state(0), 1)
    ledger.append([line(1), line(2, "stale")])
    with pytest.raises(WeightsError, match="how 2 tickets ended, but there is no checkpoint"):
        ledger.repair(initial_state(0), 1)


def test_a_fenced_trainer_that_writes_late_does_not_count(ledger: LedgerFile):
    ledger.append([line(1, epoch=2), line(1, "stale", epoch=1)])
    assert ledger.settled()[1]["disposition"] == "trained"


def test_a_torn_line_is_not_read_and_blanked_before_the_next(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    torn = orjson.dumps(line(1)) + b'\n{"ticket": 2, "dispo'
    path.write_bytes(torn)
    ledger = LedgerFile(path)
    assert [x["ticket"] for x in ledger.read()] == [1]
    assert path.read_bytes() == torn
    ledger.repair(state(1, 1), 2)
    ledger.append([line(2)])
    assert [x["ticket"] for x in ledger.read()] == [1, 2]


def test_metrics_of_undone_steps_and_of_replaced_trainers_are_removed(tmp_path: Path):
    log = StepLog(tmp_path / "metrics.jsonl")
    versions = [str(WeightVersion(*v)) for v in ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3))]
    for version in versions:
        log.append({"step": int(version[-1]), "version": version})
    log.repair(replace(state(2, 2), lineage=((1, 0), (2, 1))), 3)
    log.append({"step": 3, "version": "e000003-s000003"})
    lines = [orjson.loads(x)["version"] for x in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [versions[0], versions[2], "e000003-s000003"]


def test_lines_of_a_successor_stay_and_what_is_no_line_goes(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step":1,"version":"e000001-s000001"}', b'{"step":7,"version":"e000003-s000007"}']
    path.write_bytes(
        b"\n".join(
            [
                good[0],
                b"7",
                b"[]",
                b'{"step":1}',
                b'{"step":1,"version":2}',
                b'{"version":"e000001-s000001"}',
                b'{"step":1,"version":"v1"}',
                b"{",
                good[1],
                b"",
            ]
        )
    )
    StepLog(path).repair(state(1, 1), 2)
    assert path.read_bytes().splitlines() == good


def test_lineage():
    lineage = ((1, 0), (2, 3), (4, 5))
    inside = [(1, 0), (1, 3), (2, 3), (2, 5), (4, 5), (4, 99)]
    outside = [(1, 4), (2, 2), (2, 6), (3, 5), (4, 4), (5, 6)]
    assert all(in_lineage(WeightVersion(*v), lineage) for v in inside)
    assert not any(in_lineage(WeightVersion(*v), lineage) for v in outside)


def test_lines_of_metrics_that_the_checkpoint_carries_fill_holes_in_their_place(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "version": f"e000001-s00000{step}", "loss": 0.5} for step in (1, 2, 3)]
    log = StepLog(path)
    log.append(lines[2])
    assert log.flush()
    for _ in range(2):
        log.repair(state(3, 3), 2, lines)
        assert [orjson.loads(line) for line in path.read_bytes().splitlines()] == lines
    path.unlink()
    log.repair(state(3, 3), 2, lines)
    assert [orjson.loads(line) for line in path.read_bytes().splitlines()] == lines


def test_the_chain_goes_on_with_what_ended_after_the_checkpoint(ledger: LedgerFile):
    before, after = line(1, "stale"), line(3, "failed")
    ledger.append([before, after])
    held = replace(state(1, 2), void=1)
    chained = replace(held, chain=Chain().ended([before]))
    assert (
        ledger.with_ended_tickets(chained).chain
        == ledger.with_ended_tickets(replace(held, low=0, chain=Chain())).chain
        == Chain().ended([after, before])
    )


def test_a_chain_tells_steps_and_dispositions_apart():
    one, other, metrics = line(1), line(2), {"step": 1, "loss": 0.5}
    chain = Chain().trained([one, other], metrics)
    assert chain == Chain().trained([one, other], {"loss": 0.5, "step": 1})
    assert chain.steps not in {
        Chain().trained(lines, m).steps for lines, m in (([other, one], metrics), ([one], metrics), ([one, other], {}))
    }
    assert Chain().ended([one, other]) == Chain().ended([other]).ended([one]) != Chain().ended([one])


def test_a_trainer_that_is_replaced_while_it_mends_takes_nothing_of_its_successors(ledger: LedgerFile, tmp_path: Path):
    """Stopped after it has read: its successor mends and trains; then it goes on."""
    path, metrics = tmp_path / "r" / "ledger.jsonl", tmp_path / "metrics.jsonl"
    ledger.append([line(1)])
    path.write_bytes(path.read_bytes() + b'{"ticket": 2')
    metrics.write_bytes(b"{}\n")
    archive, log = Archive(tmp_path / "archive", "r"), StepLog(metrics)
    archive.claim(2)

    def replaced() -> None:
        if archive.claim(3):
            LedgerFile(path).repair(state(1, 1), 3)
        LedgerFile(path).append([line(2, step=2, epoch=3)])
        archive.check_newest(2)

    with pytest.raises(Fenced):
        ledger.repair(state(1, 1), 2, replaced)
    assert ledger.settled().keys() == {1, 2}
    log.append({"step": 2, "version": "e000003-s000002"})
    before = metrics.read_bytes()
    with pytest.raises(Fenced):
        log.repair(state(1, 1), 2, check=replaced)
    assert metrics.read_bytes() == before


def test_a_line_of_metrics_that_was_written_twice_is_there_once(tmp_path: Path):
    log, first = StepLog(tmp_path / "metrics.jsonl"), {"step": 1, "version": "e000001-s000001"}
    for _ in range(2):
        log.append(first)
    log.repair(state(1, 1), 2, [first])
    assert [orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()] == [first]


def test_what_a_mend_finds_in_order_is_durable(ledger: LedgerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A killed trainer wrote it, and a power cut may still take it away."""
    synced, fsync, log = set[int](), os.fsync, StepLog(tmp_path / "metrics.jsonl")
    ledger.append([line(1)])
    log.append({"step": 1, "version": "e000001-s000001"})

    def recorded(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    ledger.repair(state(1, 1), 2)
    log.repair(state(1, 1), 2)
    assert {path.stat().st_ino for path in (tmp_path / "r" / "ledger.jsonl", tmp_path / "metrics.jsonl")} <= synced


def test_a_line_that_was_begun_before_the_successor_mended_the_file_is_not_in_it(tmp_path: Path):
    """Stopped between its last look at who is the newest, and its write."""
    metrics, kept = tmp_path / "metrics.jsonl", {"step": 1, "version": "e000001-s000001"}
    zombie = StepLog(metrics)
    zombie.append(kept)
    zombie.append({"step": 2, "version": "e000001-s000002"}, check=lambda: StepLog(metrics).repair(state(1, 1), 2))
    assert [orjson.loads(line) for line in metrics.read_bytes().splitlines()] == [kept]


def test_a_line_of_a_trainer_that_was_replaced_is_not_written(tmp_path: Path):
    archive, log = Archive(tmp_path / "archive", "r"), StepLog(tmp_path / "metrics.jsonl")
    archive.claim(2)
    fenced = FencedLog(log, archive, 2)
    asyncio.run(fenced.append({"step": 1, "version": "e000002-s000001"}))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    archive.claim(3)
    for call in (lambda: fenced.append({"step": 2, "version": "e000002-s000002"}), fenced.flush):
        with pytest.raises(Fenced):
            asyncio.run(call())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
