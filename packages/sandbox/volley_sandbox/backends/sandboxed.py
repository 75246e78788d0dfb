"""Environments from submitted code: every episode is its own process, confined by the sandbox.

The numbers of tasks are known from the validation, so clients do not depend on what the code currently reports. An
episode's process starts with the reset and ends with the episode.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.env.backend import CALL_SECONDS, Call, LiveEpisode
from services.env.episode_types import Demonstration, Message, StepResult, check_task
from shared.errors import NotFound, SandboxFailed, VolleyError
from volley_sandbox.backends.submitted import KnownSplits
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_serving.dialects.calls import with_calls_written

LOG_LINES = 200


@dataclass(eq=False)
class SandboxedBackend(KnownSplits):
    """Backend of submitted code.

    Args:
        program: makes the program of its processes, called when it is first needed.
        splits_of: number of tasks of each split.
        deadline_s: deadline of one call, including the start of the process.
        log: newest lines that the code printed, and failures of its episodes.
    """

    name: str
    program: Callable[[], Awaitable[EnvironmentProgram]]
    splits_of: Mapping[str, int]
    has_demonstration: bool
    sandboxes: Sandboxes
    limits: SandboxLimits
    deadline_s: float
    log: deque[str]

    async def describe(self) -> answers.Description:
        """The code's description of itself. Raises VolleyError if it does not load."""
        async with self._process() as sandbox:
            return answers.read_description(sandbox.description)

    async def task(self, split: str, index: int) -> str:
        check_task(self.name, self.splits_of, split, index)
        async with self._process() as sandbox:
            return answers.read_task(await self.call(sandbox, "reset", "task", {"split": split, "index": index}))

    async def reset(self, split: str, index: int, seed: int) -> LiveEpisode:
        sandbox, opened, protocol = await self._opened(split, index, seed)
        more = opened.seats, opened.seat, opened.restorable
        return SandboxedEpisode(self, sandbox, opened.task, opened.messages, opened.tools, protocol == "volley", *more)

    async def _opened(
        self, split: str, index: int, seed: int
    ) -> tuple[Sandbox, answers.OpenedEpisode, answers.AuthorProtocol]:
        """Start a process and begin a task in it."""
        check_task(self.name, self.splits_of, split, index)
        sandbox = await self._start()
        try:
            asked = {"split": split, "index": index, "seed": seed}
            opened = answers.read_opening(await self.call(sandbox, "reset", "reset", asked))
            return sandbox, opened, answers.read_description(sandbox.description).protocol
        except BaseException:
            await self.end(sandbox)
            raise

    async def demonstration(self, split: str, index: int) -> Demonstration:
        check_task(self.name, self.splits_of, split, index)
        if not self.has_demonstration:
            raise NotFound(f"{self.name} has no demonstrations", "give its class a method demonstration(split, index)")
        async with self._process() as sandbox:
            asked = {"split": split, "index": index}
            return answers.read_demonstration(await self.call(sandbox, "demonstrate", "demonstration", asked))

    def stuck_reason(self) -> str | None:
        return None

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def owner(self) -> str:
        """Name under which long calls share turns; see sandbox.long_calls."""
        return self.name

    async def call(self, sandbox: Sandbox, call: Call, method: str, params: Mapping[str, Any]) -> Any:
        """Call the code and return its answer, unchecked. Logs and raises VolleyErrors for defects."""
        began = time.perf_counter()
        try:
            return await sandbox.call(method, dict(params), self.deadline_s)
        except VolleyError as error:
            self.log.append(f"{method}: {error.detail}")
            raise
        finally:
            CALL_SECONDS.labels(self.name, call).observe(time.perf_counter() - began)

    async def end(self, sandbox: Sandbox) -> None:
        """End a process and keep its output. Idempotent."""
        if sandbox.closed:
            return
        await asyncio.shield(sandbox.close())
        self.log.extend(sandbox.log.splitlines()[-LOG_LINES:])

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._start()
        try:
            yield sandbox
        finally:
            await self.end(sandbox)

    async def _start(self) -> Sandbox:
        """Start a process. Raises Unavailable, and SandboxFailed, which is logged, if the code does not load."""
        began = time.perf_counter()
        try:
            return await self.sandboxes.start(await self.program(), self.limits, self.deadline_s, self.owner)
        except SandboxFailed as error:
            self.log.append(f"load: {error.detail}")
            raise
        finally:
            CALL_SECONDS.labels(self.name, "load").observe(time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class SandboxedEpisode:
    """An episode in its own process. `reads_messages`: its class takes whole messages; otherwise their text."""

    backend: SandboxedBackend
    sandbox: Sandbox
    task: str
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    reads_messages: bool
    seats: tuple[str, ...] = ()
    seat: str = ""
    restorable: bool = False
    database: None = None

    async def step(self, message: Message) -> StepResult:
        if not self.reads_messages:
            message = Message(role="assistant", content=with_calls_written(message))
        return answers.read_step(await self.backend.call(self.sandbox, "step", "step", {"message": message}))

    async def restore(self, snapshot: Any) -> None:
        await self.backend.call(self.sandbox, "reset", "restore", {"snapshot": snapshot})

    async def close(self) -> None:
        await self.backend.end(self.sandbox)
