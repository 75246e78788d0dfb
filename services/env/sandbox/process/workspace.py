"""Private folders of sandboxes where there is no tmpfs for them: looked at while they are used, removed afterwards.

Their content is a stranger's: names, depth, links and modes may be anything. Links are never followed.
"""

from __future__ import annotations

import os
import stat
from itertools import count
from pathlib import Path

MAX_FILES_PER_MB = 64


def usage(folder: Path, most: int) -> tuple[int, int]:
    """(bytes on disk, entries), as far as `most` entries. Entries that vanish meanwhile are left out."""
    total = entries = 0
    left = [str(folder)]
    while left and entries < most:
        try:
            with os.scandir(left.pop()) as found:
                for entry in found:
                    entries += 1
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    if entries >= most:
                        break
        except OSError:
            entries += 1  # too deep to be reached by its name, or gone
    return total, entries


def remove(folder: Path) -> None:
    """Removes a folder whatever is in it, in memory that does not grow with its depth; one that is gone is fine."""
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    folder.rmdir()


def _empty(top: int) -> None:
    """Folders inside folders are moved up to `top` before theirs is removed, so nothing is ever deep."""
    names = count()
    while entries := os.listdir(top):
        for name in entries:
            if not _is_folder(top, name):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for inside in os.listdir(inner):
                    if _is_folder(inner, inside):
                        os.chmod(inside, 0o700, dir_fd=inner)
                        os.rename(inside, _free(top, names), src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(inside, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _is_folder(parent: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _free(top: int, names: count[int]) -> str:
    while True:
        name = f".removed-{next(names)}"
        try:
            os.stat(name, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            return name
