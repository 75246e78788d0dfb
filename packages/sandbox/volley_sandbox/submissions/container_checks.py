"""Validation of task folders that run in containers: their solutions are judged, and one task is played."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from services.env.episode_types import TRAIN, Message, StepResult, assistant
from shared.errors import Busy, VolleyError
from volley_sandbox.backends.harbor import HarborBackend
from volley_sandbox.submissions.findings import Failed, Findings, gathered, raise_if_ours

PROVE_S = 600.0
"""Seconds for the solutions; none is started later."""
CONTAINERS_S = 1800.0
"""Additional seconds for a validation with containers: images may have to be built."""
_COMMAND = {"id": "call", "type": "function", "function": {"name": "bash", "arguments": '{"command": "pwd"}'}}


async def check_containers(backend: HarborBackend, findings: Findings) -> None:
    """Check each task's solution, or a random sample if time is short, and play a task. Raises Failed."""
    tasks = [(split, index) for split, n in sorted(backend.splits_of.items()) for index in range(n)]
    random.Random(0).shuffle(tasks)
    until = time.monotonic() + PROVE_S

    async def tried(number: int) -> bool:
        if number and time.monotonic() > until:
            return False
        await _check_solution(backend, *tasks[number])
        return True

    n = sum(await gathered([lambda number=number: tried(number) for number in range(len(tasks))]))
    if n < len(tasks):
        findings.warnings.append(f"the solutions of {n} of {len(tasks)} tasks were tried; there was no time for more")
    findings.passed("solutions", f"{n} solutions give 1, and idle episodes less")
    await _play(backend, findings)


async def _check_solution(backend: HarborBackend, split: str, index: int) -> None:
    """Check one task's solution. Raises Failed."""
    name = await backend.task(split, index)
    try:
        idle = await _repeated(lambda: backend.prove(split, index, solve=False))
        solved = await _repeated(lambda: backend.prove(split, index, solve=True))
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("solutions", f"{name}: {error.detail}", _LOST_HINT) from error
    if why := idle.why or solved.why:
        when = "after an idle episode" if idle.why else "after the solution"
        raise Failed("solutions", f"{name}: {when}: {why}", "see the output of solution and tests in the log")
    if idle.reward >= 1.0:
        fault = f"the tests give {idle.reward:g} after an idle episode"
        raise Failed("solutions", f"{name}: {fault}", "the tests must give less than 1 before the task is solved")
    if solved.reward != 1.0:
        raise Failed("solutions", f"{name}: the tests give {solved.reward:g} after the solution", _SOLUTION_HINT)


_LOST_HINT = "see task.toml and environment/ of the task; if they are not the cause, test it again"
_SOLUTION_HINT = (
    "see the output of solution and tests in the log; a task has a network only if its task.toml asks for one "
    '(environment.network_mode = "public"), or with services.env.harbor.network=public'
)


async def _play(backend: HarborBackend, findings: Findings) -> None:
    """Play one task: a command, then the end. Raises Failed."""
    began = time.perf_counter()
    try:
        episode = await _repeated(lambda: backend.reset(TRAIN, 0, 0))
        findings.reset_s = time.perf_counter() - began
        try:
            call = Message(role="assistant", content="", tool_calls=[_COMMAND])
            first = await _repeated(lambda: episode.step(call))
            last = first if first.over else await _to_end(lambda: episode.step(assistant("I am done.")))
        finally:
            await episode.close()
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("episodes", f"{TRAIN}/0: {error.detail}", _LOST_HINT) from error
    findings.n_episodes += 1
    findings.rewards.append(last.reward)
    findings.passed("episodes", f"one episode with a command, judged after {time.perf_counter() - began:.1f} s")


async def _to_end(step: Callable[[], Awaitable[StepResult]]) -> StepResult:
    """Repeat a step until the episode is over: a task may have several."""
    while not (result := await _repeated(step)).over:
        pass
    return result


async def _repeated[T](call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until the container has answered it."""
    while True:
        try:
            return await call()
        except Busy as busy:
            await asyncio.sleep(busy.retry_after_s)
