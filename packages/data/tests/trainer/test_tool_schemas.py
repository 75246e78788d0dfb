"""Schemas of functions as tools, beside those that transformers makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

import volley_data
from volley_serving.templates import tool_text


def _load() -> ModuleType:
    file = Path(volley_data.__file__).with_name("template") / "volley_tools.py"
    spec = importlib.util.spec_from_file_location("volley_tools", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["volley_tool_text"] = tool_text
    spec.loader.exec_module(module)
    return module


volley_tools = _load()


def plain(a: int, b: float = 0.5, c: bool = False) -> str:
    """
    Add numbers.

    Two lines, and a colon: here.

    Args:
        a: The first number,
            on two lines.

        b: The second. For example: 3.
            note for readers: it may be negative
        c: Whether to round

    Returns:
        The sum, as text: "3.5".

    Raises:
        ValueError: never.
    """
    return str(a + b)


def nothing() -> None:
    """Do nothing."""


def optional(a: int | None, b: str | None = None, c: list[str] | None = None) -> int | None:
    """Take optional arguments.

    Args:
        a: One
        b: Two
        c: Three
    Returns:
        A number or nothing.
    """
    return a


def older(a: Optional[int], b: Union[int, str, None] = None) -> Optional[Literal["x"]]:  # noqa: UP007, UP045
    """Take what typing had first.

    Args:
        a: One
        b: Two
    """


def literal(
    unit: Literal["C", "F"],
    size: Literal[1, "two", None],
    mode: Literal["a", "b"] | None = "a",
    n: Literal[1, 2] = 1,
) -> float:
    """Take literals.

    Args:
        unit: The unit
        size: The size
        mode: The mode
        n: A number
    """
    return 1.0


def nested(
    rows: list[dict[str, list[int]]],
    table: dict[str, dict[str, float]],
    either: int | list[str],
    both: str | int | None,
    pair: tuple[int, str],
    deep: list[Literal["x"] | None],
    many: list[Any] | dict[str, Any] | Any,
    told: Annotated[str, "noted"] = "",
) -> dict[str, list[int]]:
    """Take nested types. Args follow.

    Args:
        rows: Rows
        table: A table
        either: One of two
        both: One of two, or none
        pair: A pair
        deep: Deep
        many: Many
        told: Told

    Returns:
        A table.
    """
    return {}


def choices(drink: str, many: dict, anything: Any, *, size: int = 1):
    """Order a drink.

    Args:
        drink: What to drink (choices: ["tea", "coffee"])
        many: An object
        anything: Anything
        size: Its size
    """


async def waits(x: str) -> str:
    """Wait.

    Args:
        x: Text
    """
    return x


class Tool:
    def method(self, x: int) -> int:
        """Return it.

        Args:
            x: A number
        """
        return x


@pytest.mark.parametrize("function", [plain, nothing, optional, older, literal, nested, choices, waits, Tool().method])
def test_schemas_are_those_of_transformers_byte_for_byte(function: Callable[..., Any]) -> None:
    assert json.dumps(volley_tools.schema(function)) == json.dumps(get_json_schema(function))


def undescribed(x: int) -> int:
    return x


def unnamed(x: int) -> int:
    """Return it."""
    return x


def untyped(x) -> int:
    """Return it.

    Args:
        x: A number
    """
    return x


@pytest.mark.parametrize("function", [undescribed, unnamed, untyped])
def test_what_transformers_refuses_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match=r"docstring|type hint|description"):
        get_json_schema(function)
    with pytest.raises(volley_tools.NoTool, match=rf"tool {function.__name__} "):
        volley_tools.schema(function)


def own_type(x: Path) -> int:
    """Take a path.

    Args:
        x: A path
    """
    return 1


def listed(x: list, y: int = 1) -> int:
    """Take a list.

    Args:
        x: Values
        y (int): A number
    """
    return 1


def every(**more: int) -> int:
    """Take anything.

    Args:
        more: Numbers
    """
    return 1


def test_the_documented_differences() -> None:
    found = volley_tools.schema(listed)["function"]["parameters"]["properties"]
    assert found == {
        "x": {"type": "array", "description": "Values"},
        "y": {"type": "integer", "description": "A number"},
    }
    with pytest.raises(volley_tools.NoTool, match="has the annotation"):
        volley_tools.schema(own_type)
    with pytest.raises(volley_tools.NoTool, match=r"takes \*more"):
        volley_tools.schema(every)
