"""The queue's Lua scripts and the names of its keys.

All keys of a run share the hash tag `{run}`: they live in one cluster slot, so every script may use all of them. Each
script is atomic and does a bounded amount of work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis.asyncio import Redis

from shared.errors import ConfigError, Fenced
from shared.queue.client import translated

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_SCRIPTS = ("reserve", "renew", "publish", "commit", "begin", "begin_done", "open_chunk", "dead_letter", "leave")
FENCED = -1


class Keys:
    """Names of a run's keys.

    Raises:
        ConfigError: the run's name could break out of the hash tag.
    """

    def __init__(self, run: str) -> None:
        if not _RUN_NAME.match(run):
            raise ConfigError(f"run name {run!r} cannot be used in Redis keys", "use letters, digits, '.', '_' and '-'")
        self.prefix = f"{{{run}}}:"
        self.state = self.prefix + "st"  # hash: issued, low, version, epoch, fence, ready, void, counters
        self.stream = self.prefix + "q"  # one entry = one group: ticket t, payload d
        self.lease = self.prefix + "lease"  # sorted set: ticket -> deadline in ms, or -> ticket (pool)
        self.seen = self.prefix + "seen"  # hash: queued ticket -> entry id
        self.done = self.prefix + "done"  # set: finished tickets above low
        self.dead = self.prefix + "dead"  # capped stream of poisoned entries
        self.tries = self.prefix + "tries"  # hash: queued ticket -> deliveries that ended in a crash
        self.wake = self.prefix + "wake"  # stream of one entry: capacity may have grown
        self.scripted = [self.state, self.stream, self.lease, self.seen, self.done, self.dead, self.tries, self.wake]


class Scripts:
    """Call the scripts of one run by name."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys.scripted
        folder = resources.files("shared.queue") / "lua"
        prelude = (folder / "prelude.lua").read_text(encoding="utf-8")
        self._calls = {
            name: redis.register_script(prelude + (folder / f"{name}.lua").read_text(encoding="utf-8"))
            for name in _SCRIPTS
        }

    async def call(self, name: str, *args: str | int | bytes) -> Any:
        """Run one script; return its answer as the server sent it.

        Raises:
            QueueUnavailable: the server did not answer; the script may or may not have run.
        """
        with translated(self._redis):
            return await self._calls[name](keys=self._keys, args=list(args))

    async def fenced(self, name: str, fence: str, args: Sequence[str | int] = ()) -> int:
        """Run a script that only the current trainer may run.

        Raises:
            Fenced: `fence` is not the current trainer's.
            QueueUnavailable: see `call`.
        """
        answer = int(await self.call(name, fence, *args))
        if answer == FENCED:
            raise Fenced("another trainer has started, or Redis was wiped", "restart from the newest checkpoint")
        return answer
