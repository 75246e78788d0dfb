"""Files of lines on a disk that fills up, with the kernel's own errors: a limit on the size of files stands for the
disk.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from shared.errors import Fenced, StorageDenied, StorageFull, from_problem, problem
from shared.files import storage
from shared.run.archive import Archive
from shared.types import WeightVersion
from tests.support.disk import file_size_limit

ROOT = Path(__file__).parents[2]
LIMIT = 64 * 2**20  # far above what pytest itself writes


@pytest.fixture
def nearly_full(tmp_path: Path) -> Path:
    """A sparse file of lines with room for ten bytes."""
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.seek(LIMIT - 11)
        file.write(b"\n")
    return path


@pytest.mark.parametrize("durable", [True, False])
def test_lines_are_added_all_or_not_at_all(nearly_full: Path, durable: bool):
    with file_size_limit(LIMIT), pytest.raises(StorageFull, match=r"no disk space under .*: \d+ MB free"):
        storage.append(nearly_full, b"12345\n67890\n", durable=durable)
    assert nearly_full.stat().st_size == LIMIT - 10
    storage.append(nearly_full, b"12345\n67890\n", durable=durable)
    assert nearly_full.stat().st_size == LIMIT + 2


def test_a_line_is_not_glued_to_what_was_left_of_another(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2 torn")
    storage.append(path, b"3\n", durable=False)
    assert storage.whole_lines(path) == [b"1", b"2 torn", b"3"]


def test_a_replaced_file_is_whole_or_as_it_was(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"old\n")
    with file_size_limit(LIMIT), pytest.raises(StorageFull):
        storage.replace(path, bytes(LIMIT + 1))
    assert path.read_bytes() == b"old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]
    storage.replace(path, b"new\n")
    assert path.read_bytes() == b"new\n"


def test_an_archived_step_is_whole_or_absent(tmp_path: Path):
    archive = Archive(tmp_path / "a", "r")
    archive.claim(1)
    groups = [os.urandom(LIMIT + 2**20)]
    with file_size_limit(LIMIT), pytest.raises(StorageFull):
        archive.write(WeightVersion(1, 1), groups)
    assert [p.name for p in (tmp_path / "a" / "e000001").iterdir()] == []


def test_other_errors_are_not_a_full_disk(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        storage.append(tmp_path, b"line\n", durable=False)


def test_a_service_whose_log_is_on_a_full_disk_lives_on():
    lines = "for n in range(200): log.info('event', n=n, text='x' * 100)\nlog.exception('at last')"
    begin = "from shared.process import telemetry\ntelemetry.configure('s')\nlog = telemetry.Log('l')"
    code = f"{begin}\n{lines}\nprint('alive')"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"alive\n")


def test_it_travels_as_a_problem():
    back = from_problem(507, problem(StorageFull("no disk space under /r: 3 MB free")))
    assert isinstance(back, StorageFull)


@pytest.mark.parametrize("made_again", [True, False])
def test_a_folder_put_away_while_it_was_written_is_missed(tmp_path: Path, made_again: bool):
    """Whatever the writer says of it, and also if it made the folder again and says nothing."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> None:
        with storage.storage(tmp_path), storage.held(folder):
            folder.rename(tmp_path / "away")
            if not made_again:
                raise ValueError("no metadata")
            folder.mkdir()

    with pytest.raises(Fenced, match=f"{folder} was removed"):
        write()


def test_the_errors_of_a_folder_that_stayed_are_the_writers(tmp_path: Path):
    with storage.held(tmp_path):
        (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no metadata"), storage.held(tmp_path):
        raise ValueError("no metadata")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_may_not_be_written_is_waited_for_and_names_the_file_and_who_must_be_able_to(tmp_path: Path, number: int):
    """Root may write everywhere, so the kernel's answer is raised at the seam."""
    with (
        pytest.raises(StorageDenied, match=rf"cannot write to /r/x: .*make it writable by user {os.getuid()}"),
        storage.storage(tmp_path),
    ):
        raise OSError(number, os.strerror(number), "/r/x")


def test_an_archive_that_was_removed_is_named_and_waited_for(tmp_path: Path):
    archive = Archive(tmp_path / "archive", "r")
    archive.claim(1)
    (tmp_path / "archive").rename(tmp_path / "away")
    with pytest.raises(StorageDenied, match=rf"cannot write to {tmp_path}/archive: it was removed"):
        archive.write(WeightVersion(1, 1), [b"x"])
    (tmp_path / "away").rename(tmp_path / "archive")
    assert archive.write(WeightVersion(1, 1), [b"x"])


def test_a_run_folder_that_was_removed_is_named(tmp_path: Path):
    with pytest.raises(StorageDenied, match=rf"cannot write to {tmp_path}/gone: it was removed"):
        storage.append(tmp_path / "gone" / "deeper" / "lines", b"x\n", durable=True)


def test_log_lines_are_not_glued_together_after_a_full_disk(tmp_path: Path):
    """The limit cuts a line in the middle; what is logged when there is room again begins on a line of its own."""
    code = f"""
import resource, signal
from shared.process import telemetry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
telemetry.configure("s")
log = telemetry.Log("l")
log.info("before")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, hard))
for n in range(3):
    log.info("cut", text="x" * 200)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("after")
log.info("last")
"""
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.seek(LIMIT - 201)
        file.write(b"\n")
    with path.open("ab") as log:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=log, timeout=60, check=False)
    assert done.returncode == 0
    with path.open("rb") as file:
        file.seek(LIMIT - 200)
        lines = file.read().splitlines()
    assert [orjson.loads(line)["event"] for line in (lines[0], *lines[2:])] == ["before", "after", "last"]
    assert lines[1].startswith(b'{"time":')


def test_what_others_append_while_a_torn_line_is_mended_stays(tmp_path: Path):
    """As if the process were stopped between reading and writing, and its successor mended and went on."""
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2 torn")

    def meanwhile() -> None:
        assert storage.blank_torn_line(path)
        storage.append(path, b"3\n", durable=False)

    assert storage.blank_torn_line(path, meanwhile)
    assert storage.whole_lines(path) == [b"1", b"     ", b"3"]
    assert not storage.blank_torn_line(path, meanwhile)


def test_a_refused_change_leaves_the_file_as_it_was(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2 torn")

    def fenced() -> None:
        raise Fenced("another trainer of the run has begun")

    for change in (lambda: storage.blank_torn_line(path, fenced), lambda: storage.replace(path, b"", fenced)):
        with pytest.raises(Fenced):
            change()
    assert path.read_bytes() == b"1\n2 torn"
    assert [p.name for p in tmp_path.iterdir()] == ["lines"]
