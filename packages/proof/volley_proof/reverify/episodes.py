"""Replay a trajectory's assistant messages in an environment, and compare the rewards."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.clients.env import EnvClient, StepReply
from shared.errors import DecodeError, RateLimited, Unavailable, VolleyError
from shared.models.chat import ChatTokenizer
from shared.run import seeding
from shared.types import ASSISTANT, HISTORY, MAX_MESSAGE, Group, Trajectory

_PATIENCE_S = 600.0
_TASK = re.compile(r"(train|eval)/(\d+)(?![\w.])")


@dataclass(frozen=True, slots=True)
class ReplayedRewards:
    """An archived episode and its reward in the current environment.

    `was`, `was_success`: archived reward and success. `reward`, `success`: current ones; None if the episode could not
    be replayed, for the reason `why`. `rewards`: those of the turns, which add up to `reward`; `components`: its parts.
    """

    env: str
    task: str
    ticket: int
    sample_index: int
    was: float
    was_success: bool
    reward: float | None = None
    success: bool | None = None
    why: str = ""
    rewards: tuple[float, ...] = ()
    components: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def changed(self) -> bool:
        return self.reward is not None and (
            not math.isclose(self.reward, self.was, rel_tol=1e-9, abs_tol=1e-9) or self.success != self.was_success
        )


async def replay_rewards(
    client: EnvClient, tokenizer: ChatTokenizer, trajectory: Trajectory, seed: int, env: str
) -> ReplayedRewards:
    """Replay one trajectory. Errors are reported in `why`, not raised.

    Args:
        seed: seed of the run.
        env: environment to replay in.
    """
    known = ReplayedRewards(
        trajectory.env,
        trajectory.task,
        trajectory.ticket,
        trajectory.sample_index,
        trajectory.reward,
        trajectory.success,
    )
    if any(not branch.turns or branch.turns[0].role != HISTORY for branch in trajectory.branches):
        return replace(known, why="an episode of several sequences has no single list of messages")
    try:
        played = await _played(client, trajectory, said(tokenizer, trajectory), seed, env)
    except VolleyError as error:
        return replace(known, why=f"{type(error).__name__}: {error.detail}")
    return replace(
        known,
        reward=sum(played.rewards),
        success=played.success,
        rewards=tuple(played.rewards),
        components=played.components,
    )


def with_judgements(found: ReplayedRewards, group: Group, n: int) -> ReplayedRewards:
    """Add what judges of the whole group gave to its episode `n`, as recorded: they are not asked again."""
    if found.reward is None:
        return found
    rewards, total, components = list(found.rewards), found.reward, dict(found.components)
    for judgement in group.judgements:
        total += judgement.scores[n]
        components |= judgement.components(group.trajectories[n])
        if judgement.turns:
            rewards = [sum(pair) for pair in zip(rewards, judgement.turns[n], strict=True)]
    return replace(found, reward=total, rewards=tuple(rewards), components=components)


def said(tokenizer: ChatTokenizer, trajectory: Trajectory) -> list[str]:
    """Return the assistant messages by turn, as the environment received them."""
    said = [
        sequence.token_ids[turn.start : turn.end].tolist()
        for sequence in trajectory.sequences()
        for turn in sequence.turns
        if turn.role == ASSISTANT
    ]
    return [tokenizer.message_text(ids)[:MAX_MESSAGE] for ids in said]


@dataclass(slots=True)
class _Played:
    """Rewards of an episode's turns, the last with that of the episode's end, and the sums of their components."""

    rewards: list[float] = field(default_factory=list[float])
    components: dict[str, float] = field(default_factory=dict[str, float])
    success: bool = False

    def add(self, reply: StepReply) -> None:
        self.rewards.append(reply.reward)
        for name, value in reply.reward_components.items():
            self.components[name] = self.components.get(name, 0.0) + value


async def _played(client: EnvClient, trajectory: Trajectory, replies: Sequence[str], seed: int, env: str) -> _Played:
    """Play the episode.

    Raises VolleyError, and DecodeError if the task differs or the episode ends at another turn.
    """
    split, index = _where(trajectory.task)
    request_id = uuid.uuid4().hex
    env_seed = seeding.env_seed(seed, trajectory.ticket, trajectory.sample_index)
    opening = await _retry_until_ready(client.create, request_id, env, split, index, seed=env_seed)
    played, over = _Played(), False
    try:
        if opening.task != trajectory.task:
            raise DecodeError(f"{env} now has task {opening.task[:100]}, but the archive has {trajectory.task[:100]}")
        for n, text in enumerate(replies):
            if over:
                raise DecodeError(f"{env} ends the episode after {n} turns, but in the archive it has {len(replies)}")
            reply = await _retry_until_ready(client.step, opening.episode_id, f"{request_id}-{n}", text)
            played.add(reply)
            played.success, over = reply.success, reply.terminated or reply.truncated
        if opening.scored_at_end and not over:
            reply = await _retry_until_ready(client.finish, opening.episode_id, f"{request_id}-finish")
            played.add(reply)
            *rest, before, end = played.rewards
            played.rewards = [*rest, before + end]
    finally:
        await client.delete_episode(opening.episode_id)
    return played


async def _retry_until_ready[**P, T](call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call until the service is no longer rate-limited, e.g. by a judge or a layout being drawn. Raises VolleyError."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                try:
                    return await call(*args, **kwargs)
                except RateLimited as error:
                    await asyncio.sleep(error.retry_after_s)
    except TimeoutError:
        raise Unavailable(f"no answer within {_PATIENCE_S:g} s") from None


def _where(task: str) -> tuple[str, int]:
    """Return split and index of a task id. Raises DecodeError if it does not start with them."""
    found = _TASK.match(task)
    if found is None:
        raise DecodeError(f"the task {task[:100]!r} does not start with its split and index")
    return found[1], int(found[2])
