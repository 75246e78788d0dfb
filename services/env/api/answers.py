"""Wire schemas of answers, from which the OpenAPI page is made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from services.env.backend import AgentSpec, GradableEpisode, is_restorable
from services.env.episode_slots import EpisodeSlot
from services.env.episode_types import Demonstration, Fault, StepResult


class OfferedEnvironment(BaseModel):
    """An environment on offer.

    If it was submitted, `name` is `NAME@VERSION` and `why` is the reason for its `state`; if it is remote, `url` is its
    address. `trouble` says why its episodes fail at present, null if they do not; `rewards` are additional ones. `data`
    holds the digests of its content and, by part, the files or package that they cover; null if it has none or was not
    played yet.
    """

    name: str
    base: str
    config: dict[str, Any]
    state: str
    version: int | None
    weight: float
    why: str = ""
    url: str | None = None
    trouble: str | None = None
    rewards: dict[str, Any] | None = None
    data: dict[str, Any] | None = None


class InstallableEnvironment(BaseModel):
    """An environment of an installed package, submitted by its `import_path`."""

    name: str
    import_path: str
    package: str


class EnvironmentList(BaseModel):
    environments: list[OfferedEnvironment]
    installed: list[InstallableEnvironment]


class TaskCount(BaseModel):
    num_tasks: int


class TaskName(BaseModel):
    """`task` is readable: split, index, and a digest of the task's content."""

    task: str


class ConversationMessage(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class DemonstrationAnswer(BaseModel):
    """`success` says whether the conversation solves the task; some demonstrations only show how to play."""

    messages: list[ConversationMessage]
    success: bool
    tools: list[dict[str, Any]]


class DemonstrationsAnswer(BaseModel):
    """In the order of the indices."""

    demonstrations: list[DemonstrationAnswer]


class CreatedEpisode(BaseModel):
    """`ttl_s` is the idle life of the episode, in seconds."""

    episode_id: str
    task: str
    messages: list[ConversationMessage]
    tools: list[dict[str, Any]]
    info: dict[str, Any]
    ttl_s: float


class ProgramStateAnswer(BaseModel):
    """State of a program.

    `exit_code` is null while it runs, and if it was ended; `detail` says why it failed or was stopped; `output` is the
    end of its output.
    """

    state: Literal["running", "exited", "failed"]
    exit_code: int | None
    detail: str
    output: str


class StepInfo(BaseModel):
    """The environment adds its own fields to these."""

    reward_components: dict[str, float]
    success: bool
    error: Fault | None


class StepAnswer(BaseModel):
    """`closed`: the episode is over, its resources are free, and the service forgets it by itself."""

    messages: list[ConversationMessage]
    reward: float
    terminated: bool
    truncated: bool
    info: StepInfo
    closed: bool


def created(slot: EpisodeSlot, ttl_s: float) -> dict[str, Any]:
    request = slot.request
    return {
        "episode_id": slot.id,
        "task": slot.task,
        "messages": list(slot.opening),
        "tools": list(slot.tools),
        "info": {
            "env": request.entry.name,
            "split": request.split,
            "index": request.index,
            "seed": slot.seed,
            **({"scored_at_end": True} if isinstance(slot.episode, GradableEpisode) else {}),
            **({"restorable": True} if is_restorable(slot.episode) else {}),
            **({} if slot.played_by is None else _of_agent(slot.played_by.agent)),
            **({} if slot.seated is None else {"seats": list(slot.seated.seats), "seat": slot.seated.seat}),
        },
        "ttl_s": ttl_s,
    }


def _of_agent(agent: AgentSpec) -> dict[str, Any]:
    return {"agent": agent.kind, "timeout_s": agent.timeout_s, "judged": agent.judged}


def shown(found: Demonstration) -> dict[str, Any]:
    return {"messages": list(found.messages), "success": found.success, "tools": list(found.tools)}


def stepped(result: StepResult) -> dict[str, Any]:
    known = {
        "reward_components": dict(result.info.reward_components),
        "success": result.info.success,
        "error": result.info.error,
    }
    return {
        "messages": list(result.messages),
        "reward": float(result.reward),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": {**result.info.extra, **known},
        "closed": result.over,
    }
