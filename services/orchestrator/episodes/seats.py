"""Seats of a running episode: a conversation for each, the seat whose turn it is, and the rewards at the end.

An episode without seats has one conversation, that of the seat "". With seats, the environment names the next one in
each of its answers.

Invariants
- No token belongs to two seats: each has its own recorder, and reads only what the environment tells it.
- A seat or a reward that is missing or unknown is a failure of the environment (DecodeError), never data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.recorder import Recorder
from services.orchestrator.episodes.turn import EpisodeState, SamplingSpec
from shared.clients.env import Opening, StepReply
from shared.errors import DecodeError
from shared.outcomes import End
from shared.seats import joined
from shared.types import MAX_BRANCHES, MAX_TREE_TOKENS, Message, Status, Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How an episode ended. `is_closed`: the environment service forgets it by itself."""

    success: bool
    status: Status
    end: End
    is_closed: bool = False


@dataclass(slots=True)
class SeatConversation:
    """One seat's messages and tokens so far; `sampled` are the ids of its last turn."""

    sampling: EpisodeState
    messages: list[Message]
    sampled: Sequence[int] = ()

    @property
    def recorder(self) -> Recorder:
        return self.sampling.recorder


@dataclass(slots=True)
class RunningEpisode:
    """An episode: its seats that had a turn, and the environment's side.

    `seat` is the one whose turn it is. `env_s` are the seconds in calls of the environment service, `request_id` starts
    the ids of these calls. `snapshot` is the environment's newest, if episodes of it can be restored.
    """

    spec: SamplingSpec
    budget: TokenBudget
    opening: Opening
    request_id: str
    env_s: float
    seat: str
    seats: dict[str, SeatConversation] = field(default_factory=dict[str, SeatConversation])
    snapshot: Any = None

    @property
    def present(self) -> SeatConversation:
        """Conversation of the seat whose turn it is."""
        return self.seats[self.seat]

    def sit(self, prompt_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Start the conversation of the present seat. Samples of different seats have seeds of their own."""
        number = self.opening.seats.index(self.seat) if self.opening.seats else 0
        sampling = EpisodeState(self.spec, self.budget, Recorder(prompt_ids), draw=number * (MAX_BRANCHES + 1))
        self.seats[self.seat] = SeatConversation(sampling, list(messages))

    def is_full(self, context_length: int) -> bool:
        """True if the episode can have no other sequence."""
        recorders = [one.recorder for one in self.seats.values()]
        n_branches = sum(1 + one.n_branches for one in recorders) - 1
        return (
            n_branches >= MAX_BRANCHES or sum(one.n_tree_tokens for one in recorders) > MAX_TREE_TOKENS - context_length
        )

    def next_seat(self, reply: StepReply) -> str:
        """Return the seat that answers next. Raises DecodeError."""
        seats = self.opening.seats
        if not seats:
            return self.seat
        if reply.rewards is not None:
            raise DecodeError(f"{self.spec.env} gave rewards of seats, but its episode goes on", _REWARDS)
        if reply.seat is None or reply.seat not in seats:
            raise DecodeError(f"{self.spec.env} says that it is the turn of {reply.seat!r}; {self._known}", _SEAT)
        return reply.seat

    def end(self, reply: StepReply) -> bool:
        """Give each seat its reward of the end; return True if the episode is a success. Raises DecodeError.

        It is one if the environment says so, or if the rewards of the seats add up to more than 0.
        """
        if not self.opening.seats:
            return reply.success
        rewards = reply.rewards or {}
        if rewards.keys() != set(self.opening.seats):
            named = ", ".join(rewards) or "none"
            raise DecodeError(f"{self.spec.env} ended with rewards of {named}; {self._known}", _REWARDS)
        for seat, conversation in self.seats.items():
            conversation.recorder.add_reward(rewards[seat], {seat: rewards[seat]})
        return reply.success or self.reward > 0

    @property
    def reward(self) -> float:
        return sum(one.recorder.reward for one in self.seats.values())

    def trajectory(self, ended: EpisodeEnd, total_s: float) -> Trajectory:
        """Return the finished record, whose sequences are those of all seats."""
        generate_s = sum(one.sampling.generate_s for one in self.seats.values())
        made = {
            seat: one.recorder.trajectory(
                ticket=self.spec.ticket,
                sample_index=self.spec.sample_index,
                attempt=self.budget.used,
                env=self.spec.env,
                task=self.opening.task,
                success=ended.success,
                status=ended.status,
                end=ended.end,
                failures=self.budget.failures,
                timings={"env_s": self.env_s, "generate_s": generate_s, "total_s": total_s},
            )
            for seat, one in self.seats.items()
        }
        return joined(made) if self.opening.seats else made[""]

    @property
    def _known(self) -> str:
        return f"its seats are {', '.join(self.opening.seats)}"


_SEAT = 'each answer of an episode that goes on names the seat whose turn it is: info["seat"]'
_REWARDS = 'the last answer gives each seat a reward, and no other answer does: info["rewards"]'
