"""Harbor task folders as an environment: the model works in a container's shell, then the task's verifier judges.

Every episode is a trial of Harbor's (see volley_sandbox.bridges.harbor.worker), started with the episode: its container
starts while the model reads the first message, which is the task's instruction. A message with a call of the tool
`bash` runs a command; a message without a call ends the task or its step, and so does the last allowed message.

Invariants: no file of tests/ or solution/ is in the container until the model's last command and its processes have
ended; the reward is that of Harbor's verifier. A container that is gone, or tests that write no reward, give none, and
the episode fails. Only tests that have used up their own time, or files beyond the limit, are the model's doing and
give 0. While a container is at work longer than a request may take, Busy asks the client to repeat it.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.env.backend import call_seconds
from services.env.episode_types import (
    MAX_REWARD,
    Demonstration,
    Fault,
    Info,
    Message,
    StepResult,
    check_task,
    fingerprint,
    user,
)
from shared.errors import Conflict, InputError, NotFound, SandboxFailed
from shared.text import well_formed
from volley_sandbox.backends.submitted import KnownSplits
from volley_sandbox.harbor.containers import Agent, Containers
from volley_sandbox.harbor.tasks import HarborTask
from volley_sandbox.sandbox.repeated_call import RepeatedCall, wait_for_answer
from volley_sandbox.tools.base import ToolFault
from volley_sandbox.tools.bash import BASH, BashSession, CommandResult
from volley_sandbox.tools.dispatch import EpisodeTools
from volley_sandbox.tools.settings import ToolUse
from volley_serving.dialects.calls import CallFormat, tool_calls_of

HARBOR = "harbor"
"""Protocol of a submission of task folders."""
MAX_COMMAND = 100_000
"""Bytes of a command; the kernel takes 128 KiB for one argument."""
_UNJUDGED_HINT = "the episode is played again; the output of the tests is in the log of the environment"


class HarborConfig(BaseModel):
    """Settings of task folders.

    Attributes:
        max_turns: messages of the model; after the last one the task is judged as it stands, and truncated.
        tool_format: format of the model's tool calls.
        max_output: characters of a command's output that the model reads; the middle of longer output is dropped.
        command_timeout_s: seconds for one command.
        judge: `task` judges where the task says, in the model's container by default; `fresh` in a fresh container of
            the task that gets the working folder only, so nothing else that the model changed can fool the tests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(default=20, ge=1, le=1000)
    tool_format: CallFormat = "auto"
    max_output: int = Field(default=4000, ge=100, le=100_000)
    command_timeout_s: float = Field(default=60.0, ge=1, le=3600)
    judge: Literal["task", "fresh"] = "task"


def read_config(given: Mapping[str, Any]) -> HarborConfig:
    """Validate the settings. Raises InputError."""
    try:
        return HarborConfig.model_validate(dict(given), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])[:80]
        known = ", ".join(HarborConfig.model_fields)
        raise InputError(f"config.{key}: {problem['msg'].lower()}", f"use one of: {known}") from error


@dataclass(frozen=True, slots=True)
class HarborDescription:
    """Description of task folders: the numbers of tasks."""

    splits: Mapping[str, int]
    protocol: str = HARBOR
    entry: str | None = None
    tools: Sequence[Mapping[str, Any]] = (BASH.schema,)
    has_demonstration: bool = False
    agent: None = None


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Result of the tests. `why` is the fault if they gave no reward of their own, or none at all (`unjudged`)."""

    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""
    unjudged: bool = False


@dataclass(eq=False)
class HarborBackend(KnownSplits):
    """Backend of an archive of task folders.

    Args:
        read: reads the tasks by split, called when they are first needed.
        splits_of: numbers of tasks.
        containers: where the tasks are played.
        log: failures of episodes, and output of their tests.
    """

    name: str
    read: Callable[[], Awaitable[Mapping[str, Sequence[HarborTask]]]]
    splits_of: Mapping[str, int]
    config: HarborConfig
    containers: Containers
    log: deque[str]
    has_demonstration: bool = False
    is_remote: bool = False

    async def describe(self) -> HarborDescription:
        """Read the tasks and count them. Raises InputError, StorageDenied, Unavailable."""
        return HarborDescription({split: len(tasks) for split, tasks in (await self.read()).items()})

    async def task(self, split: str, index: int) -> str:
        return f"{split}/{index} {(await self._task(split, index)).name}"[:200]

    async def beginning(self, split: str, index: int) -> str:
        """First message of a task with a digest of its containers: many tasks have one instruction."""
        task = await self._task(split, index)
        return f"{task.instruction}\n{await asyncio.to_thread(task.environment_digest)}"

    async def reset(self, split: str, index: int, seed: int) -> HarborEpisode:
        """Start an episode. `seed` has no effect, because nothing in a task is random."""
        task = await self._task(split, index)
        with call_seconds(self.name, "reset").time():
            number, started = await self.containers.start(task.folder, "player", fresh=self.config.judge == "fresh")
        return HarborEpisode(self, task, number, started, f"{split}/{index} {task.name}"[:200])

    async def demonstration(self, split: str, index: int) -> Demonstration:
        raise NotFound(f"{self.name} has no demonstrations", "a solution is a script, not a conversation")

    async def prove(self, split: str, index: int, *, solve: bool) -> TrialVerdict:
        """Judge a task untouched, or after its solution. Raises VolleyError."""
        agent: Agent = "oracle" if solve else "nop"
        task = await self._task(split, index)
        number, result = await self.containers.start(task.folder, agent, fresh=self.config.judge == "fresh")
        try:
            return self.verdict(task, await asyncio.shield(result), agent)
        finally:
            self.containers.close(number)

    def stuck_reason(self) -> str | None:
        return self.containers.stuck_reason()

    def verdict(self, task: HarborTask, answer: Mapping[str, Any], agent: Agent = "player") -> TrialVerdict:
        """Read the verdict of a trial, and log it."""
        found = verdict_of(answer["rewards"] or {}, answer["why"], unjudged=answer["unjudged"])
        printed = well_formed(str(answer.get("output", "")))[-500:].strip()
        reward = "no reward" if found.unjudged else f"reward {found.reward:g}"
        self.log.append(f"{task.name}: {agent}: {reward}{f', {found.why}' if found.why else ''} {printed}")
        return found

    async def _task(self, split: str, index: int) -> HarborTask:
        check_task(self.name, self.splits_of, split, index)
        return (await self.read())[split][index]


class HarborEpisode:
    """One task in its container."""

    database: None = None
    tools: Sequence[Mapping[str, Any]] = (BASH.schema,)

    def __init__(
        self, backend: HarborBackend, task: HarborTask, number: str, started: asyncio.Future[dict[str, Any]], name: str
    ) -> None:
        self.task = name
        self.opening: tuple[Message, ...] = (user(task.instruction),)
        self._backend, self._of, self._number, self._started = backend, task, number, started
        self._pending = RepeatedCall[dict[str, Any]]()
        self._answered: tuple[bool, tuple[Message, ...], Fault | None] | None = None
        self._message = ""
        self._step, self._turns = 0, 0
        self._left_s = _limit(task, 0)
        use = ToolUse(max_calls_per_turn=1, max_calls=1000, max_output=backend.config.max_output)
        self._bash = EpisodeTools([BashSession(self)], use)

    async def step(self, message: Message) -> StepResult:
        """Answer one message.

        Raises Busy (repeat the request), Conflict (another message while one is answered), SandboxFailed (no reward).
        """
        digest = fingerprint(message)
        if self._message not in ("", digest):
            raise Conflict("the episode still answers another message", "repeat that message")
        self._message = digest
        with call_seconds(self._backend.name, "step").time():
            result = await self._stepped(message)
        self._message = ""
        return result

    async def finish(self) -> StepResult:
        """Judge the task as it stands, because its client stops."""
        with call_seconds(self._backend.name, "step").time():
            return await self._judged((), None, truncated=True, last=True)

    async def close(self) -> None:
        self._backend.containers.close(self._number)

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command, in the time of the environment's settings. Raises Busy, SandboxFailed, ToolFault."""
        del timeout_s
        if len(command.encode()) > MAX_COMMAND:
            raise ToolFault(f"the command has more than {MAX_COMMAND} bytes: write a long file in parts")
        own_s = min(self._backend.config.command_timeout_s, max(1.0, self._left_s))
        found = await self._asked("command", command=command, timeout_s=own_s)
        self._left_s = 0.0 if found["ended"] == "disk" else self._left_s - found["seconds"]
        return CommandResult(
            output=well_formed(found["output"]), exit=found["exit"], ended=found["ended"], limit_s=own_s
        )

    async def _stepped(self, message: Message) -> StepResult:
        if self._answered is None:
            self._answered = await self._carried_out(message)
        called, messages, fault = self._answered
        if called and self._turns < self._backend.config.max_turns and self._left_s > 0:
            self._answered = None
            return _continued(messages, fault)
        over = self._turns >= self._backend.config.max_turns
        return await self._judged(messages, fault, truncated=called, last=over)

    async def _carried_out(self, message: Message) -> tuple[bool, tuple[Message, ...], Fault | None]:
        """Carry out the calls of a message: whether it has any, their answers, and the model's fault. Raises Busy."""
        await wait_for_answer(self._started)
        calls = await tool_calls_of(message, self._backend.config.tool_format, self.tools)
        answers = await self._bash.answer(calls) if calls else []
        self._turns += 1
        fault: Fault | None = None if all(answer.ok for answer in answers) else "tool"
        return bool(calls), tuple(Message(role="tool", content=answer.text) for answer in answers), fault

    async def _judged(
        self, messages: tuple[Message, ...], fault: Fault | None, *, truncated: bool, last: bool
    ) -> StepResult:
        """End the task's step: go on with its next one, or give the reward. Raises Busy, SandboxFailed.

        Args:
            last: the steps after this one are judged as they stand.
        """
        await wait_for_answer(self._started)
        found = await self._asked("judge", last=last)
        self._answered = None
        if "instruction" in found:
            self._step += 1
            self._left_s = _limit(self._of, self._step)
            return _continued((*messages, user(well_formed(found["instruction"]))), fault)
        verdict = self._backend.verdict(self._of, found)
        if verdict.unjudged:
            raise SandboxFailed(f"{self.task}: the tests gave no reward: {verdict.why}", _UNJUDGED_HINT, why="protocol")
        extra = {"rewards": dict(verdict.rewards), **({"verifier": verdict.why} if verdict.why else {})}
        info = Info({"reward": verdict.reward}, verdict.reward >= 1.0, fault, extra)
        return StepResult(messages, verdict.reward, terminated=not truncated, truncated=truncated, info=info)

    async def _asked(self, call: str, **params: Any) -> dict[str, Any]:
        """Send a request unless one is pending, and wait for the answer. Raises Busy, SandboxFailed."""
        return await self._pending.answer(lambda: self._backend.containers.send(call, self._number, **params))


def _limit(task: HarborTask, step: int) -> float:
    """Seconds for the commands of a task's step."""
    limits = task.commands_s
    found = limits[step] if step < len(limits) else None
    return math.inf if found is None else found


def _continued(messages: tuple[Message, ...], fault: Fault | None) -> StepResult:
    return StepResult(messages, 0.0, False, False, Info({"reward": 0.0}, False, fault))


def verdict_of(found: Mapping[str, Any], why: str, *, unjudged: bool = False) -> TrialVerdict:
    """Verdict from numbers by name: the number `reward` counts, or else the mean of all.

    Only numbers that count are bounded by MAX_REWARD; others are kept if they are a float.
    """
    if unjudged or (not found and not why):
        return TrialVerdict(0.0, why=well_formed(why) or "the verifier gave no reward", unjudged=True)
    for key, value in found.items():
        if not abs(value) <= MAX_REWARD and (key == "reward" or "reward" not in found):
            over = f"the verifier's number {key[:80]!r} is not between {-MAX_REWARD:g} and {MAX_REWARD:g}"
            return TrialVerdict(0.0, why=over, unjudged=True)
    kept = {well_formed(key[:80]): float(value) for key, value in found.items() if abs(value) <= sys.float_info.max}
    mean = sum(kept.values()) / len(kept) if kept else 0.0
    return TrialVerdict(kept.get("reward", mean), kept, well_formed(why))
