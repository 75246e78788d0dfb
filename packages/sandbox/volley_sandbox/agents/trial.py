"""Trial of an agent: its program with a scripted model, and its judgement.

The scripted model gives the assistant messages of the task's demonstration, one for each request. Without a
demonstration it calls the first tool that it is offered, and then knows nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from services.env.backend import ModelAddress
from services.env.episode_types import Demonstration, Message
from volley_sandbox.agents.backend import AgentBackend, AgentEpisode

TRIAL_S = 40.0
"""Seconds that a program may take in a trial."""
_ADDRESS = ModelAddress("", "sess-trial", "scripted")
_CALLS_HINT = "the program must call the model at OPENAI_BASE_URL, or at the base_url that run gets"


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial: what happened, and the `fault` for which the agent is refused."""

    opening: tuple[Message, ...]
    outcome: str
    reward: float | None = None
    fault: str = ""
    hint: str = ""
    note: str = ""
    reset_s: float = 0.0


async def try_agent(backend: AgentBackend, split: str, index: int) -> Trial:
    """Play and judge one task. Raises VolleyError."""
    shown = await backend.demonstration(split, index) if backend.has_demonstration else None
    asked = time.perf_counter()
    episode = await backend.reset(split, index, index)
    reset_s = time.perf_counter() - asked
    try:
        outside = backend.agent.kind == "external"
        trial = await _judge_without_output(episode) if outside else await _played(episode, shown)
        return replace(trial, reset_s=reset_s)
    finally:
        await episode.close()


async def _played(episode: AgentEpisode, shown: Demonstration | None) -> Trial:
    from volley_sandbox.agents.scripted import ScriptedModel  # the dialects, which only trials need

    model = ScriptedModel(shown.messages if shown is not None else ())
    episode.begin("trial", _ADDRESS)
    await episode.play(model.answer, TRIAL_S)
    state = await episode.state(0.0)
    trial = Trial(episode.opening, f"{model.n_requests} calls", note=state.detail)
    if state.state == "failed":
        return replace(trial, fault=f"{state.detail}\n{state.output[-2000:]}".rstrip())
    if not model.n_requests:
        output = state.output.strip()[-500:] or "nothing"
        return replace(trial, fault=f"the program never called the model; it printed: {output}", hint=_CALLS_HINT)
    found = await episode.finish()
    outcome = f"{trial.outcome}, reward {found.reward:g}"
    if shown is None or shown.success == found.info.success:
        return replace(trial, outcome=outcome, reward=found.reward)
    summary = "solves its task" if shown.success else "does not solve its task"
    fault = f"the demonstration says that it {summary}, but with its messages the judge says the opposite"
    return replace(trial, fault=f"{fault} ({outcome}); the end of the program's output:\n{state.output[-1000:]}")


async def _judge_without_output(episode: AgentEpisode) -> Trial:
    """Judge an external agent that sends nothing."""
    if not episode.agent.judged:
        return Trial(episode.opening, "played and rewarded outside")
    found = await episode.finish()
    return Trial(episode.opening, f"played outside, reward {found.reward:g} without an answer", found.reward)
