"""`volley verify` names what no run leaves in its folder, and ends within bounds whatever the folder holds."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import orjson
import pytest
import zstandard

from shared import codec, config
from shared.errors import ConfigError
from shared.files import reading
from shared.run import archive, checkpoint_files, commits, ledger, trust
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.cli.test_hostile_folder import LIMIT_S, peak, within
from tests.support import small_run
from volley.local.preflight import check_inputs
from volley_dashboard.report import compare, report
from volley_proof.verify import budget, command
from volley_python.folder import survey

HEAD = WeightVersion(2, 5)
PARAMS = f"checkpoints/{HEAD}/params"
MOST_GROWTH = 900 * 2**20
BOMB_BYTES = 2**27
type Change = Callable[[RunFolder], None]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / small_run.RUN)


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(valid, tmp_path / small_run.RUN)
    return RunFolder(tmp_path / small_run.RUN)


def terabyte(path: str) -> Change:
    def change(run: RunFolder) -> None:
        (run.path / path).parent.mkdir(parents=True, exist_ok=True)
        with (run.path / path).open("wb") as file:
            file.truncate(2**40)

    return change


def link(path: str) -> Change:
    def change(run: RunFolder) -> None:
        place = run.path / path
        place.rename(run.path.parent / "elsewhere")
        place.symlink_to(run.path.parent / "elsewhere")

    return change


def link_to_secret(run: RunFolder) -> None:
    (run.path / "model").mkdir()
    (run.path / "model" / "tokenizer.json").symlink_to("/etc/hostname")


def fifo(run: RunFolder) -> None:
    os.mkfifo(run.path / PARAMS / "fifo")


def deep(run: RunFolder) -> None:
    (run.path / PARAMS).joinpath(*"d" * 40).mkdir(parents=True)


def many_files(run: RunFolder) -> None:
    folder = run.archive / "e000001"
    for i in range(300):
        (folder / f"s{i + 100:06d}.zst").touch()


def heavy_records(run: RunFolder) -> None:
    run.metrics.write_bytes(b"[{},{}]\n" * 300_000)


def linked_records(run: RunFolder) -> None:
    """A record of 5 MiB with a hundred names."""
    (run.archive / "e000001" / "s000100.json").write_bytes(b"[" + b"1234567," * 600_000 + b"1]")
    for i in range(101, 200):
        os.link(run.archive / "e000001" / "s000100.json", run.archive / "e000001" / f"s{i:06d}.json")


NAMED = {
    "sparse checkpoint": (terabyte(f"{PARAMS}/w.npy"), "is sparse"),
    "sparse archive": (terabyte("archive/e000002/s000005.zst"), "is sparse"),
    "sparse refused": (terabyte("refused/e000001/s000001-1.zst"), "is sparse"),
    "sparse ledger": (terabyte("ledger.jsonl"), "is sparse"),
    "linked ledger": (link("ledger.jsonl"), "is a link"),
    "linked checkpoints": (link("checkpoints"), "is a link"),
    "linked lines of checkpoints": (link("checkpoints.jsonl"), "is a link"),
    "sparse lines of checkpoints": (terabyte("checkpoints.jsonl"), "is sparse"),
    "linked tokenizer": (link_to_secret, "is a link"),
    "linked weights": (link(f"{PARAMS}/w.npy"), "is a link"),
    "fifo": (fifo, "is a FIFO"),
    "deep": (deep, "folders deep"),
    "many files": (many_files, "holds more than 200 files"),
    "linked records": (linked_records, "of memory to read"),
    "heavy records": (heavy_records, "of memory to read"),
}


@pytest.mark.parametrize(("change", "reason"), NAMED.values(), ids=NAMED.keys())
def test_what_no_run_leaves_is_named_before_anything_is_read(
    run: RunFolder, change: Change, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MAX_ENTRIES", 200)
    monkeypatch.setattr(survey, "MAX_PARSED_BYTES", 2**26)
    change(run)
    result = command.verify(run)
    assert not result["ok"]
    assert {violation["kind"] for violation in result["violations"]} == {"folder"}
    assert reason in result["violations"][0]["detail"]
    assert reason in command.format_result(result)
    for read in (lambda: report.main(run.path), lambda: compare.compared([run])):
        with pytest.raises(ConfigError, match="--trust"):
            read()


def test_records_that_are_read_line_by_line_may_be_of_any_size(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MAX_PARSED_BYTES", 2**24)
    run.samples.write_bytes(b'{"text":[{},{}]}\n' * 300_000)
    assert survey.look(run).problems == []


def test_a_run_of_a_trusting_user_may_be_linked_to_other_disks(run: RunFolder) -> None:
    link("checkpoints")(run)
    trust.accept(run)
    assert command.verify(run)["ok"]


@pytest.mark.parametrize("name", ["summary.json", ".summary.json.tmp", "plot.png", ".plot.png.tmp"])
def test_a_report_writes_over_no_file_that_a_link_in_the_folder_leads_to(run: RunFolder, name: str) -> None:
    outside = run.path.parent / "outside"
    outside.write_bytes(b"kept")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside)
    report.make(run)
    assert outside.read_bytes() == b"kept"
    assert run.plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_to_start_from_is_looked_at_as_well(run: RunFolder) -> None:
    terabyte(f"{PARAMS}/w.npy")(run)
    tree = {"model": {"path": f"{run.path}@{HEAD}"}, "data": {"env": "frozen_lake"}}
    with pytest.raises(ConfigError, match="is sparse"):
        check_inputs(config.validate(tree))


def test_a_device_is_refused_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[object]()
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given))
    with pytest.raises(OSError, match="is a device"):
        reading.open_file(Path("/dev/null"))
    assert opened == []


def bomb(n: int, packed: bytes) -> bytes:
    head = {"schema": 1, "run": small_run.RUN, "version": str(HEAD), "n": n, "digests": None}
    return zstandard.ZstdCompressor().compress(codec.pack(head)) + packed * n


def bombs(run: RunFolder) -> None:
    packed = zstandard.ZstdCompressor().compress(codec.pack(bytes(BOMB_BYTES)))
    archive.path_of(run.archive, HEAD).write_bytes(bomb(500, packed))


def bomb_files(run: RunFolder) -> None:
    packed = zstandard.ZstdCompressor().compress(codec.pack(bytes(BOMB_BYTES)))
    folder = run.refused_groups / "e000001"
    folder.mkdir(parents=True)
    for i in range(100):
        (folder / f"s{i + 1:06d}-1.zst").write_bytes(packed)


def endless_step(run: RunFolder) -> None:
    record = commits.read(run.archive, HEAD)
    state = dataclasses.replace(record.state, step=2**52)
    path = commits.path_of(run.archive, state.version)
    path.write_bytes(dataclasses.replace(record, state=state).to_json())
    line = {"version": str(state.version), "step": state.step}
    with run.metrics.open("ab") as file:
        file.write(orjson.dumps(line) + b"\n")


def foreign_lineage(run: RunFolder) -> None:
    record = commits.read(run.archive, HEAD)
    state = dataclasses.replace(record.state, epoch=60_000, step=6, lineage=tuple((i + 1, 0) for i in range(40_000)))
    path = commits.path_of(run.archive, state.version)
    path.parent.mkdir()
    path.write_bytes(dataclasses.replace(record, state=state).to_json())


def many_trained_twice(run: RunFolder) -> None:
    lines = [ledger.line(i % 10_000 + 13, "trained", WeightVersion(2, 3 + i // 10_000)) for i in range(20_000)]
    with run.ledger.open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in lines)


def many_rollbacks(run: RunFolder) -> None:
    with run.ledger.open("ab") as file:
        for i in range(20_000):
            file.write(orjson.dumps(ledger.line(i + 13, "trained", WeightVersion(1, 1))) + b"\n")
            file.write(orjson.dumps(ledger.rollback(7, 2)) + b"\n")


def long_lines(run: RunFolder) -> None:
    for file in (run.ledger, run.metrics, run.evals, run.mixture):
        file.write_bytes(b"x" * 2**26)


WORK = (bombs, bomb_files, endless_step, foreign_lineage, many_trained_twice, many_rollbacks, long_lines)


@pytest.mark.parametrize("change", WORK, ids=lambda change: change.__name__)
def test_no_folder_makes_a_proof_without_end(run: RunFolder, change: Change) -> None:
    change(run)
    before = peak()
    with within(LIMIT_S):
        result = command.verify(run)
    assert not result["ok"]
    assert peak() - before < MOST_GROWTH


def test_archives_unpack_to_a_multiple_of_what_lies_on_the_disk(run: RunFolder) -> None:
    bombs(run)
    details = [violation["detail"] for violation in command.verify(run)["violations"]]
    assert any("unpack to more than" in detail for detail in details), details


def test_a_file_with_many_names_is_hashed_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run.path / PARAMS
    for i in range(300):
        os.link(folder / "w.npy", folder / f"again{i}")
    reads, readv = list[int](), os.readv
    monkeypatch.setattr(os, "readv", lambda *given: reads.append(1) or readv(*given))
    with checkpoint_files.hashing_once():
        digests = {checkpoint_files.digest(path) for path in folder.iterdir() if path.stat().st_nlink > 1}
    assert len(digests) == 1
    assert len(reads) == 2


def test_a_proof_that_takes_too_long_ends_with_the_reason(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "allowed", lambda *_: budget.Allowance(0.2, LIMIT_S))

    def endless(*_: object) -> object:
        while True:
            blake3.blake3(b"x").hexdigest()

    monkeypatch.setattr(command.checkpoints, "retained", endless)
    with within(LIMIT_S):
        result = command.verify(run)
    assert "CPU time" in result["violations"][0]["detail"]


def test_a_proof_on_a_busy_machine_is_not_finished(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the run: no violation, and no proof."""
    monkeypatch.setattr(budget, "allowed", lambda *_: budget.Allowance(LIMIT_S, 0.2))
    monkeypatch.setattr(command.checkpoints, "retained", lambda *_: time.sleep(LIMIT_S))
    with within(LIMIT_S):
        result = command.verify(run)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "the alarm of `within`"
    assert (result["ok"], result["violations"]) == (False, [])
    assert command.format_result(result).splitlines()[-1].startswith("NOT FINISHED: ")


def test_a_survey_on_a_busy_machine_is_not_finished(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SURVEY", budget.Allowance(LIMIT_S, 0.2))
    monkeypatch.setattr(command.survey, "look", lambda _: time.sleep(LIMIT_S))
    with within(LIMIT_S):
        assert command.verify(run)["not_finished"]


def test_checkpoints_that_are_not_read_in_time_leave_a_proof_unfinished(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a folder that the user trusts, whose proof has no bound."""

    def late(*_: object) -> object:
        raise budget.NotFinished("late")

    monkeypatch.setattr(command.parameters, "check", late)
    monkeypatch.setattr(trust, "_accepted", {os.path.realpath(run.path)})
    assert command.verify(run)["not_finished"] == "late"
