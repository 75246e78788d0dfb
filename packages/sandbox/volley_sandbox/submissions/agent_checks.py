"""Validation of an agent: its program is tried with a scripted model."""

from __future__ import annotations

from collections.abc import Sequence

from services.env.episode_types import EVAL, TRAIN, Message
from shared.errors import VolleyError
from volley_sandbox.agents.backend import AgentBackend
from volley_sandbox.agents.trial import Trial, try_agent
from volley_sandbox.submissions.findings import SEED_HINT, Failed, Findings, gathered, raise_if_ours, spread

_TRIED = {TRAIN: 1, EVAL: 1}


async def check_agent(backend: AgentBackend, findings: Findings) -> None:
    """Try the program with a model that knows the demonstrations only, and begin its tasks again. Raises Failed."""
    tasks = [(split, index) for split, n in _TRIED.items() for index in spread(backend.splits_of.get(split, 0), n)]
    trials = await gathered([lambda task=task: _tried(backend, findings, *task) for task in tasks])
    findings.n_episodes += len(trials)
    findings.rewards += [trial.reward for trial in trials if trial.reward is not None]
    named = [(f"{split}/{index}", trial) for (split, index), trial in zip(tasks, trials, strict=True)]
    for name, trial in named:
        if trial.fault:
            raise Failed("agent", f"{name}: {trial.fault}", trial.hint)
        if trial.note:
            findings.warnings.append(f"{name}: {trial.note}")
    again = await openings_of(backend, tasks)
    for (name, trial), opening in zip(named, again, strict=True):
        if trial.opening != opening:
            raise Failed("determinism", f"{name} began differently when it was reset again", SEED_HINT)
    findings.passed("agent", "; ".join(f"{name}: {trial.outcome}" for name, trial in named))
    findings.passed("determinism", f"{len(tasks)} tasks began equally when reset twice")


async def _tried(backend: AgentBackend, findings: Findings, split: str, index: int) -> Trial:
    """Raises Failed."""
    try:
        trial = await try_agent(backend, split, index)
        findings.reset_s = max(findings.reset_s, trial.reset_s)
        return trial
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("agent", f"{split}/{index}: {error.detail}", error.hint) from error


async def openings_of(backend: AgentBackend, tasks: Sequence[tuple[str, int]]) -> Sequence[tuple[Message, ...]]:
    """Raises Failed."""
    try:
        return await backend.openings(tasks)
    except VolleyError as error:
        raise_if_ours(error, backend)
        raise Failed("episodes", f"reset: {error.detail}", error.hint) from error
