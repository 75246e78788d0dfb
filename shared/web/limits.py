"""Rate limits per client, by token buckets."""

from __future__ import annotations

from collections import OrderedDict

_MAX_CLIENTS = 4096


class RateLimiter:
    """Allow each client `per_s` requests a second, with bursts of ten times as many.

    It remembers 4096 clients; beyond that, the least recent ones are forgotten and start with a full bucket.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s, self._burst = per_s, max(1.0, 10 * per_s)
        self._filled: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, now: float) -> float:
        """Take a token from the client's bucket and return 0, or return the seconds until there is one.

        `now` is monotonic.
        """
        level, at = self._filled.pop(client, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._per_s)
        taken = level >= 1
        self._filled[client] = (level - taken, now)
        if len(self._filled) > _MAX_CLIENTS:
            self._filled.popitem(last=False)
        return 0.0 if taken else (1 - level) / self._per_s
