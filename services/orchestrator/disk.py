"""Retry writes while the disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import StorageUnavailable
from shared.process import telemetry

_log = telemetry.Log("disk")


_RETRY_S = 1.0


async def retry_while_disk_full[T](write: Callable[[], T], waiting: Callable[[StorageUnavailable | None], None]) -> T:
    """Repeat the blocking `write` while the disk is full or not writable, without a deadline.

    Args:
        waiting: called with the error after each failed write, and with None at the end.
    """
    while True:
        try:
            done = await asyncio.to_thread(write)
        except StorageUnavailable as error:
            _log.warning("waiting for disk space", reason=str(error))
            waiting(error)
        else:
            waiting(None)
            return done
        await asyncio.sleep(_RETRY_S)
