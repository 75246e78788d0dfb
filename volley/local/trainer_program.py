"""Run a program of the trainer's virtual environment to its end.

The program prints one JSON object per line; the last one is the result, or an error as a problem body.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from shared.errors import VolleyError, from_problem
from volley.layout import python_of


def run(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    on_line: Callable[[Mapping[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the program, call `on_line` with each line's object, and return the last one.

    Raises the VolleyError that the program prints, VolleyError if it ends without a result, and ConfigError if the
    environment is not installed.
    """
    last: dict[str, Any] = {}
    command = [str(python_of("trainer")), "-P", "-m", module, *arguments]
    with subprocess.Popen(command, env=dict(variables), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = _parsed(line)
            on_line(last)
    if "title" in last:
        raise from_problem(last["status"], last)
    if "ok" not in last:
        raise VolleyError(f"{module} ended with exit code {process.returncode} and no result")
    return last


def _parsed(line: bytes) -> dict[str, Any]:
    """Object on a line; empty for output of libraries."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
