"""Every command that reads a run's folder, on folders in which something else lies in the place of a record.

A command ends, with an exit code of its own and without a traceback, whatever lies there: a FIFO would hold it for
ever, a sparse file of a terabyte fill its memory.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import pytest

from tests.support import small_run
from volley.__main__ import main
from volley_proof.replay import steps as replay

READERS = {
    "config.yaml": ("status", "access", "verify"),
    "run.json": ("report", "access", "verify"),
    "services.yaml": ("status", "access", "verify"),
    "processes.json": ("status", "access"),
    "metrics.jsonl": ("report", "verify"),
    "evals.jsonl": ("report",),
    "ledger.jsonl": ("report", "verify"),
    "mixture.jsonl": ("verify",),
    "summary.json": ("report",),
    "archive": ("verify",),
    "checkpoints": ("report", "verify"),
}
"""What is read, and by which commands."""

GROWTH = 600 * 2**20
LIMIT_S = 120


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "e000001").write_bytes(b"")


def _terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _deep(path: Path) -> None:
    """Deeper than Python recurses; the parser of YAML, written in it, takes seconds to get deeper than it needs."""
    path.write_bytes(b"[" * (1_100 if path.suffix == ".yaml" else 200_000) + b"\n")


def _noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64 + b"\n")


def _numbers(path: Path) -> None:
    path.write_bytes(
        b'{"step": 1e999, "version": 7, "run": {"name": []}, "urls": {"env": 3}, "elapsed_s": "x", "n_tasks": null}\n'
    )


THINGS: tuple[Callable[[Path], None], ...] = (_fifo, _loop, _folder, _terabyte, _deep, _noise, _numbers)


def _pairs() -> Iterator[Any]:
    """Every record with every thing; those that are not long have every record thrice, and every thing with many."""
    for n, record in enumerate(READERS):
        for m, thing in enumerate(THINGS):
            marks = [] if (m - n) % len(THINGS) in (0, 1, 3) else [pytest.mark.long]
            yield pytest.param(record, thing, id=f"{record}-{thing.__name__.strip('_')}", marks=marks)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / small_run.RUN)


class Late(BaseException):
    """No error that anything on the way would take for its own."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises Late inside, wherever the main thread is."""

    def late(_: int, frame: FrameType | None) -> None:
        raise Late(f"still there after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def exit_code(*arguments: str) -> object:
    with within(LIMIT_S), pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("record", "thing"), _pairs())
def test_a_command_ends_whatever_lies_in_the_place_of_a_record(
    valid: Path, tmp_path: Path, record: str, thing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small_run.RUN
    shutil.copytree(valid, folder)
    place = folder / record
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    thing(place)
    before = peak()
    for command in READERS[record]:
        assert exit_code(command, str(folder)) in (0, 1, 2), command
    assert peak() - before < GROWTH
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__.strip("_"))
@pytest.mark.parametrize("record", ["config.yaml", "run.json"])
def test_a_run_whose_records_are_no_files_is_not_continued(
    valid: Path, tmp_path: Path, record: str, thing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small_run.RUN
    shutil.copytree(valid, folder)
    (folder / record).unlink()
    thing(folder / record)
    assert exit_code("up", str(folder)) == 2
    assert capsys.readouterr().err.startswith("volley: ")


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__.strip("_"))
@pytest.mark.parametrize("record", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_replay_names_what_it_cannot_read(
    valid: Path, tmp_path: Path, record: str, thing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small_run.RUN
    shutil.copytree(valid, folder)
    place = folder / record
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    thing(place)
    with within(LIMIT_S):
        assert replay.main([str(folder), "--from-step", "3"]) in (1, 2)
    problem = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert problem["type"].startswith("urn:volley:")
    assert problem["detail"]


REFUSAL = b'{"version":"e000001-s000001","what":["w"]}\n'


@pytest.mark.parametrize(
    "line",
    [b"[]", b"7", b"{", b"\xff", b"null", b"[" * 100_000, b'{"version":"e000001-s000001"}', b'{"version":7,"what":[]}']
    + [b'{"version":"e000001-s000001","what":%s}' % what for what in (b'"banana"', b"{}", b"[7]")],
)
def test_a_replay_names_the_line_that_is_no_refusal(
    valid: Path, tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small_run.RUN
    shutil.copytree(valid, folder)
    (folder / "refused.jsonl").write_bytes(REFUSAL + line + b"\n")
    assert replay.main([str(folder), "--refused", "e000001-s000001"]) == 1
    problem = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert "line 2 of" in problem["detail"]
    assert "refused.jsonl" in problem["detail"]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__.strip("_"))
def test_a_replay_of_a_refusal_names_what_it_cannot_read(
    valid: Path, tmp_path: Path, thing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / small_run.RUN
    shutil.copytree(valid, folder)
    thing(folder / "refused.jsonl")
    with within(LIMIT_S):
        assert replay.main([str(folder), "--refused", "e000001-s000001"]) in (1, 2)
    assert orjson.loads(capsys.readouterr().out.splitlines()[-1])["type"].startswith("urn:volley:")
