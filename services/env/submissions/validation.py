"""Validation of a submitted environment before it may join a run.

The environment must load, play, repeat its episodes under a seed, keep its splits apart, give finite rewards, and be
quick enough. Everything runs as its episodes will. The report names each check and its result, for the author to act
on.

Splits count as disjoint if no evaluation task begins like a training task; if all tasks begin alike, this cannot be
seen, which gives a warning. A remote environment runs on another server, so irreproducible episodes, or one task in two
splits, give warnings only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.env.agents.backend import AgentBackend
from services.env.agents.trial import Trial, try_agent
from services.env.backend import EnvironmentDescription, LiveEpisode, SubmittedBackend
from services.env.backends.harbor import COMMAND_S, GRADE_S, SOLVE_S, HarborBackend
from services.env.episode_types import EVAL, TRAIN, Message, StepResult, assistant, fingerprint
from services.env.submissions.record import Check, Report
from shared.errors import Unavailable, VolleyError

MAX_CALL_S = 5.0
"""Seconds that a reset or a step may take during validation."""
DEADLINE_S = 180.0
"""Seconds for the whole validation."""
PROVE_S = 180.0
"""Additional seconds for the solutions of task folders; none is started later."""
TRIALS_S = 120.0
"""Additional seconds for programs of agents."""
_PLAYED = {TRAIN: 6, EVAL: 3}
_TRIED = {TRAIN: 2, EVAL: 1}
_OPENED, _MAX_STEPS, _AT_ONCE, _MAX_LOG = 32, 20, 2, 4000
_REPLIES: Sequence[Callable[[int], str]] = (
    lambda step: f"<answer>{step}</answer>",
    lambda step: "",
    lambda step: "I do not know. " * 200,
)
"""Replies of a model that knows nothing of the task; an episode uses one of them for all its steps."""


@dataclass(frozen=True, slots=True)
class _Play:
    """Results of one episode, for comparison."""

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
    """`description` is None if the code does not load or nothing answers."""

    report: Report
    description: EnvironmentDescription | None


type Open = Callable[[EnvironmentDescription | None], SubmittedBackend]
"""Builds the backend, given the environment's description of itself once it is known."""


async def validate(open_backend: Open) -> Validated:
    """Validate an environment. Its failures are findings; raises Unavailable if no sandbox can be started."""
    findings, description = _Findings(), None
    backend, deadline_s = open_backend(None), DEADLINE_S
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            description = await _check_loading(backend, findings)
            if description is not None:
                backend = open_backend(description)
                if isinstance(backend, HarborBackend):
                    deadline_s += proofs_s()
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                    await _check_solutions(backend, findings)
                if isinstance(backend, AgentBackend):
                    deadline_s += TRIALS_S
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                await _check_play(backend, findings)
    except TimeoutError:
        findings.failed("time", f"the validation was given up after {deadline_s:g} s", "make reset and step quicker")
    return Validated(findings.report(backend.log), description)


async def _check_loading(backend: SubmittedBackend, findings: _Findings) -> EnvironmentDescription | None:
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
    """Longest time for programs of task folders, in seconds: solutions are tried, and some tasks played twice."""
    return PROVE_S + SOLVE_S + 2 * GRADE_S + 2 * sum(_PLAYED.values()) * GRADE_S / _AT_ONCE


async def _check_solutions(backend: HarborBackend, findings: _Findings) -> None:
    """Check that each task's solution gives 1 and an idle episode less. If time is short, checks a random sample."""
    tasks = [(split, index) for split, n in sorted(backend.splits_of.items()) for index in range(n)]
    random.Random(0).shuffle(tasks)
    until = time.monotonic() + PROVE_S

    async def tried(number: int) -> bool:
        if number and time.monotonic() > until:
            return False
        await _check_solution(backend, *tasks[number])
        return True

    try:
        n = sum(await _gathered([lambda number=number: tried(number) for number in range(len(tasks))]))
    except _Failed as failed:
        findings.checks.append(failed.check)
        return
    if n < len(tasks):
        findings.warnings.append(f"the solutions of {n} of {len(tasks)} tasks were tried; there was no time for more")
    findings.passed("solutions", f"{n} solutions give 1, and idle episodes less")


async def _check_solution(backend: HarborBackend, split: str, index: int) -> None:
    """Check one task's solution. Raises _Failed."""
    name = await backend.task(split, index)
    try:
        idle, solved = await backend.prove(split, index)
    except VolleyError as error:
        _raise_if_ours(error, backend)
        raise _Failed("solutions", f"{name}: {error.detail}", error.hint) from error
    if idle.why or idle.reward >= 1.0:
        fault = idle.why or f"the tests give {idle.reward:g} after an idle episode"
        raise _Failed("solutions", f"{name}: {fault}", "tests/test.sh must give less than 1 before the task is solved")
    if solved.why or solved.reward != 1.0:
        fault = solved.why or f"the tests give {solved.reward:g} after solution/solve.sh"
        raise _Failed("solutions", f"{name}: {fault}", _SOLUTION_HINT)


_SOLUTION_HINT = (
    "see the output of both scripts in the log; a sandbox has bash, the programs of the machine's /usr, and no network"
)


async def _check_play(backend: SubmittedBackend, findings: _Findings) -> None:
    try:
        if isinstance(backend, AgentBackend):
            await _check_agent(backend, findings)
        else:
            await _check_episodes(backend, findings)
        await _check_disjoint_splits(backend, findings)
        if backend.has_demonstration and not isinstance(backend, AgentBackend):
            await _check_demonstrations(backend, findings)
    except _Failed as failed:
        findings.checks.append(failed.check)
        return
    slowest = max(findings.reset_s, findings.step_s)
    summary = f"the slowest reset took {findings.reset_s:.3f} s, the slowest step {findings.step_s:.3f} s"
    most = COMMAND_S + GRADE_S if isinstance(backend, HarborBackend | AgentBackend) else MAX_CALL_S
    if slowest > most:
        findings.failed("time", summary, f"a call may take {most:g} s while it is validated")
    else:
        findings.passed("time", summary)
    low, high = min(findings.rewards, default=0.0), max(findings.rewards, default=0.0)
    summary = f"from {low:g} to {high:g} in {findings.n_episodes} episodes, all finite"
    if low == high and backend.has_demonstration:
        findings.warnings.append(f"every reward was {low:g}: if all answers get the same reward, nothing is learnt")
    elif low == high:
        summary += "; the replies of the validation know nothing of the task, a demonstration would show more"
    findings.passed("rewards", summary)


def _raise_if_ours(error: VolleyError, backend: SubmittedBackend) -> None:
    """Raise errors that are not the environment's: no free sandbox, or no answer from the package index."""
    if isinstance(error, Unavailable) and not backend.is_remote:
        raise error


class _Failed(Exception):
    def __init__(self, name: str, detail: str, hint: str = "") -> None:
        self.check = Check(name=name, ok=False, detail=detail, hint=hint)


async def _check_episodes(backend: SubmittedBackend, findings: _Findings) -> None:
    """Play tasks of each split twice. Raises _Failed."""
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
    summary = f"{len(pairs) - len(differ)} of {len(pairs)} tasks gave equal results when played twice"
    if differ:
        findings.warnings.append(f"the server is not reproducible: {summary}; {differ[0]}. {_REMOTE_SEEDS}")
    else:
        findings.passed("determinism", f"{summary} under the same seed")


_REMOTE_SEEDS = "Episodes of one group may then have different tasks, and no episode can be replayed"
_SEED_HINT = "draw what is random from random.Random(...) seeded by split, index and seed; no clocks, no global state"


type _Planned = tuple[str, int, Callable[[int], str]]


def _differing(
    plays: Sequence[_Planned], pairs: Sequence[tuple[_Play, _Play]], backend: SubmittedBackend
) -> list[tuple[_Planned, tuple[_Play, _Play]]]:
    """Tasks whose two plays differ; for a remote environment, in data that reaches the model or the trainer."""
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


async def _check_agent(backend: AgentBackend, findings: _Findings) -> None:
    """Begin tasks twice, and try the program with a model that knows the demonstrations only. Raises _Failed."""
    tasks = [(split, index) for split, n in _TRIED.items() for index in _spread(backend.splits_of.get(split, 0), n)]

    async def both(split: str, index: int) -> bool:
        played = [await _timed_reset(backend, findings, split, index) for _ in range(2)]
        for one in played:
            await one.close()
        return played[0].opening == played[1].opening

    same = await _gathered([lambda task=task: both(*task) for task in tasks])
    if not all(same):
        split, index = tasks[same.index(False)]
        raise _Failed("determinism", f"{split}/{index} began differently when it was reset again", _SEED_HINT)
    findings.passed("determinism", f"{len(tasks)} tasks began equally when reset twice")
    trials = await _gathered([lambda task=task: _tried(backend, *task) for task in tasks])
    findings.n_episodes += len(trials)
    findings.rewards += [trial.reward for trial in trials if trial.reward is not None]
    for name, trial in zip(tasks, trials, strict=True):
        if trial.fault:
            raise _Failed("agent", f"{name[0]}/{name[1]}: {trial.fault}", trial.hint)
    findings.warnings += [
        f"{split}/{index}: {t.note}" for (split, index), t in zip(tasks, trials, strict=True) if t.note
    ]
    findings.passed("agent", "; ".join(f"{split}/{i}: {t.told}" for (split, i), t in zip(tasks, trials, strict=True)))


async def _tried(backend: AgentBackend, split: str, index: int) -> Trial:
    """Raises _Failed."""
    try:
        return await try_agent(backend, split, index)
    except VolleyError as error:
        _raise_if_ours(error, backend)
        raise _Failed("agent", f"{split}/{index}: {error.detail}", error.hint) from error


async def _check_disjoint_splits(backend: SubmittedBackend, findings: _Findings) -> None:
    """Check that no evaluation task begins like a training task. Raises _Failed."""
    wanted = [(split, index) for split in _PLAYED for index in _spread(backend.splits_of.get(split, 0), _OPENED)]

    async def opening(split: str, index: int) -> str:
        episode = await _timed_reset(backend, findings, split, index)
        await episode.close()
        return "".join(fingerprint(message) for message in episode.opening)

    digests = await _gathered([lambda task=task: opening(*task) for task in wanted])
    seen = {digest: task for task, digest in zip(wanted, digests, strict=True) if task[0] == TRAIN}
    held_out = [(task, digest) for task, digest in zip(wanted, digests, strict=True) if task[0] == EVAL]
    if not held_out:
        findings.warnings.append(f"there is no split {EVAL!r}: generalization cannot be evaluated")
        return
    if len(seen) == 1 and len(wanted) > 2 and all(digest in seen for _, digest in held_out):
        findings.warnings.append("all tasks begin with the same messages, so whether splits overlap cannot be seen")
        return
    for (split, index), digest in held_out:
        if digest in seen:
            summary = f"{split}/{index} begins exactly like {seen[digest][0]}/{seen[digest][1]}"
            if backend.is_remote:
                findings.warnings.append(f"{summary}: evaluation may include training tasks")
                return
            hint = "make tasks from (split, index) such that no evaluation task is a training task"
            raise _Failed("disjoint splits", summary, hint)
    findings.passed(
        "disjoint splits", f"{len(held_out)} evaluation tasks of {len(wanted)} opened tasks overlap no training task"
    )


async def _check_demonstrations(backend: SubmittedBackend, findings: _Findings) -> None:
    """Check that demonstrations end as they promise. Raises _Failed."""
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
                summary = "solves its task" if shown.success else "does not solve its task"
                raise _Failed(
                    "demonstrations",
                    f"the demonstration of {split}/{index} says that it {summary}, but playing it gives the opposite",
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
    """Run calls, a few at once, and return their results in order. Raises the first _Failed or Unavailable."""
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
    """At most `most` indices, evenly spaced from the first to the last."""
    return sorted({i * (n_tasks - 1) // max(1, min(most, n_tasks) - 1) for i in range(min(most, n_tasks))})
