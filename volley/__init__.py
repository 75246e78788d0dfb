"""The `volley` command, and a client of runs for Python programs: `from volley import Client`."""

from typing import TYPE_CHECKING, Any

import services as services  # refuses to start where PYTHONPATH hides a package of ours

if TYPE_CHECKING:
    from volley.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    """Import the client when it is asked for: commands do not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from volley import client

    return getattr(client, name)
