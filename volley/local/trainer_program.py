"""Programs of the trainer's virtual environment that a command runs to their end: what they print is a JSON object a
line, the last of which is the result, or an error as a problem body.
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
    """The last line; each is given to `on_line`. Raises the VolleyError that the program tells of, one if it ends
    without a result, and ConfigError where the environment is not installed.
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
        raise VolleyError(f"{module} ended with code {process.returncode} and without a result")
    return last


def _parsed(line: bytes) -> dict[str, Any]:
    """Empty for what a library wrote to the same place."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
