"""State that the routes of the service share."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from services.env.catalogue import Catalogue
from services.env.content import ContentRecord
from services.env.episodes import Episodes
from services.env.extension import Extension


@dataclass(frozen=True, slots=True)
class EnvState:
    """Shared state, stored in `app.state.env`. `content` records the data that environments were first played with."""

    catalogue: Catalogue
    episodes: Episodes
    content: ContentRecord
    extension: Extension

    def trouble(self, name: str) -> str | None:
        """Return why an environment's episodes fail or hang at present; None if they do not."""
        stuck = self.catalogue.get(name).backend.stuck_reason() if self.catalogue.has(name) else None
        found = (stuck, self.episodes.waiting().get(name), self.extension.trouble(name))
        return "; ".join(one for one in found if one) or None


def state_of(request: Request) -> EnvState:
    return request.app.state.env
