"""Text that describes tools, for chat templates that leave tools out.

Imports nothing of Volley: the environments made by `--tools` hold a copy of this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def describe_tools(schemas: Sequence[Mapping[str, Any]], example: str | None = None) -> str:
    """Describe tools and how to call them.

    Args:
        schemas: of the tools, in OpenAI's shape; at least one.
        example: text of a call; by default one of the first tool, in the format `hermes`.
    """
    functions = [schema["function"] for schema in schemas]
    rows = list[str]()
    for one in functions:
        properties = _properties(one)
        rows.append(f"- {one['name']}({', '.join(properties)}): {one.get('description', '')}".rstrip(": "))
        described = {name: _description(value) for name, value in properties.items()}
        rows += [f"  {name}: {text}" for name, text in described.items() if text]
    if example is None:
        first = {"name": functions[0]["name"], "arguments": dict.fromkeys(_properties(functions[0]), "...")}
        example = f"<tool_call>{json.dumps(first)}</tool_call>"
    return "\n".join(["You can use tools:", *rows, f"Call one like this, and wait for its result: {example}"])


def add_to_system(messages: Sequence[Any], text: str) -> list[Any]:
    """Return the messages with a text at the end of the system message; without one, a new one stands first."""
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]


def _properties(function: Mapping[str, Any]) -> dict[str, Any]:
    found = (function.get("parameters") or {}).get("properties")
    return found if isinstance(found, dict) else {}


def _description(schema: Any) -> str:
    return schema.get("description", "") if isinstance(schema, dict) else ""
