"""An episode in the environment service, played turn by turn.

A lost episode (the service was restarted) is opened again with the same seed and gets the same turns again, as long as
the environment answers the same. A failure of the service is an error, never a reward.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from volley_verl.service import Service, ServiceError

_LOST = (404, 409)
MAX_MESSAGE = 1_048_576
"""Characters of a message that the service takes."""


class EpisodeDiverged(RuntimeError):
    """A lost episode, opened again, answered its turns otherwise than before."""


@dataclass(frozen=True)
class Task:
    """A task of an environment. `seed` decides what is random after the task is chosen."""

    env: str
    split: str
    index: int
    seed: int

    @classmethod
    def of_row(cls, extra_info: Mapping[str, Any], seed: int | None = None) -> Task:
        """Read the task from `extra_info` of a dataset row. Raises KeyError naming a missing field."""
        found = draw_seed() if seed is None else seed
        return cls(str(extra_info["env"]), str(extra_info["split"]), int(extra_info["index"]), found)


def draw_seed() -> int:
    return secrets.randbits(62)


def stable_seed(*parts: object) -> int:
    """Return the same seed for the same parts, in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 2


@dataclass
class Reply:
    """The environment's answer to a turn: `messages` for the model to read, and the turn's reward."""

    messages: Sequence[Mapping[str, Any]]
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    fault: str | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Reply:
        info = answer.get("info") or {}
        return cls(
            messages=list(answer["messages"]),
            reward=float(answer["reward"]),
            terminated=bool(answer["terminated"]),
            truncated=bool(answer["truncated"]),
            success=bool(info.get("success", False)),
            fault=info.get("error"),
        )

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Episode:
    """One episode; use it as an asynchronous context manager, which deletes it at the end.

    Attributes:
        messages: the first messages for the model, and `tools` the schemas of its tools.
        turns: the assistant's texts so far, and `replies` the answers to them.
    """

    service: Service
    task: Task
    max_losses: int = 3
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    turns: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    _id: str = ""
    _request: str = ""
    _scored_at_end: bool = False
    _end: Reply | None = None

    async def __aenter__(self) -> Episode:
        opened = await self._open()
        self.messages, self.tools = list(opened["messages"]), list(opened.get("tools") or ())
        info = opened.get("info") or {}
        self._scored_at_end = bool(info.get("scored_at_end", False))
        if info.get("agent"):
            await self._delete()
            raise ServiceError(f"{self.task.env} is played by an agent's program, not in steps: use Volley for it")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._delete()

    async def step(self, text: str) -> Reply:
        """Send the assistant's turn. Raises ServiceError, EpisodeDiverged."""
        reply = await self._repeated(lambda: self._step(len(self.turns), text))
        self.turns.append(text)
        self.replies.append(reply)
        return reply

    async def finish(self) -> None:
        """End an episode that a limit cut: judges and tests may score what there is. Raises ServiceError."""
        if self._scored_at_end and not (self.replies and self.replies[-1].ended):
            self._end = await self._repeated(lambda: self._finish())

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns, and of the end."""
        return float(sum(reply.reward for reply in self._answers))

    @property
    def success(self) -> bool:
        return (bool(self._answers) and self._answers[-1].success) or bool(self.replies and self.replies[-1].success)

    @property
    def _answers(self) -> Sequence[Reply]:
        return self.replies if self._end is None else [*self.replies, self._end]

    async def _open(self) -> Mapping[str, Any]:
        self._request = uuid.uuid4().hex
        task = self.task
        body = {"request_id": self._request, "env": task.env, "split": task.split, "index": task.index}
        opened = await self.service.post("/episodes", {**body, "seed": task.seed})
        self._id = str(opened["episode_id"])
        return opened

    async def _step(self, number: int, text: str) -> Reply:
        message = {"role": "assistant", "content": text[:MAX_MESSAGE]}
        body = {"request_id": f"{self._request}-{number}", "message": message}
        return Reply.of(await self.service.post(f"/episodes/{self._id}/step", body))

    async def _finish(self) -> Reply:
        body = {"request_id": f"{self._request}-finish"}
        return Reply.of(await self.service.post(f"/episodes/{self._id}/finish", body))

    async def _repeated(self, call: Any) -> Reply:
        """Make a call; if the service has lost the episode, open it again and repeat its turns first."""
        for loss in range(self.max_losses + 1):
            try:
                if loss:
                    await self._open()
                    for number, text in enumerate(self.turns):
                        if await self._step(number, text) != self.replies[number]:
                            raise EpisodeDiverged(f"{self.task} answered turn {number + 1} otherwise than before")
                return await call()
            except ServiceError as error:
                if error.status not in _LOST or loss == self.max_losses:
                    raise
        raise AssertionError("unreachable")

    async def _delete(self) -> None:
        with suppress(ServiceError):
            await self.service.delete(f"/episodes/{self._id}")


async def play(service: Service, task: Task, turns: Sequence[str]) -> Episode:
    """Play an episode with turns that are known already; return it after its end.

    Turns after the environment's end are not sent.
    """
    async with Episode(service, task) as episode:
        for text in turns:
            if (await episode.step(text)).ended:
                break
        else:
            await episode.finish()
        return episode
