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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.env.backend import LiveEpisode, is_restorable, restore
from services.env.episode_types import EVAL, TRAIN, Message, StepResult, assistant, fingerprint, user
from shared.errors import VolleyError
from volley_sandbox.agents.backend import START_S, AgentBackend
from volley_sandbox.backends.harbor import HarborBackend
from volley_sandbox.backends.submitted import EnvironmentDescription, SubmittedBackend
from volley_sandbox.submissions.agent_checks import check_agent, openings_of
from volley_sandbox.submissions.container_checks import CONTAINERS_S, check_containers
from volley_sandbox.submissions.findings import Failed, Findings, gathered, raise_if_ours, spread
from volley_sandbox.submissions.record import Check, Report

MAX_CALL_S = 15.0
"""Seconds that a reset or a step may take during validation."""
DEADLINE_S = 180.0
"""Seconds for the whole validation."""
TRIALS_S = 120.0
"""Additional seconds for programs of agents."""
_PLAYED = {TRAIN: 6, EVAL: 3}
_OPENED, _MAX_STEPS = 32, 20
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


@dataclass(frozen=True, slots=True)
class Validated:
    """`description` is None if the code does not load or nothing answers."""

    report: Report
    description: EnvironmentDescription | None


type Open = Callable[[EnvironmentDescription | None], SubmittedBackend]
"""Builds the backend, given the environment's description of itself once it is known."""


async def validate(open_backend: Open, on_check: Callable[[Check], None] = lambda check: None) -> Validated:
    """Validate an environment. Its failures are findings; raises Unavailable if no sandbox can be started.

    `on_check` is called with each check as it ends.
    """
    findings, description = Findings(on_check), None
    backend, deadline_s = open_backend(None), DEADLINE_S
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            description = await _check_loading(backend, findings)
            if description is not None:
                backend = open_backend(description)
                if isinstance(backend, HarborBackend):
                    deadline_s += CONTAINERS_S
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                if isinstance(backend, AgentBackend):
                    deadline_s += TRIALS_S
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
                await _check_play(backend, findings)
    except TimeoutError:
        findings.failed("time", f"the validation was given up after {deadline_s:g} s", "make reset and step quicker")
    return Validated(findings.report(backend.log), description)


async def _check_loading(backend: SubmittedBackend, findings: Findings) -> EnvironmentDescription | None:
    check = "reachable" if backend.is_remote else "loads"
    try:
        description = await backend.describe()
    except VolleyError as error:
        raise_if_ours(error, backend)
        hint = next((hint for mark, hint in _LOADING_HINTS.items() if mark in error.detail), "")
        findings.failed(check, error.detail, error.hint or hint)
        return None
    findings.passed(check, ", ".join(filter(None, (description.entry, f"{description.protocol} protocol"))))
    sizes = ", ".join(f"{split}: {n}" for split, n in description.splits.items())
    if TRAIN not in description.splits:
        findings.failed("splits", f"there is no split {TRAIN!r} ({sizes or 'none at all'})", _SPLITS_HINT)
        return None
    findings.passed("splits", sizes)
    return description


_LOADING_HINTS = {
    "FileNotFoundError": "put file and data in one folder, name that folder, and open data beside Path(__file__)",
    "ModuleNotFoundError": "declare a package in the file's `# /// script` block; for a module of your own, name the"
    " folder that holds it and the file",
    "no class has the methods": "an agent is a class too: `volley env init FILE.py --template agent` shows one",
}
_SPLITS_HINT = 'give the class splits = {"train": 1000, "eval": 100}: the number of tasks of each'


async def _check_play(backend: SubmittedBackend, findings: Findings) -> None:
    try:
        if isinstance(backend, AgentBackend):
            await check_agent(backend, findings)
        elif isinstance(backend, HarborBackend):
            await check_containers(backend, findings)
        else:
            await _check_episodes(backend, findings)
        await _check_disjoint_splits(backend, findings)
        if backend.has_demonstration and not isinstance(backend, AgentBackend):
            await _check_demonstrations(backend, findings)
    except Failed as failed:
        findings.add(failed.check)
        return
    slowest = max(findings.reset_s, findings.step_s)
    summary = f"the slowest reset took {findings.reset_s:.3f} s"
    if not isinstance(backend, AgentBackend | HarborBackend):
        summary += f", the slowest step {findings.step_s:.3f} s"
    most = START_S if isinstance(backend, AgentBackend) else MAX_CALL_S
    if slowest > most:
        findings.failed("time", summary, f"a call may take {most:g} s while it is validated")
    else:
        findings.passed("time", summary)
    low, high = min(findings.rewards, default=0.0), max(findings.rewards, default=0.0)
    summary = f"from {low:g} to {high:g} in {findings.n_episodes} episodes, all finite"
    if low == high and not backend.has_demonstration:
        summary += "; the test replies ignore the task: only a demonstration shows the reward of a good answer"
    elif low == high and isinstance(backend, AgentBackend):
        summary += "; the model's answers were those of the demonstrations"
    elif low == high:
        findings.warnings.append(f"every reward was {low:g}: if all answers get the same reward, nothing is learnt")
    findings.passed("rewards", summary)


async def _check_episodes(backend: SubmittedBackend, findings: Findings) -> None:
    """Play tasks of each split twice, the second time from snapshots if there are any. Raises Failed."""
    plays = [
        (split, index, _REPLIES[number % len(_REPLIES)])
        for split, most in _PLAYED.items()
        for number, index in enumerate(spread(backend.splits_of.get(split, 0), most))
    ]

    async def both(split: str, index: int, reply: Callable[[int], str]) -> tuple[_Play, _Play]:
        first = await _play(backend, findings, split, index, reply)
        return first, await _play(backend, findings, split, index, reply, restores=True)

    pairs = await gathered([lambda play=play: both(*play) for play in plays])
    differ = [f"{split}/{index} {_difference(*pair)}" for (split, index, _), pair in _differing(plays, pairs, backend)]
    if differ and not backend.is_remote:
        raise Failed("determinism", differ[0], _SEED_HINT + (_RESTORE_HINT if _has_snapshots(pairs) else ""))
    steps = sum(len(play.results) for pair in pairs for play in pair)
    if not any(play.results and play.results[-1].over for pair in pairs for play in pair):
        findings.warnings.append(f"no episode ended within {_MAX_STEPS} steps; the run's max_turns will end them")
    findings.passed("episodes", f"{2 * len(pairs)} episodes of {steps} steps, none failed")
    summary = f"{len(pairs) - len(differ)} of {len(pairs)} tasks gave equal results when played twice"
    if differ:
        findings.warnings.append(f"the server is not reproducible: {summary}; {differ[0]}. {_REMOTE_SEEDS}")
    else:
        restored = ", the second time from snapshots" if _has_snapshots(pairs) else ""
        findings.passed("determinism", f"{summary} under the same seed{restored}")


_REMOTE_SEEDS = "Episodes of one group may then have different tasks, and no episode can be replayed"
_SEED_HINT = "draw what is random from random.Random(...) seeded by split, index and seed; no clocks, no global state"

_RESTORE_HINT = "; restore(snapshot) must go on where snapshot() was called"


def _has_snapshots(pairs: Sequence[tuple[_Play, _Play]]) -> bool:
    return any("snapshot" in result.info.extra for one, _ in pairs for result in one.results)


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


async def _check_disjoint_splits(backend: SubmittedBackend, findings: Findings) -> None:
    """Check that no evaluation task begins like a training task. Raises Failed."""
    wanted = [(split, index) for split in _PLAYED for index in spread(backend.splits_of.get(split, 0), _OPENED)]

    async def opening(split: str, index: int) -> tuple[Message, ...]:
        episode = await _timed_reset(backend, findings, split, index)
        await episode.close()
        return episode.opening

    if isinstance(backend, AgentBackend):
        openings = await openings_of(backend, wanted)
    elif isinstance(backend, HarborBackend):
        openings = [(user(await backend.beginning(*task)),) for task in wanted]
    else:
        openings = await gathered([lambda task=task: opening(*task) for task in wanted])
    digests = ["".join(map(fingerprint, messages)) for messages in openings]
    seen = {digest: task for task, digest in zip(wanted, digests, strict=True) if task[0] == TRAIN}
    held_out = [(task, digest) for task, digest in zip(wanted, digests, strict=True) if task[0] == EVAL]
    if not held_out:
        findings.warnings.append(f"there is no split {EVAL!r}: generalization cannot be evaluated")
        return
    if len(seen) == 1 < len(wanted) - len(held_out) and any(digest in seen for _, digest in held_out):
        findings.warnings.append(
            "all training tasks begin with the same messages, so whether splits overlap cannot be seen"
        )
        return
    for (split, index), digest in held_out:
        if digest in seen:
            summary = f"{split}/{index} begins exactly like {seen[digest][0]}/{seen[digest][1]}"
            hint = "make tasks from (split, index) such that no evaluation task is a training task"
            if isinstance(backend, HarborBackend):
                one, two = await backend.task(split, index), await backend.task(*seen[digest])
                summary = f"{one} has the instruction, the environment and the task.toml of {two}"
                hint = "take it out of eval/, or take the other one away"
            if backend.is_remote:
                findings.warnings.append(f"{summary}: evaluation may include training tasks")
                return
            raise Failed("disjoint splits", summary, hint)
    findings.passed(
        "disjoint splits", f"{len(held_out)} evaluation tasks of {len(wanted)} opened tasks overlap no training task"
    )


async def _check_demonstrations(backend: SubmittedBackend, findings: Findings) -> None:
    """Check that demonstrations end as they promise. Raises Failed."""
    for split in _PLAYED:
        for index in spread(backend.splits_of.get(split, 0), 2):
            try:
                shown = await backend.demonstration(split, index)
            except VolleyError as error:
                raise_if_ours(error, backend)
                raise Failed("demonstrations", f"{split}/{index}: {error.detail}", error.hint) from error
            says = [message["content"] for message in shown.messages if message["role"] == "assistant"]
            play = await _play(backend, findings, split, index, lambda step, says=says: says[step], len(says))
            solved = bool(play.results) and play.results[-1].info.success
            if solved != shown.success:
                summary = "solves its task" if shown.success else "does not solve its task"
                raise Failed(
                    "demonstrations",
                    f"the demonstration of {split}/{index} says that it {summary}, but playing it gives the opposite",
                    "its assistant messages, given to step one by one, must end with info['success'] as it says",
                )
    findings.passed("demonstrations", "played to the end they promise")


async def _play(
    backend: SubmittedBackend,
    findings: Findings,
    split: str,
    index: int,
    reply: Callable[[int], str],
    max_steps: int = _MAX_STEPS,
    *,
    restores: bool = False,
) -> _Play:
    """Play one episode; with `restores` others go on from its snapshots after steps 1, 2, 4, 8 and 16."""
    episode = await _timed_reset(backend, findings, split, index)
    opening = episode.opening
    results: list[StepResult] = []
    try:
        while len(results) < max_steps and not (results and results[-1].over):
            if restores and len(results).bit_count() == 1 and is_restorable(episode):
                await episode.close()
                episode = await backend.reset(split, index, index)
                await restore(f"{split}/{index}", episode, results[-1].info.extra["snapshot"])
            began = time.perf_counter()
            results.append(await episode.step(assistant(reply(len(results)))))
            findings.step_s = max(findings.step_s, time.perf_counter() - began)
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("episodes", f"{split}/{index}, step {len(results)}: {error.detail}", error.hint) from error
    finally:
        await episode.close()
    findings.n_episodes += 1
    findings.rewards += [result.reward for result in results]
    return _Play(opening, tuple(results))


async def _timed_reset(backend: SubmittedBackend, findings: Findings, split: str, index: int) -> LiveEpisode:
    began = time.perf_counter()
    try:
        return await backend.reset(split, index, index)
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("episodes", f"{split}/{index}, reset: {error.detail}", error.hint) from error
    finally:
        findings.reset_s = max(findings.reset_s, time.perf_counter() - began)
