"""Interface of judges of whole groups, which a package provides (part `group_judges`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.orchestrator.status import RunStatus
from shared import packages
from shared.models.chat import ChatTokenizer
from shared.schema import RunConfig
from shared.types import Group


@dataclass(frozen=True, slots=True)
class JudgeContext:
    """Parts of the orchestrator that judges use."""

    tokenizer: ChatTokenizer
    status: RunStatus


class GroupJudges(Protocol):
    """Judges of all environments of a run."""

    async def judge(self, group: Group) -> Group:
        """Return a complete group with the rewards of its judges. Raises VolleyError."""
        ...


type OpenJudges = Callable[[JudgeContext], AbstractAsyncContextManager[GroupJudges]]


def judges_of(config: RunConfig) -> OpenJudges | None:
    """Return what opens the judges; None without a package for them, or if the run has none. Raises ConfigError."""
    made: OpenJudges | None = None
    if (configured := packages.part("group_judges", required=False)) is not None:
        made = configured(config)
    return made
