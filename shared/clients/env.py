"""Client of the environment service: tasks, demonstrations, episodes.

All calls may safely be repeated (creating and stepping are idempotent by `request_id`). The callers repeat them, each
with its own limit, so nothing is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from shared.bounds import MAX_OBJECTS
from shared.clients.base import MALFORMED, HttpClient
from shared.errors import DecodeError
from shared.outcomes import FAULTS, Fault
from shared.types import Message

type AgentKind = Literal["program", "external"]
AGENT_KINDS: tuple[AgentKind, ...] = ("program", "external")
HINTS = ("expected", "feedback")
_PROGRAM_STATES: Mapping[str, Literal["running", "exited", "failed"]] = {
    "running": "running",
    "exited": "exited",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Opening:
    """A new episode: its id, a readable id of its task, and the first messages for the model.

    `scored_at_end`: a part of the reward comes with the end of the episode, so call `finish` if it is abandoned.
    `agent`: the episode is played by a program that `run_program` starts, or by an external agent; None if it is played
    in steps.
    `timeout_s`: seconds that the program may take. `judged`: `finish` gives the reward of an agent's episode.
    `seats`: names of the players, of which `seat` answers first; empty if the episode has one conversation.
    `restorable`: a new episode can go on from the snapshots of this one.
    """

    episode_id: str
    task: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    scored_at_end: bool = False
    agent: AgentKind | None = None
    timeout_s: float = 0.0
    judged: bool = True
    seats: Sequence[str] = ()
    seat: str = ""
    restorable: bool = False


@dataclass(frozen=True, slots=True)
class ProgramReply:
    """State of an episode's program.

    `failed` is a failure of the program or its machine, described by `detail`, and never a reward. `exit_code` is None
    if the program was ended, for example after its time.
    """

    state: Literal["running", "exited", "failed"]
    exit_code: int | None = None
    detail: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class StepReply:
    """Gymnasium's five-tuple, with the observation as messages and the parts of `info` that training needs.

    `hints` are texts of `info` that a privileged teacher may be shown, by name (HINTS).
    `fault` is the model's mistake in this turn, if any. `closed`: the episode is over, and the service forgets it by
    itself; services that do not say so want it deleted. In an episode with seats, `seat` answers next, and the last
    reply has the `rewards` of all seats. `snapshot` is the state after this step of an episode that is `restorable`.
    """

    messages: Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool
    success: bool = False
    reward_components: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    closed: bool = False
    hints: Mapping[str, str] = field(default_factory=dict[str, str])
    seat: str | None = None
    rewards: Mapping[str, float] | None = None
    snapshot: Any = None


@dataclass(frozen=True, slots=True)
class DemonstrationReply:
    """A conversation that ends with an assistant message, and the JSON schemas of its task's tools."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


class EnvClient(HttpClient):
    """Every method raises VolleyError: ServiceUnreachable, or the error in the service's problem body."""

    async def ready(self) -> None:
        """Raise Unavailable while the service accepts no requests."""
        await self.get("/ready", attempts=1)

    async def environments(self) -> Any:
        """Return the rows of all offered environments."""
        return await self.get("/environments", attempts=1)

    async def submit(self, body: Mapping[str, Any], *, replace: bool = False) -> Mapping[str, Any]:
        """Submit a version, as POST /environments takes it, with a zip file's bytes in `archive`; return its row.

        With `replace` it is a new version of an existing name. Raises Conflict, InputError, Forbidden.
        """
        method, path = ("PUT", f"/environments/{body['name']}") if replace else ("POST", "/environments")
        if "archive" in body:
            query = {key: str(value) for key, value in body.items() if value is not None and key != "archive"}
            query["config"] = orjson.dumps(body.get("config") or {}).decode()
            row = await self.upload(method, path, body["archive"], "application/zip", query)
        else:
            row = await (self.put(path, body) if replace else self.post(path, body))
        return _read(lambda: {**row, "name": str(row["name"]), "state": str(row["state"])})

    async def versions(self, name: str) -> list[Mapping[str, Any]]:
        """Return the versions of a submitted environment, oldest first; for NAME@VERSION that one. Raises NotFound."""
        answer = await self.get(f"/environments/{name}")
        return _read(lambda: list(answer["versions"]))

    async def log(self, name: str) -> str:
        """Return the recent output of its episodes, and how they failed. Raises NotFound."""
        answer = await self.get(f"/environments/{name}/logs")
        return _read(lambda: str(answer["log"]))

    async def activate(self, name: str) -> Mapping[str, Any]:
        """Raises NotFound, Conflict."""
        return await self.post(f"/environments/{name}/activate", {})

    async def retire(self, name: str) -> Mapping[str, Any]:
        """Raises NotFound, Conflict."""
        return await self.post(f"/environments/{name}/retire", {})

    async def num_tasks(self, env: str, split: str) -> int:
        """Return the number of tasks. Raises NotFound for an unknown environment or split."""
        answer = await self.post(f"/{env}/num_tasks", {"split": split})
        return _read(lambda: int(answer["num_tasks"]))

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply:
        """Return a conversation for one task to learn from, solved or not. Raises NotFound."""
        answer = await self.post(f"/{env}/demonstration", {"split": split, "index": index})
        return _read(lambda: _demonstration(answer))

    async def demonstrations(self, env: str, split: str, indices: Sequence[int]) -> list[DemonstrationReply]:
        """Return the conversations of at most MAX_SHOWN tasks, in order.

        Raises NotFound, also if the service shows only one at a time.
        """
        body = {"split": split, "indices": list(indices)}
        answer = await self.post(f"/{env}/demonstrations", body, max_objects=len(indices) * MAX_OBJECTS)
        found = _read(lambda: [_demonstration(one) for one in answer["demonstrations"]])
        if len(found) != len(indices):
            raise DecodeError(f"the environment showed {len(found)} demonstrations of {len(indices)}")
        return found

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        """Start an episode, or go on from a `snapshot`; `seed` drives its randomness after the task is chosen.

        Raises NotFound, and InputError if its environment restores no snapshots.
        """
        body = {"request_id": request_id, "env": env, "split": split, "index": index, "seed": seed}
        body |= {} if snapshot is None else {"snapshot": snapshot}
        answer = await self.post("/episodes", body)
        return _read(lambda: _opening(answer))

    async def step(self, episode_id: str, request_id: str, content: str) -> StepReply:
        """Send the assistant's message and return the environment's reply. Raises NotFound for an unknown episode."""
        body = {"request_id": request_id, "message": {"role": "assistant", "content": content}}
        answer = await self.post(f"/episodes/{episode_id}/step", body)
        return _read(lambda: _step(answer))

    async def run_program(
        self, episode_id: str, request_id: str, base_url: str, api_key: str, model: str
    ) -> ProgramReply:
        """Start the program of an agent's episode; it reaches the model at `base_url`. Raises NotFound, Conflict."""
        body = {"request_id": request_id, "base_url": base_url, "api_key": api_key, "model": model}
        answer = await self.post(f"/episodes/{episode_id}/run", body)
        return _read(lambda: _program(answer))

    async def program(self, episode_id: str, wait_s: float = 0.0) -> ProgramReply:
        """Return the state of the program, at its end or after `wait_s` (at most 60). Raises NotFound, Conflict."""
        answer = await self.get(f"/episodes/{episode_id}/run", {"wait_s": wait_s}, attempts=1)
        return _read(lambda: _program(answer))

    async def finish(self, episode_id: str, request_id: str, output: str | None = None) -> StepReply:
        """Return the rest of the reward of an unfinished episode that ends here, without its steps' rewards.

        For an agent's episode this is its whole reward; `output` is the final output of an external agent.

        Raises NotFound.
        """
        body = {"request_id": request_id} if output is None else {"request_id": request_id, "output": output}
        answer = await self.post(f"/episodes/{episode_id}/finish", body)
        return _read(lambda: _step(answer))

    async def delete_episode(self, episode_id: str) -> None:
        """Delete an episode; unknown episodes count as deleted."""
        await self.delete(f"/episodes/{episode_id}")


def _opening(answer: Mapping[str, Any]) -> Opening:
    info = answer.get("info") or {}
    seats = [str(seat) for seat in info.get("seats") or ()]
    return Opening(
        str(answer["episode_id"]),
        str(answer["task"]),
        list(answer["messages"]),
        list(answer.get("tools") or ()),
        bool(info.get("scored_at_end", False)),
        next((kind for kind in AGENT_KINDS if kind == info.get("agent")), None),
        float(info.get("timeout_s", 0.0)),
        bool(info.get("judged", True)),
        seats,
        seats[seats.index(info["seat"])] if seats else "",
        bool(info.get("restorable", False)),
    )


def _demonstration(answer: Mapping[str, Any]) -> DemonstrationReply:
    return DemonstrationReply(list(answer["messages"]), list(answer.get("tools") or ()))


def _program(answer: Mapping[str, Any]) -> ProgramReply:
    code = answer.get("exit_code")
    return ProgramReply(
        _PROGRAM_STATES[answer["state"]],
        None if code is None else int(code),
        str(answer.get("detail", "")),
        str(answer.get("output", "")),
    )


def _step(answer: Mapping[str, Any]) -> StepReply:
    info = answer.get("info") or {}
    seat, rewards = info.get("seat"), info.get("rewards")
    return StepReply(
        messages=list(answer["messages"]),
        reward=float(answer["reward"]),
        terminated=bool(answer["terminated"]),
        truncated=bool(answer["truncated"]),
        success=bool(info.get("success", False)),
        reward_components={str(k): float(v) for k, v in (info.get("reward_components") or {}).items()},
        fault=next((fault for fault in FAULTS if fault == info.get("error")), None),
        closed=answer.get("closed") is True,
        hints={name: str(info[name]) for name in HINTS if _is_text(info.get(name))},
        seat=seat if isinstance(seat, str) else None,
        rewards={str(k): float(v) for k, v in rewards.items()} if isinstance(rewards, Mapping) else None,
        snapshot=info.get("snapshot"),
    )


def _is_text(value: Any) -> bool:
    """True for a number, or a text that is not empty."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def _read[T](make: Callable[[], T]) -> T:
    try:
        return make()
    except MALFORMED as error:
        raise DecodeError(f"the environment's answer lacks or mistypes a field: {error!r}") from error
