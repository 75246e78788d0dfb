"""Interface of teachers, which add their log-probabilities to finished episodes; a package provides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.context import EpisodeContext
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.status import RunStatus
from shared import packages
from shared.models.chat import ChatTokenizer
from shared.schema import RunConfig
from shared.types import Trajectory


class Teaching(Protocol):
    """Adds a teacher's log-probabilities to an episode."""

    async def add_logprobs(self, trajectory: Trajectory, budget: TokenBudget) -> Trajectory:
        """Return the episode with a teacher's log-probabilities of each of its sequences.

        Raises VolleyError if the attempts are used up, or another one cannot help.
        """
        ...


class GroupTeaching(Protocol):
    """Adds the log-probabilities of a teacher that scores complete groups."""

    async def teach(
        self, trajectories: Sequence[Trajectory], contexts: Sequence[EpisodeContext]
    ) -> tuple[Trajectory, ...]:
        """Return the episodes of a group with the teacher's log-probabilities, or with what they lack.

        Raises VolleyError, alone or in a group, if the teacher fails an episode for good.
        """
        ...


@dataclass(frozen=True, slots=True)
class TeachingContext:
    """Parts of the orchestrator that teachers use."""

    tokenizer: ChatTokenizer
    balancer: Balancer
    status: RunStatus
    bounds: TokenBounds


@dataclass(frozen=True, slots=True)
class Teachers:
    """Teachers of a run: of single episodes, and by environment those that score complete groups."""

    of_episodes: Teaching | None = None
    of_groups: Callable[[str], GroupTeaching | None] = lambda _: None


type OpenTeachers = Callable[[TeachingContext], AbstractAsyncContextManager[Teachers]]


class TeacherOpening(Protocol):
    """The part `teachers`."""

    def teachers_of(self, config: RunConfig) -> OpenTeachers: ...

    async def check(self, config: RunConfig) -> None:
        """Ask each of the run's teachers on other servers once. Raises VolleyError."""
        ...


def teachers_of(config: RunConfig) -> OpenTeachers | None:
    """Return what opens the teachers; None if the run has none. Raises ConfigError if no package brings them."""
    if not config.algorithm.teacher_kl_coef:
        return None
    opening: TeacherOpening = packages.part("teachers")
    return opening.teachers_of(config)
