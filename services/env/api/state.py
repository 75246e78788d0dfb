"""What the routes of the service work on."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from services.env.catalogue import Catalogue
from services.env.episodes import Episodes
from services.env.rewards.rewards import Rewards
from services.env.submissions.submissions import Submissions


@dataclass(frozen=True, slots=True)
class EnvState:
    """Lives in `app.state.env`."""

    catalogue: Catalogue
    episodes: Episodes
    submissions: Submissions
    rewards: Rewards


def state_of(request: Request) -> EnvState:
    return request.app.state.env
