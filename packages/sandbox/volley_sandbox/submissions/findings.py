"""Findings of a validation, and what its checks share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import Unavailable, VolleyError
from volley_sandbox.backends.submitted import SubmittedBackend
from volley_sandbox.submissions.record import Check, Report

SEED_HINT = "draw what is random from random.Random(...) seeded by split, index and seed; no clocks, no global state"
AT_ONCE, _MAX_LOG = 2, 4000
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def _ignore(check: Check) -> None:
    pass


@dataclass(slots=True)
class Findings:
    """Results of a validation. `on_check` is called with each check as it ends."""

    on_check: Callable[[Check], None] = _ignore
    checks: list[Check] = field(default_factory=list[Check])
    warnings: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    n_episodes: int = 0
    reset_s: float = 0.0
    step_s: float = 0.0

    def passed(self, name: str, detail: str) -> None:
        self.add(Check(name=name, ok=True, detail=detail))

    def failed(self, name: str, detail: str, hint: str = "") -> None:
        self.add(Check(name=name, ok=False, detail=detail, hint=hint))

    def add(self, check: Check) -> None:
        if not check.ok and (hint := missing_package(check.detail)) is not None:
            check = check.model_copy(update={"hint": hint})
        self.checks.append(check)
        self.on_check(check)

    def report(self, log: Sequence[str]) -> Report:
        return Report(
            checks=tuple(self.checks),
            warnings=tuple(self.warnings),
            n_episodes=self.n_episodes,
            reward_min=min(self.rewards, default=None),
            reward_max=max(self.rewards, default=None),
            reset_s=round(self.reset_s, 4),
            step_s=round(self.step_s, 4),
            log="\n".join(log)[-_MAX_LOG:],
        )


def raise_if_ours(error: VolleyError, backend: SubmittedBackend) -> None:
    """Raise errors that are not the environment's: no free sandbox, or no answer from the package index."""
    if isinstance(error, Unavailable) and not backend.is_remote:
        raise error


class Failed(Exception):
    def __init__(self, name: str, detail: str, hint: str = "") -> None:
        self.check = Check(name=name, ok=False, detail=detail, hint=hint)


async def gathered[T](calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run calls, a few at once, and return their results in order. Raises the first Failed or Unavailable."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
    except* (Failed, Unavailable) as errors:
        failed = next(error for error in errors.exceptions if not isinstance(error, BaseExceptionGroup))
    else:
        return [task.result() for task in tasks]
    raise failed


def spread(n_tasks: int, most: int) -> list[int]:
    """At most `most` indices, evenly spaced from the first to the last."""
    return sorted({i * (n_tasks - 1) // max(1, min(most, n_tasks) - 1) for i in range(min(most, n_tasks))})


def missing_package(failure: str) -> str | None:
    """Return what to add to a user's file that imports a package without declaring it; None for other failures.

    The package is assumed to have the name under which it is imported.
    """
    if (found := _MISSING.search(failure)) is None:
        return None
    return f'add at the top of the file, a line each: `# /// script`, `# dependencies = ["{found[1]}"]`, `# ///`'
