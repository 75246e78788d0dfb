"""Records of judges that graded a whole group: the rewards that they gave, and digests of what was asked and answered.

They travel and are archived with the group, so that what it was trained on can be proven without its judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from shared.fields import read_float, read_text
from shared.sequences import require

_ROUNDING = 1e-6


class JudgedEpisode(Protocol):
    """An episode's components of the reward."""

    @property
    def reward_components(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """Rewards of one judge, by episode of the group.

    `scores` are weighted; `turns` are their parts by turn, for a judge of turns, else empty. `name` is the component of
    the reward, or its beginning before a slash. `questions` and `answers` are digests, of unusable answers too.
    """

    name: str
    model: str
    questions: str
    answers: str
    scores: tuple[float, ...]
    turns: tuple[tuple[float, ...], ...] = ()

    def components(self, episode: JudgedEpisode) -> dict[str, float]:
        """Return the judge's components of an episode's reward."""
        begins = f"{self.name}/"
        return {
            name: value
            for name, value in episode.reward_components.items()
            if name == self.name or name.startswith(begins)
        }

    def validate(self, episodes: Sequence[JudgedEpisode]) -> None:
        """Check that the episodes have these rewards. Raises DecodeError."""
        require(len(self.scores) == len(episodes), "a judge graded another number of episodes than the group has")
        for episode, score in zip(episodes, self.scores, strict=True):
            require(_are_close(self.components(episode).values(), score), "an episode lacks a judge's reward")
        require(len(self.turns) in (0, len(self.scores)), "a judge graded the turns of some episodes only")
        for turns, score in zip(self.turns, self.scores, strict=False):
            require(_are_close(turns, score), "a judge's rewards of turns do not add up to that of the episode")

    def to_wire(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "questions": self.questions,
            "answers": self.answers,
            "scores": list(self.scores),
            "turns": [list(one) for one in self.turns],
        }

    @classmethod
    def from_wire(cls, record: Mapping[str, Any]) -> Self:
        """Decode a record. Raises TypeError, KeyError or ValueError."""
        texts = {key: read_text(record[key]) for key in ("name", "model", "questions", "answers")}
        scores, turns = record["scores"], record["turns"]
        return cls(**texts, scores=_numbers(scores), turns=tuple(_numbers(one) for one in turns))


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(read_float(value) for value in values)


def _are_close(parts: Any, whole: float) -> bool:
    return math.isclose(math.fsum(parts), whole, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
