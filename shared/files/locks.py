"""Locks between processes, on files; a lock ends with its holder."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shared.errors import ConfigError
from shared.files import storage

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock_file(path: Path) -> int:
    """Open a lock file, creating it and its folder. Raises StorageUnavailable."""
    with storage.storage(path.parent.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def existing_lock_file(path: Path) -> int | None:
    """Open a lock file; None if nobody has ever locked it, or it cannot be read."""
    with suppress(OSError):
        return os.open(path, os.O_RDONLY)
    return None


@asynccontextmanager
async def locked(descriptor: int, *, shared: bool = False, poll_s: float) -> AsyncIterator[None]:
    """Hold the lock of an open file, waiting for as long as others hold it. Closes the descriptor.

    Args:
        shared: wait only for a process that holds the lock alone.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        while not try_lock(descriptor, shared=shared):  # noqa: ASYNC110 - another process holds it; there is no event
            await asyncio.sleep(poll_s)
        yield
    finally:
        os.close(descriptor)


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file or folder without waiting; False if another process holds the lock.

    Args:
        shared: other processes may hold a shared lock too.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ConfigError(
            f"{_path_of(file)} is on a file system without file locks ({errno.errorcode[error.errno]})",
            "use a local disk, or mount it with locks: lockd for NFS, -o flock for Lustre",
        ) from error
    return True


def _path_of(file: int | IO[Any]) -> str:
    return os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
