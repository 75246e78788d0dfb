"""Writing to a disk that may be full, or not ours: what the system says is translated here, and nothing half-written is
left behind.

Invariant of `append`: a file of lines ends with a whole line, except while a line is being written; a crash then leaves
a torn one, which `whole_lines` does not return and `blank_torn_line` makes a line of blanks. Where it could not it
stays a line of its own. No mend shortens such a file: another process may have written behind what was read.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError, Fenced, StorageDenied, StorageFull, VolleyError
from shared.files import reading

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_PUT_BACK = "put it back as it was, or stop the run and start it again with `volley up`"


@contextmanager
def storage(root: Path) -> Iterator[None]:
    """Inside, files below `root` are written.

    Raises StorageFull if there is no room for them, StorageDenied if they may not be written or `root` was removed,
    Fenced if something below it was removed while it was written (only another trainer does), and any other OSError as
    it is.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not root.exists():
            raise StorageDenied(f"cannot write to {_gone(root)}: it was removed", _PUT_BACK) from error
        raise Fenced(
            f"{error.filename} was removed while it was written", "has another trainer of the run begun?"
        ) from error
    except OSError as error:
        if error.errno in _DENIED:
            path, reason = error.filename or root, (error.strerror or "").lower()
            raise StorageDenied(
                f"cannot write to {path}: {reason}", f"make it writable by user {os.getuid()}"
            ) from error
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            f"waiting for disk space under {root}: {_free_mb(root)} MB free", error.strerror or ""
        ) from error


def check_room(folder: Path, n_bytes: int) -> None:
    """Raises OSError where so much does not fit below an existing `folder`, before it is filled for all others as well.
    A file system that does not tell its size is taken to have room.
    """
    found = os.statvfs(folder)
    if found.f_blocks and n_bytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, files are written below an existing `folder`.

    Raises FileNotFoundError at the end, instead of whatever the writer made of it, if the folder is not there any more.
    One that the writer has made in its place does not count.
    """
    handle, cause = os.open(folder, os.O_RDONLY), None
    try:
        yield
    except Exception as error:
        cause = error
        raise
    finally:
        same = folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle))
        os.close(handle)
        if not same:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder)) from cause


def append(path: Path, text: bytes, *, durable: bool, check: Callable[[], object] = lambda: None) -> None:
    """Adds whole lines to a file; with `durable` they and the file's entry survive a crash. `check` is called once the
    file is open, and may raise: then nothing is written. A file that is put in its place later does not get the lines.

    Raises StorageFull; then none of the lines is there, unless another process has written behind a part of them: that
    part stays.
    """
    with storage(path.parent):
        created = not path.exists()
        with path.open("a+b", buffering=0) as file:
            check()
            start, written = file.tell(), 0
            if start and os.pread(file.fileno(), 1, start - 1) != b"\n":
                text = b"\n" + text
            try:
                while written < len(text):
                    written += file.write(text[written:])
                if durable:
                    os.fsync(file.fileno())
            except OSError:
                if os.fstat(file.fileno()).st_size == start + written:  # else another process has written behind us
                    os.ftruncate(file.fileno(), start)
                raise
        if created and durable:
            fsync(path.parent)


def whole_lines(path: Path) -> list[bytes]:
    """Of a file of lines, those that have an end; none if there is no file. Raises ConfigError if it is no file, and
    OSError.
    """
    try:
        return list(reading.whole_lines(path))
    except OSError as error:
        if error.errno in _DENIED:
            raise
        raise ConfigError(
            f"{path}: {error.strerror}", "put the run's own file back, or choose another run.name=…"
        ) from error


def blank_torn_line(path: Path, check: Callable[[], object] = lambda: None) -> bool:
    """Overwrites what a crash left of a line without its end with a line of blanks. Whether there was one.

    Nothing durable was promised for it. The file keeps its length, and what others have appended meanwhile stays,
    however long this takes. `check` is called once the torn line is read, and may raise: if nobody else wrote until
    then, it is no line of theirs.
    """
    if not path.exists():
        return False
    with path.open("r+b", buffering=0) as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        torn = len(data) - whole
        if torn:
            check()
            os.pwrite(file.fileno(), b" " * (torn - 1) + b"\n", whole)
    return torn > 0


def replace(path: Path, text: bytes, check: Callable[[], object] = lambda: None) -> None:
    """The file with another content: whole or as it was, also after a crash. `check` is called last, and may raise:
    then as it was.

    Raises StorageFull.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storage(path.parent):
        try:
            temporary.unlink(missing_ok=True)  # a link that lies there would lead out of the folder
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            check()
            temporary.rename(path)
        except (OSError, VolleyError):
            temporary.unlink(missing_ok=True)
            raise
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`fsync` of everything below a folder, and of itself."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def link_tree(source: Path, target: Path) -> None:
    """A folder of the same files, copied where they cannot be linked. Raises OSError."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir()
        else:
            _link_or_copy(path, place)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def _gone(path: Path) -> Path:
    """The topmost folder on the way to `path` that is not there."""
    return next((parent for parent in reversed(path.parents) if not parent.exists()), path)


def _free_mb(root: Path) -> int:
    return shutil.disk_usage(root).free // 2**20
