"""The one retry helper: bounded and jittered, for clients only.

Never nest it, and never retry errors of the caller.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from shared.errors import Unavailable


async def retry[T](call: Callable[[], Awaitable[T]], *, attempts: int, base_s: float = 0.1, cap_s: float = 5.0) -> T:
    """Await `call()` up to `attempts` times, sleeping after each `Unavailable`.

    The sleeps are base_s, 2·base_s, … with jitter, at most cap_s, and at least the server's `retry_after_s`. Raises the
    last error; other errors at once.
    """
    for attempt in range(attempts):
        try:
            return await call()
        except Unavailable as error:
            if attempt + 1 == attempts:
                raise
            backoff = min(cap_s, base_s * 2**attempt) * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(cap_s, max(backoff, error.retry_after_s if error.status in (429, 503) else 0.0)))
    raise AssertionError("attempts must be positive")
