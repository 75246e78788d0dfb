"""Demonstrations of training tasks from an environment, converted to records like those of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import batched
from typing import Any, Protocol

import numpy as np

from shared.clients.env import DemonstrationReply
from shared.errors import first_error

_CONCURRENT, _AT_ONCE = 2, 16
_SPLIT = "train"


class Demonstrator(Protocol):
    """Methods of the environment's client that are used here."""

    async def num_tasks(self, env: str, split: str) -> int: ...

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply: ...

    async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]: ...


async def fetch(client: Demonstrator, env: str, n: int, seed: int) -> list[DemonstrationReply]:
    """Fetch up to `n` demonstrations of distinct training tasks, chosen by `seed`, in a fixed order.

    Raises the client's errors.
    """
    total = await client.num_tasks(env, _SPLIT)
    rng = np.random.default_rng([seed, 0x5F7])
    chosen = rng.permutation(total)[:n] if total <= 4 * n else np.unique(rng.integers(0, total, n))
    limit = asyncio.Semaphore(_CONCURRENT)

    async def some(indices: Sequence[int]) -> list[DemonstrationReply]:
        async with limit:
            return await client.demonstrations(env, _SPLIT, indices)

    found = await all_of(some(indices) for indices in batched(chosen.tolist(), _AT_ONCE))
    return [shown for part in found for shown in part]


async def all_of[T](calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order. Raises the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


def as_records(env: str, shown: Sequence[DemonstrationReply]) -> list[tuple[str, dict[str, Any]]]:
    """Convert demonstrations to (place, record)."""
    return [
        (f"demonstration {i} of {env}", {"messages": list(one.messages), "tools": list(one.tools)})
        for i, one in enumerate(shown)
    ]
