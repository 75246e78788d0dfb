"""Routes that a package adds to a service (group `volley.routers`, named SERVICE.NAME)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter

from shared import packages
from shared.web.access import Role


@dataclass(frozen=True, slots=True)
class ServiceRoutes:
    """A router, whose handlers find the service's parts in `request.app.state`, and the role of each of its routes."""

    router: APIRouter
    roles: Mapping[str, Role] = field(default_factory=dict[str, Role])


def added_routes(service: str) -> Iterator[ServiceRoutes]:
    """Yield the routes that installed packages add to a service. Raises ConfigError."""
    for name, point in packages.found(packages.ROUTERS).items():
        if name.partition(".")[0] == service:
            yield packages.load(point)
