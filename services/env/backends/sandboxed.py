"""Environments whose code was submitted: every episode is a process of its own, confined by the sandbox.

How many tasks a split has is known from the validation, so a client never depends on what the code says at the moment.
An episode's process begins with the reset and ends with the episode.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from services.env.backend import CALL_SECONDS, Call, KnownSplits
from services.env.episode_types import Demonstration, Message, StepResult, check_task
from services.env.sandbox import answers
from services.env.sandbox.limits import EnvironmentProgram, SandboxLimits
from services.env.sandbox.sandbox import Sandbox
from services.env.sandbox.sandboxes import Sandboxes
from services.env.tools.calls import with_calls_written
from shared.errors import NotFound, SandboxFailed, VolleyError

LOG_LINES = 200


@dataclass(eq=False)
class SandboxedBackend(KnownSplits):
    """Args: program: what its processes run, made when it is first needed; splits: number of tasks of each; deadline_s:
    for one call, the start of the process included; log: the
    newest lines that the code printed, and how its episodes failed.
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
        """What the code says of itself. Raises VolleyError where it does not load."""
        async with self._process() as sandbox:
            return answers.read_description(sandbox.description)

    async def task(self, split: str, index: int) -> str:
        check_task(self.name, self.splits_of, split, index)
        async with self._process() as sandbox:
            return answers.read_task(await self.call(sandbox, "reset", "task", {"split": split, "index": index}))

    async def reset(self, split: str, index: int, seed: int) -> SandboxedEpisode:
        check_task(self.name, self.splits_of, split, index)
        sandbox = await self._start()
        try:
            asked = {"split": split, "index": index, "seed": seed}
            opened = answers.read_opening(await self.call(sandbox, "reset", "reset", asked))
            reads_messages = answers.read_description(sandbox.description).protocol == "volley"
        except BaseException:
            await self.end(sandbox)
            raise
        return SandboxedEpisode(self, sandbox, opened.task, opened.messages, opened.tools, reads_messages)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        check_task(self.name, self.splits_of, split, index)
        if not self.has_demonstration:
            raise NotFound(f"{self.name} has no demonstrations", "give its class a method demonstration(split, index)")
        async with self._process() as sandbox:
            asked = {"split": split, "index": index}
            return answers.read_demonstration(await self.call(sandbox, "demonstrate", "demonstration", asked))

    def why_stuck(self) -> str | None:
        return None

    @property
    def is_remote(self) -> bool:
        return False

    async def call(self, sandbox: Sandbox, call: Call, method: str, params: Mapping[str, Any]) -> Any:
        """The answer, unchecked. Raises VolleyError for a defect, told in the log."""
        began = time.perf_counter()
        try:
            return await sandbox.call(method, dict(params), self.deadline_s)
        except VolleyError as error:
            self.log.append(f"{method}: {error.detail}")
            raise
        finally:
            CALL_SECONDS.labels(self.name, call).observe(time.perf_counter() - began)

    async def end(self, sandbox: Sandbox) -> None:
        """Ends a process, and keeps what it printed; once more changes nothing."""
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
        """Raises Unavailable, and SandboxFailed where the code does not load, told in the log."""
        began = time.perf_counter()
        try:
            return await self.sandboxes.start(await self.program(), self.limits, self.deadline_s, self.name)
        except SandboxFailed as error:
            self.log.append(f"load: {error.detail}")
            raise
        finally:
            CALL_SECONDS.labels(self.name, "load").observe(time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class SandboxedEpisode:
    """An episode in a process of its own. `reads_messages`: its class takes whole messages; others take their text."""

    backend: SandboxedBackend
    sandbox: Sandbox
    task: str
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    reads_messages: bool
    database: None = None

    async def step(self, message: Message) -> StepResult:
        if not self.reads_messages:
            message = Message(role="assistant", content=with_calls_written(message))
        return answers.read_step(await self.backend.call(self.sandbox, "step", "step", {"message": message}))

    async def close(self) -> None:
        await self.backend.end(self.sandbox)
