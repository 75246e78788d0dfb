"""Locks between processes: on a file beside the one that is guarded, and gone with their holder."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from shared.files import storage


def lock_file(path: Path) -> int:
    """A descriptor of the file, made where there is none, its folder too. Raises StorageUnavailable."""
    with storage.storage(path.parent.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def existing_lock_file(path: Path) -> int | None:
    """A descriptor of the file; None where nobody has ever locked it, or it cannot be read."""
    with suppress(OSError):
        return os.open(path, os.O_RDONLY)
    return None


@asynccontextmanager
async def locked(descriptor: int, *, shared: bool = False, poll_s: float) -> AsyncIterator[None]:
    """Waits for as long as others hold the lock (a `shared` one only for whoever holds it alone); ends only so, or by
    cancellation. Closes the descriptor.
    """
    try:
        while not _taken(descriptor, shared=shared):  # noqa: ASYNC110 - another process holds it; there is no event
            await asyncio.sleep(poll_s)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
