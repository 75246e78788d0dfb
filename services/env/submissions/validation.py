"""What a submitted environment has to show before it may join a run: it loads, plays, repeats itself under a seed,
keeps its splits apart, gives finite rewards, and is quick enough. Everything runs where its episodes will.

The report names each check with what was seen, for its author to act on. Splits count as apart if no evaluation task
begins like a training task; an environment whose tasks all begin alike hides what differs, which is told as a warning.

A remote environment is somebody else's server: that it does not repeat itself, or draws the same task for two splits,
is told as a warning.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.env.backend import EnvironmentDescription, LiveEpisode, SubmittedBackend
from services.env.backends.harbor import COMMAND_S, GRADE_S, SOLVE_S, HarborBackend
from services.env.episode_types import EVAL, TRAIN, Message, StepResult, assistant, fingerprint
from services.env.submissions.record import Check, Report
from shared.errors import Unavailable, VolleyError

MAX_CALL_S = 5.0
"""Seconds that a reset or a step may take while it is validated."""
DEADLINE_S = 180.0
"""For all of it."""
PROVE_S = 180.0
"""Beyond that for the solutions of task folders: none is begun later."""
_PLAYED = {TRAIN: 6, EVAL: 3}
_OPENED, _MAX_STEPS, _AT_ONCE, _MAX_LOG = 32, 20, 2, 4000
_REPLIES: Sequence[Callable[[int], str]] = (
    lambda step: f"<answer>{step}</answer>",
    lambda step: "",
    lambda step: "I do not know. " * 200,
)
"""What a model might say that knows nothing of the task; a play takes one of them for all its steps."""


@dataclass(frozen=True, slots=True)
class _Play:
    """What one episode showed, in a form that can be compared."""

    opening: tuple[Message, ...]
    results: tuple[StepResult, ...]


@dataclass(slots=True)
class _Findings:
    checks: list[Check] = field(default_factory=list[Check])
    warnings: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    n_episodes: int = 0
    reset_s: float = 0.0
    step_s: float = 0.0

    def passed(self, name: str, detail: str) -> None:
        self.checks.append(Check(name=name, ok=True, detail=detail))

    def failed(self, name: str, detail: str, hint: str = "") -> None:
        self.checks.append(Check(name=name, ok=False, detail=detail, hint=hint))

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


@dataclass(frozen=True, slots=True)
class Validated:
    """`description` is None where the code does not load, or nothing answers."""

    report: Report
    description: EnvironmentDescription | None


type Open = Callable[[Mapping[str, int], bool], SubmittedBackend]
"""Makes the backend for splits of known sizes, and whether there are demonstrations."""


async def validate(open_backend: Open) -> Validated:
    """Never raises for what the code does. Raises Unavailable when no sandbox can be started."""
    findings, description = _Findings(), None
    backend, deadline_s = open_backend({}, False), DEADLINE_S
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            description = await _described(backend, findings)
            if description is not None:
                backend = open_backend(description.splits, description.has_demonstration)
                if isinstance(backend, HarborBackend):
                    deadline_s += proofs_s()
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                    await _solved(backend, findings)
                await _played(backend, findings)
    except TimeoutError:
        findings.failed("time", f"the validation was given up after {deadline_s:g} s", "make reset and step quicker")
    return Validated(findings.report(backend.log), description)


async def _described(backend: SubmittedBackend, findings: _Findings) -> EnvironmentDescription | None:
    check = "reachable" if backend.is_remote else "loads"
    try:
        description = await backend.describe()
    except VolleyError as error:
        _raise_if_ours(error, backend)
        findings.failed(check, error.detail, error.hint)
        return None
    findings.passed(check, ", ".join(filter(None, (description.entry, f"{description.protocol} protocol"))))
    sizes = ", ".join(f"{split}: {n}" for split, n in description.splits.items())
    if TRAIN not in description.splits:
        findings.failed("splits", f"there is no split {TRAIN!r} ({sizes or 'none at all'})", _SPLITS_HINT)
        return None
    findings.passed("splits", sizes)
    return description


_SPLITS_HINT = 'give the class splits = {"train": 1000, "eval": 100}: the number of tasks of each'


def proofs_s() -> float:
    """The most seconds that programs of task folders can take: solutions are tried, and some tasks played twice."""
    return PROVE_S + SOLVE_S + 2 * GRADE_S + 2 * sum(_PLAYED.values()) * GRADE_S / _AT_ONCE


async def _solved(backend: HarborBackend, findings: _Findings) -> None:
    """Whether each task's solution gives 1, and nothing less. Of more than there is time for some, drawn at random."""
    tasks = [(split, index) for split, n in sorted(backend.splits_of.items()) for index in range(n)]
    random.Random(0).shuffle(tasks)
    until = time.monotonic() + PROVE_S

    async def tried(number: int) -> bool:
        if number and time.monotonic() > until:
            return False
        await _prove(backend, *tasks[number])
        return True

    try:
        n = sum(await _gathered([lambda number=number: tried(number) for number in range(len(tasks))]))
    except _Failed as failed:
        findings.checks.append(failed.check)
        return
    if n < len(tasks):
        findings.warnings.append(f"the solutions of {n} of {len(tasks)} tasks were tried: there was no time for more")
    findings.passed("solutions", f"{n} solutions give 1, and nothing done gives less")


async def _prove(backend: HarborBackend, split: str, index: int) -> None:
    """Raises _Failed."""
    name = await backend.task(split, index)
    try:
        idle, solved = await backend.prove(split, index)
    except VolleyError as error:
        _raise_if_ours(error, backend)
        raise _Failed("solutions", f"{name}: {error.detail}", error.hint) from error
    if idle.why or idle.reward >= 1.0:
        told = idle.why or f"the tests give {idle.reward:g} where nothing was done"
        raise _Failed("solutions", f"{name}: {told}", "tests/test.sh must give less than 1 before the task is solved")
    if solved.why or solved.reward != 1.0:
        told = solved.why or f"the tests give {solved.reward:g} after solution/solve.sh"
        raise _Failed("solutions", f"{name}: {told}", _SOLUTION_HINT)


_SOLUTION_HINT = (
    "the log has what both scripts printed; a sandbox has bash, the programs of the machine's /usr, and no network"
)


async def _played(backend: SubmittedBackend, findings: _Findings) -> None:
    try:
        await _episodes(backend, findings)
        await _apart(backend, findings)
        if backend.has_demonstration:
            await _demonstrated(backend, findings)
    except _Failed as failed:
        findings.checks.append(failed.check)
        return
    slowest = max(findings.reset_s, findings.step_s)
    told = f"the slowest reset took {findings.reset_s:.3f} s, the slowest step {findings.step_s:.3f} s"
    most = COMMAND_S + GRADE_S if isinstance(backend, HarborBackend) else MAX_CALL_S
    if slowest > most:
        findings.failed("time", told, f"a call may take {most:g} s while it is validated")
    else:
        findings.passed("time", told)
    low, high = min(findings.rewards, default=0.0), max(findings.rewards, default=0.0)
    told = f"from {low:g} to {high:g} in {findings.n_episodes} episodes, all finite"
    if low == high and backend.has_demonstration:
        findings.warnings.append(f"every reward was {low:g}: where all answers are worth the same, nothing is learnt")
    elif low == high:
        told += "; the replies of the validation know nothing of the task, a demonstration would show more"
    findings.passed("rewards", told)


def _raise_if_ours(error: VolleyError, backend: SubmittedBackend) -> None:
    """Raises what says nothing of the environment: no sandbox is free, the package index does not answer."""
    if isinstance(error, Unavailable) and not backend.is_remote:
        raise error


class _Failed(Exception):
    def __init__(self, name: str, detail: str, hint: str = "") -> None:
        self.check = Check(name=name, ok=False, detail=detail, hint=hint)


async def _episodes(backend: SubmittedBackend, findings: _Findings) -> None:
    """Plays tasks of each split twice. Raises _Failed."""
    plays = [
        (split, index, _REPLIES[number % len(_REPLIES)])
        for split, most in _PLAYED.items()
        for number, index in enumerate(_spread(backend.splits_of.get(split, 0), most))
    ]

    async def both(split: str, index: int, reply: Callable[[int], str]) -> tuple[_Play, _Play]:
        return await _play(backend, findings, split, index, reply), await _play(backend, findings, split, index, reply)

    pairs = await _gathered([lambda play=play: both(*play) for play in plays])
    differ = [f"{split}/{index} {_difference(*pair)}" for (split, index, _), pair in _differing(plays, pairs, backend)]
    if differ and not backend.is_remote:
        raise _Failed("determinism", differ[0], _SEED_HINT)
    steps = sum(len(play.results) for pair in pairs for play in pair)
    if not any(play.results and play.results[-1].over for pair in pairs for play in pair):
        findings.warnings.append(f"no episode ended within {_MAX_STEPS} steps; the run's max_turns will end them")
    findings.passed("episodes", f"{2 * len(pairs)} episodes of {steps} steps, none failed")
    told = f"{len(pairs) - len(differ)} of {len(pairs)} tasks gave the same when they were played twice"
    if differ:
        findings.warnings.append(f"the server does not repeat itself: {told}; {differ[0]}. {_REMOTE_SEEDS}")
    else:
        findings.passed("determinism", f"{told} under the same seed")


_REMOTE_SEEDS = "Episodes of one group may then be of different tasks, and no episode can be played again"
_SEED_HINT = "draw what is random from random.Random(...) seeded by split, index and seed; no clocks, no global state"


type _Planned = tuple[str, int, Callable[[int], str]]


def _differing(
    plays: Sequence[_Planned], pairs: Sequence[tuple[_Play, _Play]], backend: SubmittedBackend
) -> list[tuple[_Planned, tuple[_Play, _Play]]]:
    """Those whose two plays differ; of a remote environment, in what reaches the model or the trainer."""
    return [
        (play, (one, two))
        for play, (one, two) in zip(plays, pairs, strict=True)
        if (_seen(one) != _seen(two) if backend.is_remote else one != two)
    ]


def _seen(play: _Play) -> tuple[object, ...]:
    results = ((step.messages, step.reward, step.over, step.info.success) for step in play.results)
    return (play.opening, *results)


def _difference(one: _Play, two: _Play) -> str:
    if one.opening != two.opening:
        return "began differently when it was reset again with the same seed"
    n = next((i for i, (a, b) in enumerate(zip(one.results, two.results, strict=False)) if a != b), -1)
    return (
        f"answered step {n} differently under the same seed" if n >= 0 else "ended at another step under the same seed"
    )


async def _apart(backend: SubmittedBackend, findings: _Findings) -> None:
    """Raises _Failed where an evaluation task begins like a training task."""
    wanted = [(split, index) for split in _PLAYED for index in _spread(backend.splits_of.get(split, 0), _OPENED)]

    async def opening(split: str, index: int) -> str:
        episode = await _timed_reset(backend, findings, split, index)
        await episode.close()
        return "".join(fingerprint(message) for message in episode.opening)

    digests = await _gathered([lambda task=task: opening(*task) for task in wanted])
    seen = {digest: task for task, digest in zip(wanted, digests, strict=True) if task[0] == TRAIN}
    held_out = [(task, digest) for task, digest in zip(wanted, digests, strict=True) if task[0] == EVAL]
    if not held_out:
        findings.warnings.append(f"there is no split {EVAL!r}: nothing tells whether what is learnt carries over")
        return
    if len(seen) == 1 and len(wanted) > 2 and all(digest in seen for _, digest in held_out):
        findings.warnings.append("all tasks begin with the same messages, so whether splits overlap cannot be seen")
        return
    for (split, index), digest in held_out:
        if digest in seen:
            told = f"{split}/{index} begins exactly like {seen[digest][0]}/{seen[digest][1]}"
            if backend.is_remote:
                findings.warnings.append(f"{told}: evaluation may be of tasks that were trained on")
                return
            hint = "make tasks from (split, index) such that no evaluation task is a training task"
            raise _Failed("disjoint splits", told, hint)
    findings.passed("disjoint splits", f"{len(held_out)} evaluation tasks begin like none of {len(wanted)} looked at")


async def _demonstrated(backend: SubmittedBackend, findings: _Findings) -> None:
    """Raises _Failed where a demonstration does not show what it says."""
    for split in _PLAYED:
        for index in _spread(backend.splits_of.get(split, 0), 2):
            try:
                shown = await backend.demonstration(split, index)
            except VolleyError as error:
                _raise_if_ours(error, backend)
                raise _Failed("demonstrations", f"{split}/{index}: {error.detail}", error.hint) from error
            says = [message["content"] for message in shown.messages if message["role"] == "assistant"]
            play = await _play(backend, findings, split, index, lambda step, says=says: says[step], len(says))
            solved = bool(play.results) and play.results[-1].info.success
            if solved != shown.success:
                told = "solves its task" if shown.success else "does not solve its task"
                raise _Failed(
                    "demonstrations",
                    f"the demonstration of {split}/{index} says that it {told}, played it does not hold",
                    "its assistant messages, given to step one by one, must end with info['success'] as it says",
                )
    findings.passed("demonstrations", "played to the end they promise")


async def _play(
    backend: SubmittedBackend,
    findings: _Findings,
    split: str,
    index: int,
    reply: Callable[[int], str],
    max_steps: int = _MAX_STEPS,
) -> _Play:
    episode = await _timed_reset(backend, findings, split, index)
    results: list[StepResult] = []
    try:
        while len(results) < max_steps and not (results and results[-1].over):
            began = time.perf_counter()
            results.append(await episode.step(assistant(reply(len(results)))))
            findings.step_s = max(findings.step_s, time.perf_counter() - began)
    except VolleyError as error:
        _raise_if_ours(error, backend)
        raise _Failed("episodes", f"{split}/{index}, step {len(results)}: {error.detail}", error.hint) from error
    finally:
        await episode.close()
    findings.n_episodes += 1
    findings.rewards += [result.reward for result in results]
    return _Play(episode.opening, tuple(results))


async def _timed_reset(backend: SubmittedBackend, findings: _Findings, split: str, index: int) -> LiveEpisode:
    began = time.perf_counter()
    try:
        return await backend.reset(split, index, index)
    except VolleyError as error:
        _raise_if_ours(error, backend)
        raise _Failed("episodes", f"{split}/{index}, reset: {error.detail}", error.hint) from error
    finally:
        findings.reset_s = max(findings.reset_s, time.perf_counter() - began)


async def _gathered[T](calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """The results in order, a few at once. Raises _Failed or Unavailable: the first of them."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with slots:
            return await call()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
    except* (_Failed, Unavailable) as errors:
        failed = next(error for error in errors.exceptions if not isinstance(error, BaseExceptionGroup))
    else:
        return [task.result() for task in tasks]
    raise failed


def _spread(n_tasks: int, most: int) -> list[int]:
    """At most `most` indices, from the first to the last."""
    return sorted({i * (n_tasks - 1) // max(1, min(most, n_tasks) - 1) for i in range(min(most, n_tasks))})
