"""Names that `volley` offers to Python programs, each imported when it is used."""

from importlib import import_module
from typing import Any

_HOMES = {
    **dict.fromkeys(("AsyncClient", "Client"), "client"),
    **dict.fromkeys(("Server", "dpo", "evaluate", "resume", "serve", "sft", "train"), "api"),
    "Run": "run",
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return import_module(f"{__name__}.aio")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
