"""Exact arithmetic on rational numbers for model-written expressions, bounded in length, depth and size.

Only numbers, + - * / // % ** and parentheses are accepted; names, calls, attributes and strings are rejected. No input
takes more than about a millisecond, because every intermediate result is bounded before it is computed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_BITS = 2048
MAX_EXPONENT = 128
SHOWN_DIGITS, MAX_DIGITS = 10, 30
"""Significant digits: of a value without an exact decimal, and the most of one that has one."""

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(Exception):
    """The expression has no value; the text gives the reason, for a model to act on."""


def calculate(expression: str) -> str:
    """Value of `expression` as text. Raises CalculatorError.

    Exact if it is whole or a decimal of at most 30 digits, otherwise with ten significant digits.
    """
    return show(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Exact value. Raises CalculatorError."""
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"the expression is longer than {MAX_CHARACTERS} characters")
    text = _THOUSANDS.sub("", expression).strip()
    try:
        tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError("not a valid arithmetic expression") from None


def show(value: Fraction) -> str:
    """Decimal text of a rational number."""
    if value.denominator == 1:
        return str(value.numerator)
    exact = Context(prec=MAX_DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    if Fraction(exact) == value and len(exact.as_tuple().digits) > SHOWN_DIGITS:
        return f"{exact:f}"
    try:
        return f"{float(value):.10g}"
    except OverflowError:
        raise CalculatorError("the result is too large") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp() if type(node.op) in _BINARY:
            return _combine(_BINARY[type(node.op)], _value(node.left, text), _value(node.right, text))
        case _:
            raise CalculatorError("only numbers, + - * / // % ** and parentheses are allowed")


def _number(literal: str) -> Fraction:
    """Exact value of a decimal literal. Raises CalculatorError on other bases and on extreme exponents."""
    mantissa, _, exponent = literal.lower().partition("e")
    if literal[:2].lower() in ("0x", "0o", "0b") or len(exponent.lstrip("+-0")) > 2:
        raise CalculatorError(f"{literal} is not a plain decimal number")
    return _bounded(Fraction(mantissa.replace("_", "")) * Fraction(10) ** int(exponent or 0))


def _combine(apply: Callable[[Fraction, Fraction], Fraction | int], left: Fraction, right: Fraction) -> Fraction:
    try:
        return _bounded(Fraction(apply(left, right)))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise CalculatorError(f"exponents must be whole numbers up to {MAX_EXPONENT}")
    if _bits(base) * abs(exponent) > MAX_BITS:
        raise CalculatorError("the result is too large")
    try:
        return base ** int(exponent)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculatorError("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
