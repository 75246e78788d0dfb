"""The calculator as a tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from volley_sandbox.tools.arithmetic import CalculatorError, calculate
from volley_sandbox.tools.base import Arguments, ToolFault, describe, read_arguments


class CalculatorArguments(Arguments):
    expression: str


CALCULATOR = describe(
    "calculator", "Evaluates an arithmetic expression with + - * / // % ** and parentheses.", CalculatorArguments
)


@dataclass(frozen=True, slots=True)
class CalculatorSession:
    tools = (CALCULATOR,)
    lane = None

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        try:
            return calculate(read_arguments(CalculatorArguments, arguments).expression)
        except CalculatorError as error:
            raise ToolFault(str(error)) from None

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""
