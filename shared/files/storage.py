"""Write to a disk that may be full or read-only: errors are translated, and no partial write is left behind.

Invariant of `append`: a file of lines ends with a complete line, except while a line is being written. A crash then
leaves a torn line, which `whole_lines` skips and `blank_torn_line` overwrites with blanks; if it cannot, the torn line
stays a line of its own. No repair shortens such a file: another process may have written behind what was read.
"""

from __future__ import annotations

import contextlib
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
_PUT_BACK = "restore it, or stop the run and start it again with `volley up`"


@contextmanager
def storage(root: Path) -> Iterator[None]:
    """Translate errors while writing files below `root`.

    Raises StorageFull if there is no room, StorageDenied if writing is not permitted or `root` was removed, Fenced if
    something below it was removed while it was written (only another trainer does that), and any other OSError
    unchanged.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not root.exists():
            raise StorageDenied(f"cannot write to {_gone(root)}: it was removed", _PUT_BACK) from error
        raise Fenced(
            f"{error.filename} was removed while it was written", "has another trainer of the run started?"
        ) from error
    except OSError as error:
        if error.errno in _DENIED:
            path, reason = error.filename or root, (error.strerror or "").lower()
            raise StorageDenied(
                f"cannot write to {path}: {reason}", f"make it writable by user {os.getuid()}"
            ) from error
        if error.errno not in _FULL:
            raise
        raise StorageFull(f"no disk space under {root}: {_free_mb(root)} MB free", error.strerror or "") from error


def check_room(folder: Path, n_bytes: int) -> None:
    """Raise OSError early if `n_bytes` do not fit below an existing `folder`.

    A file system that does not report its size counts as having room.
    """
    found = os.statvfs(folder)
    if found.f_blocks and n_bytes > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Check that an existing `folder` is still there after writing below it.

    Raises FileNotFoundError at the end, instead of the writer's error, if the folder is gone. A new folder in its place
    does not count.
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
    """Append complete lines to a file; with `durable` they and the file's entry survive a crash.

    `check` is called once the file is open, and may raise: then nothing is written. A file that replaces it later does
    not get the lines. Raises StorageFull; then none of the lines is left, except a part that another process has
    already written behind.
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
                if (
                    os.fstat(file.fileno()).st_size == start + written
                ):  # otherwise another process has written behind it
                    os.ftruncate(file.fileno(), start)
                raise
        if created and durable:
            fsync(path.parent)


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file; none if there is no file.

    Raises ConfigError if it is not a file, and OSError.
    """
    try:
        return list(reading.whole_lines(path))
    except OSError as error:
        if error.errno in _DENIED:
            raise
        raise ConfigError(
            f"{path}: {error.strerror}", "restore the run's own file, or choose another run.name=…"
        ) from error


def blank_torn_line(path: Path, check: Callable[[], object] = lambda: None) -> bool:
    """Overwrite an incomplete last line, left by a crash, with blanks; return True if there was one.

    Nothing durable depends on it. The file keeps its length, and lines that others have appended meanwhile stay.
    `check` is called once the line is read, and may raise: if nobody else wrote until then, the line is not theirs.
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
    """Replace a file's content atomically, also across a crash; `check` is called last, and may raise to cancel.

    Raises StorageFull.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storage(path.parent):
        try:
            temporary.unlink(missing_ok=True)  # a link there would lead out of the folder
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
    """Make a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`fsync` everything below a folder, and the folder."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def link_tree(source: Path, target: Path) -> None:
    """Make a folder with links to the same files, or copies where linking fails. Raises OSError."""
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
    """Return the topmost missing folder on the way to `path`."""
    return next((parent for parent in reversed(path.parents) if not parent.exists()), path)


def _free_mb(root: Path) -> int:
    return shutil.disk_usage(root).free // 2**20


def make_private(database: Path) -> None:
    """Create a database of SQLite, or take it and its further files away from other users: mode 0600. Raises OSError.

    It is not opened if it exists: closing a file ends the locks that SQLite holds on it in this process.
    """
    try:
        os.close(os.open(database, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        for path in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it is another user's, who decides
                path.chmod(0o600)
