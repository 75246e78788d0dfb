"""File locks, and file systems that have none."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.files.locks import try_lock


def test_a_lock_keeps_others_out_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as first, path.open() as second:
        assert try_lock(first)
        assert not try_lock(second)
        fcntl.flock(first, fcntl.LOCK_UN)
        assert try_lock(second.fileno(), shared=True)
        assert try_lock(first, shared=True)
        assert not try_lock(first)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "lock"
    path.touch()
    with path.open() as file, pytest.raises(ConfigError, match=f"{path} is on a file system without file locks"):
        try_lock(file)
