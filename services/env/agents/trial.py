"""Trial of an agent: its program with a scripted model, and its judgement.

The scripted model gives the assistant messages of the task's demonstration, one for each request. Without a
demonstration it calls the first tool that it is offered, and then knows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.env.agents.backend import AgentBackend, AgentEpisode
from services.env.agents.scripted import ScriptedModel
from services.env.backend import ModelAddress

TRIAL_S = 40.0
"""Seconds that a program may take in a trial."""
_ADDRESS = ModelAddress("", "sess-trial", "scripted")
_CALLS_HINT = "the program must call the model at OPENAI_BASE_URL, or at the base_url that run gets"


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial: what happened, and the `fault` for which the agent is refused."""

    told: str
    reward: float | None = None
    fault: str = ""
    hint: str = ""
    note: str = ""


async def try_agent(backend: AgentBackend, split: str, index: int) -> Trial:
    """Play and judge one task. Raises VolleyError."""
    shown = await backend.demonstration(split, index) if backend.has_demonstration else None
    episode = await backend.reset(split, index, index)
    try:
        if backend.agent.kind == "external":
            return await _judged_alone(episode)
        model = ScriptedModel(shown.messages if shown is not None else ())
        episode.begin("trial", _ADDRESS)
        await episode.play(model.answer, TRIAL_S)
        state = await episode.state(0.0)
        if state.state == "failed":
            return Trial("", fault=state.detail)
        if not model.n_requests:
            output = state.output.strip()[-500:] or "nothing"
            return Trial("", fault=f"the program never called the model; it printed: {output}", hint=_CALLS_HINT)
        found = await episode.finish()
        told = f"{model.n_requests} calls, reward {found.reward:g}"
        if shown is not None and shown.success != found.info.success:
            summary = "solves its task" if shown.success else "does not solve its task"
            fault = f"the demonstration says that it {summary}, but with its messages the judge says the opposite"
            return Trial("", fault=f"{fault} ({told}); the end of the program's output:\n{state.output[-1000:]}")
        return Trial(told, found.reward, note=state.detail)
    finally:
        await episode.close()


async def _judged_alone(episode: AgentEpisode) -> Trial:
    """Judge an agent outside that sends nothing."""
    if not episode.agent.judged:
        return Trial("played and rewarded outside")
    found = await episode.finish()
    return Trial(f"played outside, reward {found.reward:g} without an answer", found.reward)
