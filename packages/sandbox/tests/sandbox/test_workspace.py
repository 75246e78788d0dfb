"""Private folders: measured and removed whatever a stranger left in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from volley_sandbox.sandbox.process import workspace


def deep(folder: Path, levels: int) -> None:
    """A chain of folders that is longer than any path may be."""
    at = os.open(folder, os.O_RDONLY)
    for level in range(levels):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        if level % 100 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.close(at)
        at = below
    os.close(at)


def test_what_is_deep_is_removed(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    deep(folder, 3000)
    workspace.remove(folder)
    assert not folder.exists()


def test_what_cannot_be_read_is_removed(tmp_path: Path):
    folder, outside = tmp_path / "work", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x", encoding="utf-8")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / ".removed-0").mkdir()
    (folder / "a" / "b" / "file").write_text("x", encoding="utf-8")
    (folder / "a" / "link").symlink_to(outside)
    (folder / "link").symlink_to(outside)
    (folder / ("n" * 200)).write_bytes(b"")
    (folder / b"\xff\xfe".decode("utf-8", "surrogateescape")).mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(folder / "socket"))
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    workspace.remove(folder)
    assert not folder.exists()
    assert (outside / "kept").read_text(encoding="utf-8") == "x"
    workspace.remove(folder)


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "work").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="work"):
        workspace.remove(tmp_path / "work")
    assert (tmp_path / "outside").is_dir()


def test_what_is_used(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    (tmp_path / "link").symlink_to("/usr")
    used, entries = workspace.usage(tmp_path, 100)
    assert 100_000 <= used < 1_000_000
    assert entries == 4
    assert workspace.usage(tmp_path, 2)[1] == 2
    assert workspace.usage(tmp_path / "nowhere", 10) == (0, 1)


def test_what_is_too_deep_to_be_reached_counts(tmp_path: Path):
    folder = tmp_path / "work"
    folder.mkdir()
    deep(folder, 3000)
    assert workspace.usage(folder, 1000)[1] >= 1000
    workspace.remove(folder)
