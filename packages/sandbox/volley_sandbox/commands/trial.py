"""Validate an environment in this machine's sandbox, as the service would, without a service."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from shared.config import load
from volley.layout import CACHE, PROJECT, python_of, variables_of
from volley_python.submissions.source import Content

_CHECK = "volley_sandbox.submissions.check"
_ANY_RUN = {"model": {"path": "none"}, "data": {"env": "sokoban"}}
"""Required keys of a configuration besides settings of the environment service."""


def validated(
    content: Content,
    entry: str | None = None,
    config: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    *,
    seen: Callable[[Mapping[str, Any]], None] = lambda check: None,
) -> tuple[int, Mapping[str, Any] | None]:
    """Run the validation. Returns its exit code, and its report if it wrote one. Raises ConfigError.

    Args:
        entry: the environment's class, if the file has several.
        config: arguments of the class.
        settings: settings of the environment service, as services.env.KEY=VALUE.
        seen: gets each check as it ends.
    """
    section = load([], settings, given=_ANY_RUN).config.services.env
    asked = {"name": content.name or "environment", "archive": content.archive, "entry": entry}
    asked |= {"config": dict(config or {}), "section": section.model_dump(mode="json", exclude_unset=True)}
    command = [
        str(python_of("base")),
        "-m",
        _CHECK,
        str(CACHE),
        orjson.dumps(asked).decode(),
    ]
    report: Mapping[str, Any] | None = None
    with tempfile.TemporaryFile() as given:
        given.write(content.data)
        given.seek(0)
        with subprocess.Popen(
            command, cwd=PROJECT, env=variables_of("base", cpu=True), stdin=given, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = orjson.loads(line)
                if "checks" in found:
                    report = found
                else:
                    seen(found)
    return process.returncode, report
