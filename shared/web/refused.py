"""Routes of another project's interface that a service refuses by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from shared.errors import InputError

METHODS = ("GET", "POST")
type Reasons = Mapping[str, tuple[str, str]]
"""Reason and hint by path."""


def add(router: APIRouter, refused: Reasons) -> None:
    """Answer these paths, below the router's prefix, with 422 and the reason."""
    for path, (reason, hint) in refused.items():
        router.add_api_route(
            path, _route(router.prefix + path, reason, hint), methods=[*METHODS], include_in_schema=False
        )


def _route(path: str, reason: str, hint: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_request: Request) -> Response:
        raise InputError(f"{path} is not supported: {reason}", hint)

    return refuse
