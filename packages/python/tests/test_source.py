"""Source of functions that a script or a notebook hands over."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from tests.support import records
from volley_python.source import definitions, source_of

PROGRAM = '''
from __future__ import annotations

import json
import re as regular
from math import *

LIMIT: float = 3
WORDS = {"a": LIMIT}
made = print("made anew")


def helper(x: str) -> list[str]:
    return [z for z in x.split() if regular.match("a", z)]


def unused() -> None:
    json.loads("1")


@functools.cache
def kept(completion, row):
    """Doc."""

    def inner(q):
        return q + WORDS["a"]

    class Inner:
        value = inner

    return float(len(helper(completion)) + Inner.value(1))


import functools
'''


def test_a_function_comes_with_what_it_uses_and_with_nothing_else() -> None:
    found = definitions([PROGRAM], ["kept"])
    assert "from __future__ import annotations" in found
    for one in ("import re as regular", "LIMIT: float", "WORDS =", "def helper", "@functools.cache\ndef kept"):
        assert one in found
    for one in ("import json", "made =", "def unused", "from math"):
        assert one not in found
    names: dict[str, Any] = {}
    exec(found.replace("@functools.cache\n", ""), names)  # its import comes later, as in the program
    assert names["kept"]("a ab b", {}) == 2 + 1 + 3


def test_a_later_cell_replaces_an_earlier_one_and_broken_cells_are_skipped() -> None:
    cells = ["def f(): return 1", "%timeit f()", "def f(): return g()", "def g(): return 2", "x = f("]
    assert definitions(cells, ["f"]) == "def f(): return g()\n\ndef g(): return 2\n"


def test_names_that_nothing_defines_are_named() -> None:
    with pytest.raises(ConfigError, match="f uses model, which the program does not define"):
        definitions(["def f(x): return model(x)", "for model in (): pass"][:1], ["f"])


def nested() -> Any:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completion, row: 1.0, "a lambda has no name"),
        (nested(), "is defined inside another function"),
        (functools.partial(print, "x"), "is a partial, not a function with source"),
        (len, "is a builtin_function_or_method, not a function"),
        (str.upper, "is a method_descriptor, not a function"),
    ],
)
def test_a_function_without_source_of_its_own_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        source_of(function)
    assert error.value.hint is not None


def test_a_function_of_a_module_comes_with_the_whole_module() -> None:
    name = next(name for name, value in vars(records).items() if getattr(value, "__module__", "") == records.__name__)
    assert source_of(getattr(records, name)) == Path(records.__file__).read_text(encoding="utf-8")


def test_a_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from volley_python.source import source_of\n\n\nSCALE = 2.0\n\n\n"
        "def reward(completion, row):\n    return SCALE * len(completion)\n\n\nprint(source_of(reward))\n",
        encoding="utf-8",
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, encoding="utf-8", check=True)
    assert ended.stdout == "SCALE = 2.0\n\ndef reward(completion, row):\n    return SCALE * len(completion)\n\n"
