"""Writes that wait while the disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.errors import StorageUnavailable
from shared.process import telemetry

_log = telemetry.Log("disk")


_RETRY_S = 1.0


async def once_there_is_room[T](write: Callable[[], T], waiting: Callable[[StorageUnavailable | None], None]) -> T:
    """Repeats `write`, which blocks, while the disk is full or may not be written to: ends only so, or by cancellation.

    Args:
        waiting: told why nothing is written yet, and None in the end.
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
