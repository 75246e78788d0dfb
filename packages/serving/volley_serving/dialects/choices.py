"""Choice of tools and format of an answer, which every dialect spells in its own way."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InputError
from volley_serving.dialects.records import ToolChoice


def read_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolChoice, str | None]:
    """Return the choice, and the function that it names. Raises InputError.

    Args:
        tools: in OpenAI's shape.
    """
    match choice:
        case None | "auto" | "none":
            return choice or "auto", None
        case "required" | "any" if tools:
            names = function_names(tools)
            return "required", names[0] if len(names) == 1 else None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)} if tools:
            if name not in function_names(tools):
                raise InputError(f"tool_choice names {name[:80]!r}, which is not in tools")
            return "required", name
        case _:
            hint = "leave out tool_choice" if tools else "leave out tool_choice: there are no tools"
            raise InputError(f"tool_choice={reprlib.repr(choice)} is not supported", hint)


def read_format(given: Any, key: str) -> Mapping[str, Any] | None:
    """Return the JSON schema of a format; {} for any JSON object, None for text. Raises InputError naming `key`."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
        case _:
            raise InputError(f"{key}={reprlib.repr(given)} is not supported", "remove it from the request")


def function_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the functions. Raises InputError naming a tool that has none, and so cannot be called."""
    names = list[str]()
    for i, tool in enumerate(tools):
        match tool:
            case {"function": {"name": str(name)}} if name:
                names.append(name)
            case _:
                shape = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
                raise InputError(f"tools[{i}] is not a function with a name", f"a tool is {shape}")
    return names
