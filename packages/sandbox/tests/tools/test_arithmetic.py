import contextlib
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volley_sandbox.tools.arithmetic import CalculatorError, calculate, evaluate

numbers = st.decimals(-1000, 1000, places=2).map(str)


expressions = st.recursive(
    numbers, lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})")
)


@given(expressions.filter(lambda text: len(text) <= 200))
def test_value_is_exact(expression: str) -> None:
    """Against Python's own arithmetic on fractions."""
    exact = eval(re.sub(r"\d+\.\d+", lambda m: f"Fraction('{m[0]}')", expression), {"Fraction": Fraction})
    assert evaluate(expression) == exact


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("48/2", "24"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("1,000*3", "3000"),
        ("-2**2", "-4"),
        ("2**-1", "0.5"),
        ("7//2", "3"),
        ("7%4", "3"),
        (" ( 1 + 2 ) * 3 ", "9"),
        ("1e3", "1000"),
        (".5*4", "2"),
        ("2**100", str(2**100)),
    ],
)
def test_results(expression: str, shown: str) -> None:
    assert calculate(expression) == shown


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "9**9**9",
        "9**999999999",
        "2**0.5",
        "(2**128)**128",
        "1/0",
        "0**-1",
        "1%0",
        "1e999",
        "1e-999999999",
        "0x10",
        "True",
        "1j",
        "'a'*9",
        "[1]*9",
        "__import__('os')",
        "(1).__class__",
        "x",
        "1 if 1 else 2",
        "1<2",
        "1&2",
        "1;2",
        "1\n2",
        "1,2",
        "\0",
        "½",
        "(" * 100 + "1" + ")" * 99,
        "9" * 201,
        "*".join(["9**64"] * 25),
        "lambda: 1",
        "f'{1}'",
    ],
)
def test_hostile_expressions_are_refused_at_once(expression: str) -> None:
    started = time.thread_time()
    with pytest.raises(CalculatorError, match=r"\w"):
        calculate(expression)
    assert time.thread_time() - started < 0.2


@pytest.mark.parametrize("expression", ["(" * 90 + "1" + ")" * 90, "-" * 198 + "1", "+1" * 100, "9" * 200])
def test_deep_and_long_expressions_are_harmless(expression: str) -> None:
    assert int(calculate(expression))


@given(st.text(max_size=60) | st.text(alphabet="0123456789+-*/%(). e_", max_size=200))
def test_any_text_has_a_value_or_a_reason(expression: str) -> None:
    with contextlib.suppress(CalculatorError):
        assert len(calculate(expression)) < 700


@pytest.mark.parametrize(
    ("expression", "value"), [("1234567890.25", "1234567890.25"), ("1/3", "0.3333333333"), ("1/8", "0.125")]
)
def test_a_decimal_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value
