"""The check of an environment before a run: every row's reward, then the validation that the service would make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from volley_python.submissions.source import Content
from volley_sandbox.commands.trial import validated
from volley_sandbox.submissions.findings import missing_package

_NETWORK = re.compile(r"raised (?:\w+\.)*(?:URLError|gaierror|Connect\w*|Connection\w*|MaxRetryError)\b")
_CHECKED = re.compile(r"^Checked: (\{.*\})$", re.MULTILINE)
_PASSED = "passed.json"


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """Number of rows whose reward was computed, the seconds it took, and the characters of the tools' schemas."""

    rows: int
    seconds: float
    tools: int = 0


def check(content: bytes, folder: Path, rewards: str, tools: str = "") -> RewardTrial:
    """Check an archive in this machine's sandbox, once. Raises ConfigError with the first mistake.

    Args:
        folder: where the archive is; a file there says that it has passed.
        rewards, tools: names of the files, for errors.
    """
    if (passed := folder / _PASSED).is_file():
        return RewardTrial(**orjson.loads(passed.read_bytes()))
    packed = Content("data", content, archive=True)
    loads = _failed(packed, {"check": True})
    match = _CHECKED.search(loads[1] if loads else "")
    if match is None:
        raise ConfigError(_one_line(loads, rewards, tools), (loads and loads[2]) or "correct the file")
    found: dict[str, Any] = orjson.loads(match[1])
    if "wrong" in found:
        wrong = str(found["wrong"])
        offline = "rewards have no network: keep what they need in columns, or in modules beside the file"
        told = offline if _NETWORK.search(wrong) else "correct the reward; an answer may be any text"
        raise ConfigError(wrong, missing_package(wrong) or told)
    if failed := _failed(packed, {}):
        raise ConfigError(_one_line(failed, rewards, tools), failed[2])
    trial = RewardTrial(**found)
    passed.write_bytes(orjson.dumps(trial))
    return trial


def _failed(packed: Content, config: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Validate. Returns name, detail and hint of the first check that failed. Raises ConfigError."""
    _, report = validated(packed, config=config)
    if report is None:
        raise ConfigError("the rewards cannot be tried on this machine, see the line above")
    failed = next((one for one in report["checks"] if not one["ok"]), None)
    return None if failed is None else (failed["name"], failed["detail"], failed["hint"])


def _one_line(failed: tuple[str, str, str] | None, rewards: str, tools: str) -> str:
    """The file that failed, the error and its place there."""
    if failed is None:
        return f"{rewards}: the check of the rewards did not end"
    lines = [line.strip() for line in failed[1].splitlines()]
    own = [line for line in lines[1:] if "volley_rows.py" not in line and "volley_tools.py" not in line]
    place = " ".join(own[-1:])
    of_tools = tools and (lines[0].startswith("NoTool: ") or f'"{tools}"' in place)
    error = lines[0].removeprefix("NoTool: ").removeprefix("WrongReward: ")
    return f"{tools if of_tools else rewards}: {error} {place}".rstrip()
