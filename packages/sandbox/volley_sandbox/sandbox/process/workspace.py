"""Private folders of sandboxes without a tmpfs: measured while they are used, removed afterwards.

Their content is untrusted: names, depth, links and modes may be anything. Links are never followed.
"""

from __future__ import annotations

import os
import stat
from itertools import count
from pathlib import Path

MAX_FILES_PER_MB = 64


def usage(folder: Path, most: int) -> tuple[int, int]:
    """Return (bytes on disk, entries), counting at most `most` entries. Skips entries that vanish meanwhile."""
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
            entries += 1  # nested too deep for its path, or gone
    return total, entries


def remove(folder: Path) -> None:
    """Remove a folder of any content, in memory independent of its depth. A missing folder is ignored."""
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
    """Empty a folder. Nested folders are moved up to `top` before their parent is removed, which bounds the depth."""
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
