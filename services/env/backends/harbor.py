"""Harbor task folders as an environment: the model works in a shell, then the task's tests give the reward.

Every episode is a sandbox that starts programs, with its own root. Its first message is the task's instruction. A
message with a call of the tool `bash` runs a command; a message without a call ends the task, and so does the last
allowed message.

Invariants: no file of tests/ or solution/ is in the sandbox until the model's last command and all its processes have
ended; the reward is /logs/verifier/reward.json or reward.txt as tests/test.sh then writes it. Of the model's changes
the tests see only the working folder and the folders that the Dockerfile made; everything else (variables, the user's
folder, temporary files, a share of the disk) is reset. Tests that write no reward give 0: they wrote one at the
validation, with and without the solution, so the model has broken something.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import posixpath
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.env.backend import KnownSplits, call_seconds
from services.env.episode_types import MAX_REWARD, Demonstration, Fault, Info, Message, StepResult, check_task, user
from services.env.harbor.tasks import HarborTask
from services.env.sandbox.limits import SandboxLimits, ShellProgram
from services.env.sandbox.sandbox import Sandbox
from services.env.sandbox.sandboxes import Sandboxes
from services.env.tools.bash import BASH, BashSession, Shell
from services.env.tools.dispatch import EpisodeTools
from services.env.tools.settings import ToolUse
from shared.dialects.calls import CallFormat, tool_calls_of
from shared.errors import Busy, InputError, NotFound, RateLimited, SandboxFailed
from shared.text import well_formed

HARBOR = "harbor"
"""Protocol of a submission of task folders."""
COMMAND_S, GRADE_S = 10.0, 14.0
"""Seconds for one command, and for the tests; their sum is less than a client waits for a step."""
SOLVE_S = 60.0
"""Seconds for a solution, which only the validation runs."""
THREADS, OPEN_FILES, DISK_MB = 64, 64, 128
JUDGING_ROOM = 0.25
"""Share of the disk that must be free for the tests, because on a full disk they cannot write their results."""
_CALL_S = 10.0
"""Deadline of quick calls, in seconds."""
_TESTS, _SOLUTION, _LOGS = "/tests/test.sh", "/solution/solve.sh", "/logs/verifier"
_RENEWED = ("/tests", "/logs", "/verifier")
_FOLDERS = (_LOGS, "/logs/agent", "/logs/artifacts")
_MAX_REWARD_FILE = 2**16
_HOME = "/verifier"
"""The user's folder during the tests, newly made; also the home in the sandbox's /etc/passwd."""
_OWN = {"HOME": _HOME, "PYTHONNOUSERSITE": "1"}


class HarborConfig(BaseModel):
    """Settings of task folders.

    Attributes:
        max_turns: messages of the model; after the last one the task is graded as it stands, and truncated.
        tool_format: format of the model's tool calls.
        max_output: characters of a command's output that the model reads; the middle of longer output is dropped.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(default=20, ge=1, le=1000)
    tool_format: CallFormat = "auto"
    max_output: int = Field(default=4000, ge=100, le=100_000)


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
class Verdict:
    """Result of the tests. `why` is the fault if they gave no reward."""

    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""


@dataclass(eq=False)
class HarborBackend(KnownSplits):
    """Backend of task folders.

    Args:
        read: reads the tasks by split, called when they are first needed.
        splits_of: numbers of tasks.
        limits: limits of a sandbox of the service.
        log: failures of episodes, and output of their tests.
    """

    name: str
    read: Callable[[], Awaitable[Mapping[str, Sequence[HarborTask]]]]
    splits_of: Mapping[str, int]
    config: HarborConfig
    sandboxes: Sandboxes
    limits: SandboxLimits
    log: deque[str]
    has_demonstration: bool = False
    is_remote: bool = False

    async def describe(self) -> HarborDescription:
        """Read the tasks and count them. Raises InputError, StorageDenied."""
        return HarborDescription({split: len(tasks) for split, tasks in (await self.read()).items()})

    async def task(self, split: str, index: int) -> str:
        return f"{split}/{index} {(await self._task(split, index)).name}"[:200]

    async def reset(self, split: str, index: int, seed: int) -> HarborEpisode:
        """Start an episode. `seed` has no effect, because nothing in a task is random."""
        task = await self._task(split, index)
        with call_seconds(self.name, "reset").time():
            sandbox = await self.open(task)
        return HarborEpisode(self, task, sandbox, f"{split}/{index} {task.name}"[:200])

    async def demonstration(self, split: str, index: int) -> Demonstration:
        raise NotFound(f"{self.name} has no demonstrations", "a solution is a script, not a conversation")

    async def prove(self, split: str, index: int) -> tuple[Verdict, Verdict]:
        """Run a task's tests in an untouched sandbox, and after solution/solve.sh. Raises VolleyError."""
        task = await self._task(split, index)
        return await self._proof(task, solve=False), await self._proof(task, solve=True)

    def why_stuck(self) -> str | None:
        return None

    async def open(self, task: HarborTask) -> Sandbox:
        """Start a sandbox for the task. Raises Busy, Forbidden, SandboxFailed, Unavailable."""
        own = self.limits
        disk_mb = min(DISK_MB, task.storage_mb or DISK_MB)
        memory_mb = min(own.memory_mb, task.memory_mb or own.memory_mb)
        limits = replace(
            own, threads=THREADS, open_files=OPEN_FILES, memory_mb=memory_mb, disk_mb=disk_mb, file_mb=disk_mb
        )
        try:
            sandbox = await self.sandboxes.start(ShellProgram(), limits)
        except RateLimited as full:
            raise Busy(full.detail, full.hint, full.retry_after_s) from full
        try:
            await put(sandbox, task.image.files, (*_FOLDERS, *task.image.folders))
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def _proof(self, task: HarborTask, *, solve: bool) -> Verdict:
        sandbox = await self.open(task)
        try:
            if solve:
                await put(sandbox, task.solution)
                timeout_s = min(SOLVE_S, task.agent_s or SOLVE_S)
                ran = await shell_of(task, sandbox, task.solution_env).run(_SOLUTION, timeout_s)
                self.log.append(f"{task.name}: solve.sh {ran.summary}")
            return await self.judge(task, sandbox)
        finally:
            await asyncio.shield(sandbox.close())

    async def judge(self, task: HarborTask, sandbox: Sandbox) -> Verdict:
        """Put the tests into the sandbox, run them, and read their reward.

        Raises SandboxFailed if the sandbox is gone.
        """
        try:
            kept = {"paths": _RENEWED, "kept": _work(task), "workdir": task.image.workdir}
            await sandbox.call("renew", kept, _CALL_S)
            await put(sandbox, task.tests, _FOLDERS, JUDGING_ROOM)
        except SandboxFailed as failed:
            if not failed.alive:
                raise
            return Verdict(0.0, why=f"the tests cannot be written to the sandbox: {failed.detail}")
        timeout_s = min(GRADE_S, task.verifier_s)
        ran = await _judging(task, sandbox).run(_TESTS, timeout_s)
        self.log.append(f"{task.name}: test.sh {ran.summary}")
        if ran.ended:
            return Verdict(0.0, why=f"the tests were killed: {ran.why_ended(timeout_s)}")
        for name, read in (("reward.json", _of_json), ("reward.txt", _of_text)):
            text = await sandbox.call("take", {"path": f"{_LOGS}/{name}", "most": _MAX_REWARD_FILE}, _CALL_S)
            if isinstance(text, str):
                return read(text)
        return Verdict(0.0, why="the tests wrote neither reward.txt nor reward.json to /logs/verifier")

    async def _task(self, split: str, index: int) -> HarborTask:
        check_task(self.name, self.splits_of, split, index)
        return (await self.read())[split][index]


class HarborEpisode:
    """One task in its sandbox."""

    database: None = None
    tools: Sequence[Mapping[str, Any]] = (BASH.schema,)

    def __init__(self, backend: HarborBackend, task: HarborTask, sandbox: Sandbox, name: str) -> None:
        self.task = name
        self.opening: tuple[Message, ...] = (user(task.instruction),)
        self._backend, self._of, self._sandbox = backend, task, sandbox
        self._left_s = math.inf if task.agent_s is None else task.agent_s
        use = ToolUse(timeout_s=COMMAND_S, max_calls_per_turn=1, max_calls=1000, max_output=backend.config.max_output)
        self._bash = EpisodeTools([BashSession(shell_of(task, sandbox, {}))], use)
        self._turns = 0

    async def step(self, message: Message) -> StepResult:
        """Answer one message. Raises SandboxFailed if the sandbox is gone, which gives no reward; GivenUp."""
        with call_seconds(self._backend.name, "step").time():
            return await self._stepped(message)

    async def finish(self) -> StepResult:
        """Grade the task as it stands, because its client stops."""
        with call_seconds(self._backend.name, "step").time():
            return await self._judged((), None, truncated=True)

    async def close(self) -> None:
        await asyncio.shield(self._sandbox.close())

    async def _stepped(self, message: Message) -> StepResult:
        calls = await tool_calls_of(message, self._backend.config.tool_format, self.tools)
        self._turns += 1
        messages: tuple[Message, ...] = ()
        fault: Fault | None = None
        if calls:
            began = time.monotonic()
            answers = await self._bash.answer(calls)
            self._left_s -= time.monotonic() - began
            messages = tuple(Message(role="tool", content=answer.text) for answer in answers)
            fault = None if all(answer.ok for answer in answers) else "tool"
            if self._turns < self._backend.config.max_turns and self._left_s > 0:
                return StepResult(messages, 0.0, False, False, Info({"reward": 0.0}, False, fault))
        return await self._judged(messages, fault, truncated=bool(calls))

    async def _judged(self, messages: tuple[Message, ...], fault: Fault | None, *, truncated: bool) -> StepResult:
        verdict = await self._backend.judge(self._of, self._sandbox)
        extra = {"rewards": dict(verdict.rewards), **({"verifier": verdict.why} if verdict.why else {})}
        info = Info({"reward": verdict.reward}, verdict.reward >= 1.0, fault, extra)
        return StepResult(messages, verdict.reward, terminated=not truncated, truncated=truncated, info=info)


def shell_of(task: HarborTask, sandbox: Sandbox, env: Mapping[str, str]) -> Shell:
    """Shell of a task, with variables in addition to its environment's."""
    return Shell(sandbox, task.image.workdir, {**task.image.env, **env})


def _judging(task: HarborTask, sandbox: Sandbox) -> Shell:
    """Shell of the tests, with only their own variables.

    The environment's variables could point programs to places where the model wrote.
    """
    return Shell(sandbox, task.image.workdir, {**_OWN, **task.verifier_env})


def _work(task: HarborTask) -> list[str]:
    """Folders of the model's work: the working folder, the Dockerfile's folders, and those of its files."""
    image = task.image
    beside = (path if (above := posixpath.dirname(path)) == "/" else above for path in image.files)
    return sorted({image.workdir, *image.folders, *beside})


async def put(sandbox: Sandbox, files: Mapping[str, Path], folders: Sequence[str] = (), room: float = 0.0) -> None:
    """Write files into a sandbox by their absolute paths; scripts become executable. Raises SandboxFailed.

    Args:
        room: share of the disk that must remain free.
    """

    def read() -> list[dict[str, Any]]:
        contents = {path: file.read_bytes() for path, file in files.items()}
        return [
            {
                "path": path,
                "content": base64.b64encode(data).decode(),
                "run": data.startswith(b"#!") or _is_script(path),
            }
            for path, data in contents.items()
        ]

    asked = {"files": await asyncio.to_thread(read), "folders": list(folders), "room": room}
    await sandbox.call("put", asked, _CALL_S)


def _is_script(path: str) -> bool:
    return path.endswith(".sh")


def _of_text(text: str) -> Verdict:
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    return _verdict({"reward": reward}, "reward.txt")


def _of_json(text: str) -> Verdict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Verdict(0.0, why="reward.json is not JSON")
    return _verdict(found if isinstance(found, dict) else {"reward": found}, "reward.json")


def _verdict(found: Mapping[str, Any], name: str) -> Verdict:
    """Verdict from numbers by name: the number `reward` counts, or else the only number."""
    numbers = {
        well_formed(key[:80]): float(value)
        for key, value in found.items()
        if isinstance(value, int | float) and _fits(value)  # true counts as 1, as in Harbor
    }
    if len(numbers) < len(found) or not numbers:
        return Verdict(0.0, why=f"{name} holds values that are not finite numbers")
    if "reward" not in numbers and len(numbers) > 1:
        return Verdict(0.0, numbers, f"{name} has several numbers, but none named reward")
    return Verdict(numbers.get("reward", next(iter(numbers.values()))), numbers)


def _fits(value: float) -> bool:
    return abs(value) <= MAX_REWARD  # False for NaN
