"""Refused steps: what the trainer leaves, also after a crash, is proven; lines and files that contradict each other are
named.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.support import small_run
from tests.support.small_run import HUGE, RUN, Incarnation, group
from volley_proof.verify import command

FIRST, SECOND = "refused/e000001/s000001-1.zst", "refused/e000002/s000002-1.zst"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first try of step 1 is skipped; a trainer that was not to skip stopped at step 2."""
    folder = small_run.write_config(tmp_path_factory.mktemp("valid") / RUN)

    async def skips(trainer: Incarnation) -> None:
        trainer.queue.entries += [group(1, WeightVersion(1, 0)), group(2, WeightVersion(1, 0), reward=HUGE * 10)]
        trainer.feed(3, 4, version=WeightVersion(1, 0))
        await trainer.until(lambda status: status.durable_step == 1 and status.phase == "waiting")

    async def stops(trainer: Incarnation) -> None:
        await trainer.until(lambda status: status.phase == "waiting")
        trainer.queue.entries += [group(5, WeightVersion(2, 1)), group(6, WeightVersion(2, 1), reward=HUGE * 10)]
        await trainer.until(lambda status: status.phase == "refused")

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(folder, executor, on_nonfinite="skip").run(skips))
        asyncio.run(Incarnation(folder, executor).run(stops))
    return folder


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> Path:
    shutil.copytree(valid, tmp_path / RUN)
    return tmp_path / RUN


def edit(run: Path, change: Callable[[list[bytes]], object]) -> None:
    lines = (run / "refused.jsonl").read_bytes().splitlines(keepends=True)
    change(lines)
    (run / "refused.jsonl").write_bytes(b"".join(lines))


def named(run: Path) -> set[str]:
    return {violation["kind"] for violation in command.verify(RunFolder(run))["violations"]}


def replaced(at: int, old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda run: edit(run, lambda lines: lines.__setitem__(at, lines[at].replace(old, new)))


def test_refused_steps_are_proven(run: Path):
    assert sorted(path.relative_to(run).as_posix() for path in run.glob("refused/*/*")) == [FIRST, SECOND]
    assert named(run) == set()


def test_a_crash_before_the_line_is_honest(run: Path):
    edit(run, lambda lines: lines.pop())
    assert named(run) == set()


def test_a_line_that_a_crash_tore_is_honest(run: Path):
    edit(run, lambda lines: lines.insert(1, lines[1][:30] + b"\n"))
    assert named(run) == set()


MANIPULATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "line of a skipped step removed": (lambda run: edit(run, lambda lines: lines.pop(0)), "archive"),
    "all lines removed": (lambda run: edit(run, lambda lines: lines.clear()), "archive"),
    "line twice": (lambda run: edit(run, lambda lines: lines.append(lines[1])), "archive"),
    "line torn": (lambda run: edit(run, lambda lines: lines.__setitem__(0, lines[0][:30] + b"\n")), "archive"),
    "last line torn": (lambda run: edit(run, lambda lines: lines.__setitem__(1, lines[1][:30] + b"\n")), "ledger"),
    "no lines": (lambda run: (run / "refused.jsonl").write_bytes(b"[]\n7\n{\n\xff\n{}\n"), "ledger"),
    "what": (replaced(0, b'"what":["w"]', b'"what":"banana"'), "ledger"),
    "action": (replaced(0, b"skip", b"none"), "ledger"),
    "tickets": (replaced(1, b"[5,6]", b"[5,7]"), "archive"),
    "digests": (replaced(1, b'"digests":["', b'"digests":["0'), "archive"),
    "version": (replaced(1, b"e000002-s000002", b"e000003-s000002"), "ledger"),
    "file of a skipped step removed": (lambda run: (run / FIRST).unlink(), "archive"),
    "file removed": (lambda run: (run / SECOND).unlink(), "archive"),
    "file damaged": (lambda run: (run / SECOND).write_bytes(b"x"), "archive"),
    "folder in place of the lines": (
        lambda run: ((run / "refused.jsonl").unlink(), (run / "refused.jsonl").mkdir()),
        "ledger",
    ),
}


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_a_manipulation_is_named(run: Path, name: str):
    change, kind = MANIPULATIONS[name]
    change(run)
    assert kind in named(run)
