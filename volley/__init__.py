"""The `volley` command, and for Python programs `volley.train` and its like, and a client of runs."""

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 12):  # noqa: UP036 - else a SyntaxError tells it
    sys.exit(
        f"volley: Python 3.12 or 3.13 is needed, and {sys.executable} is {sys.version.split()[0]}: start it with "
        "`uvx --python 3.12 --from volley-rl volley`, or in a clone with .venvs/base/bin/volley"
    )

import services as services  # refuses to start where PYTHONPATH hides a package of ours

if TYPE_CHECKING:
    from volley_python import aio
    from volley_python.api import Server, dpo, evaluate, resume, serve, sft, train
    from volley_python.client import AsyncClient, Client
    from volley_python.run import Run

__all__ = [
    "AsyncClient",
    "Client",
    "Run",
    "Server",
    "aio",
    "dpo",
    "evaluate",
    "resume",
    "serve",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import what a program asks for; commands do not need it. Raises ConfigError if its package is not installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shared import packages

    return getattr(packages.part("python_api"), name)
