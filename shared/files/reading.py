"""Read files of untrusted folders: only regular files, and never without a limit.

A FIFO would block its reader forever, a device has no end, and a single line may be as long as the disk.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shared.errors import Forbidden

MAX_LINE_BYTES = 2**20
"""Longest line of a record, in bytes; a longer one is cut, and then is no longer JSON."""
MAX_RECORD_BYTES = 2**32
"""Largest file of lines, in bytes. A sparse file may claim a terabyte, and take minutes to read."""
_BLOCK_BYTES = 2**20
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file unbuffered.

    Raises OSError, also for other kinds of files: EISDIR for a folder, else EMEDIUMTYPE.
    """
    try:
        _check_kind(path, os.stat(path))  # opening a device may have effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, "is not a path", str(path)) from error
    try:
        _check_kind(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", buffering=0)


def _check_kind(path: Path, status: os.stat_result) -> None:
    """Raise OSError for anything but a regular file."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EMEDIUMTYPE, f"is {_KINDS.get(kind, 'something else')}, not a file", str(path))


def read_file(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises OSError, EFBIG for a larger one."""
    with open_file(path) as file:
        part_bytes = min(most, os.fstat(file.fileno()).st_size) + 1  # an unchanging file is read in one part
        parts, room = list[bytes](), most + 1
        while room and (part := file.read(min(room, max(part_bytes, _BLOCK_BYTES)))):
            parts.append(part)
            room -= len(part)
    if not room:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return b"".join(parts)


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield complete lines without their newline, cut after MAX_LINE_BYTES; none if there is no file.

    Raises OSError.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        yield from (line for _, line in ended_lines(file))


def ended_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield complete lines of an open file with their size in bytes. Raises OSError, EFBIG above MAX_RECORD_BYTES."""
    if os.fstat(file.fileno()).st_size > MAX_RECORD_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MAX_RECORD_BYTES} bytes")
    rest, cut = b"", 0
    while block := file.read(_BLOCK_BYTES):
        *lines, last = (rest + block).split(b"\n")
        for line in lines:
            yield len(line) + cut + 1, line[:MAX_LINE_BYTES]
            cut = 0
        cut += max(0, len(last) - MAX_LINE_BYTES)
        rest = last[:MAX_LINE_BYTES]


def confined(root: Path, name: str | Path) -> Path:
    """Resolve `name` beneath `root`. Raises Forbidden if it leads outside, also through a link, or is not a path."""
    return beneath(root.resolve(), name)


def beneath(root: Path, name: str | Path) -> Path:
    """`confined`, for a root that is already resolved."""
    try:
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise Forbidden(f"path {str(name)[:100]!r} cannot be resolved: {type(error).__name__}") from error
    if not path.is_relative_to(root):
        raise Forbidden(f"path {name} lies outside {root}")
    return path
