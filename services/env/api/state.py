"""State that the routes of the service share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request

from services.env.catalogue import Catalogue
from services.env.content import ContentRecord
from services.env.episodes import Episodes
from services.env.rewards.rewards import Rewards
from services.env.submissions.submissions import Submissions
from services.env.tools.toolset import ToolSet

MAX_TRIALS = 8
"""Concurrent requests that try tools; each may start a sandbox or call another server."""


@dataclass(frozen=True, slots=True)
class EnvState:
    """Shared state, stored in `app.state.env`.

    `tools` are those that any environment can have; `tool_places` bounds concurrent requests that try tools; `content`
    records the content that environments were first played with.
    """

    catalogue: Catalogue
    episodes: Episodes
    submissions: Submissions
    rewards: Rewards
    tools: ToolSet
    content: ContentRecord
    tool_places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TRIALS))


def state_of(request: Request) -> EnvState:
    return request.app.state.env
