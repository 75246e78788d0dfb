"""Files that the states of a run hold the beginnings of, changed between its epochs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import orjson
import pytest

from packages.proof.tests.test_lies import begun_again
from shared import config
from shared.run import checkpoint_files, commits, saved
from shared.run.folder import RunFolder
from shared.run.state import TrainerState, initial_state
from shared.types import WeightVersion
from tests.support import lies
from tests.support.small_run import RUN, Incarnation
from volley.runs.record import claimed, mark_finished
from volley_proof.verify import command, losses

LINES = [b'{"step":0,"what":"%d"}\n' % n for n in range(3)]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = lies.make(tmp_path_factory.mktemp("valid") / RUN)
    RunFolder(folder).demonstrations.write_bytes(b"".join(LINES))
    begun_again(RunFolder(folder))
    return folder


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(valid, tmp_path / RUN)
    return RunFolder(tmp_path / RUN)


def forged_epoch(run: RunFolder, **changes: Any) -> None:
    """A new epoch whose state says something else of the files; all digests are made again."""
    begun_again(run)
    version = max(checkpoint_files.versions(run.checkpoints))
    folder = run.checkpoints / str(version)
    path = folder / "state.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))
    checkpoint_files.write_manifest(
        folder, replace(checkpoint_files.read_manifest(folder), state=checkpoint_files.digest(path))
    )
    saved.append(run.checkpoints, version, checkpoint_files.digest(folder / checkpoint_files.MANIFEST))


def without_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("changes", [{"files": {}}, {"files": {}, "losses": {}}])
def test_an_epoch_that_forgets_what_the_one_before_held_is_named(run: RunFolder, changes: dict[str, Any]) -> None:
    forged_epoch(run, **changes)
    without_last_line(run.evals)
    result = command.verify(run)
    assert "evals.jsonl" in {violation["file"] for violation in result["violations"]}


def test_an_epoch_without_a_word_on_files_is_named(run: RunFolder) -> None:
    forged_epoch(run, files=None, losses=None)
    without_last_line(run.evals)
    assert command.verify(run)["violations"]


@pytest.mark.parametrize("success", [b"0.99", b"0.9"])
def test_a_count_of_losses_does_not_hide_what_older_states_hold(run: RunFolder, success: bytes) -> None:
    """The newest state says that lines were lost, and holds the file as it was made: whole, in part, or nothing."""
    valid = Path(shutil.copytree(run.path, run.path.with_name("valid")))
    for kept in (0, 1, 2, 99):
        shutil.rmtree(run.path)
        shutil.copytree(valid, run.path)
        lines = run.evals.read_bytes().splitlines(keepends=True)
        lines[1] = lines[1].replace(b'"success":0.5,', b'"success":%s,' % success)
        left = b"".join(lines[:kept])
        known = {"evals.jsonl": (len(left), blake3.blake3(left).hexdigest())} if left else {}
        forged_epoch(run, files=known, losses={"evals.jsonl": 1})
        run.evals.write_bytes(b"".join(lines))
        assert "evals.jsonl" in {one["file"] for one in command.verify(run)["violations"]}, kept


@pytest.mark.parametrize(
    ("found", "fits"),
    [([0, 5, 20], True), ([0, 5, 20, 10, 15], True), ([0, 5, 10, 15, 20], True), ([0, 5, 20, 15, 10], False)],
)
def test_an_evaluation_after_a_loss_is_not_taken_for_lost_lines(tmp_path: Path, found: list[int], fits: bool) -> None:
    """It is about the step at which the loss was found, and may stand before the lost lines or without them."""
    path = tmp_path / "evals.jsonl"

    def text(steps: list[int]) -> bytes:
        return b"".join(b'{"step":%d}\n' % step for step in steps)

    def held(step: int, steps: list[int]) -> TrainerState:
        files = {path.name: (len(text(steps)), blake3.blake3(text(steps)).hexdigest())}
        return replace(initial_state(0), epoch=1, step=step, lineage=((1, 0),), files=files, losses={})

    before = [held(6, [0, 5]), held(11, [0, 5, 10]), held(20, [0, 5, 10, 15])]
    after = replace(held(20, [0, 5]), epoch=2, lineage=((1, 0), (2, 20)), losses={path.name: 1})
    path.write_bytes(text(found))
    assert bool([*losses.check(path, [*before, after], names_steps=True)]) is not fits


@pytest.mark.parametrize("name", ["evals", "samples", "demonstrations", "saved"])
def test_lines_that_a_trainer_found_to_be_lost_are_told(run: RunFolder, name: str) -> None:
    path: Path = getattr(run, name)
    path.unlink()
    begun_again(run)
    result = command.verify(run)
    assert result["violations"] == []
    assert any(f"{path.name} before" in one for one in result["not_checked"])
    begun_again(run)
    assert command.verify(run)["violations"] == []


def other_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"1"', b'"7"'))


def lines_in_another_order(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[::-1]))


@pytest.mark.parametrize("change", [other_line, lines_in_another_order], ids=lambda change: change.__name__)
def test_a_file_that_was_rewritten_before_a_new_epoch_is_named(run: RunFolder, change: Callable[[Path], None]) -> None:
    change(run.demonstrations)
    begun_again(run)
    assert {x["file"] for x in command.verify(run)["violations"]} == {run.demonstrations.name}


def test_two_epochs_with_two_losses_are_told(run: RunFolder) -> None:
    for _ in range(2):
        without_last_line(run.demonstrations)
        begun_again(run)
    assert command.verify(run)["violations"] == []


async def two_more_steps(trainer: Incarnation) -> None:
    for ticket in (13, 15):
        await trainer.until(lambda status: status.phase == "waiting")
        version = WeightVersion.parse(trainer.status.version)
        trainer.feed(ticket, ticket + 1, version=version)
        await trainer.until(lambda status, step=version.step + 1: status.checkpoint_step == step)
    await trainer.until(lambda status: status.phase == "done")


def continued(run: RunFolder) -> None:
    """Until nothing is left of what the trainers before held."""
    loaded = config.stored(run.path, ["trainer.max_steps=7", f"run.dir={run.path.parent}"])
    with claimed(loaded) as claim, ThreadPoolExecutor(1) as executor:
        trainer = Incarnation(run.path, executor, max_to_keep=2, config=loaded.config)
        asyncio.run(trainer.run(two_more_steps))
        mark_finished(claim.folder, claim.record)


def without_first_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def better_result(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"success":0.5,', b'"success":0.9,'))


@pytest.mark.parametrize("change", [without_first_line, better_result], ids=lambda change: change.__name__)
def test_what_a_trainer_found_changed_is_told_for_ever(run: RunFolder, change: Callable[[Path], None]) -> None:
    """And named as long as a state of before contradicts what is left."""
    before = run.evals.read_bytes()
    change(run.evals)
    assert run.evals.read_bytes() != before
    continued(run)
    result = command.verify(run)
    found = [one["detail"] for one in result["violations"]]
    assert found == [one for one in found if "differ from those recorded by e000002-s000005" in one]
    assert bool(found) == (change is without_first_line)
    assert any(one.startswith(run.evals.name) for one in result["not_checked"])


def test_records_that_are_missing_as_from_a_bucket_are_told(run: RunFolder) -> None:
    continued(run)
    for version in commits.versions(run.archive):
        commits.path_of(run.archive, version).unlink()
    assert command.verify(run)["violations"]
    run.bucket.write_bytes(b"{}")
    assert any(one.startswith("commit records") for one in command.verify(run)["not_checked"])
