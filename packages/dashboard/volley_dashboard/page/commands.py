"""Commands that a page shows for copying, quoted for a shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.visible import is_visible, quoted
from volley_python.client.run_reader import RunSummary


def of_run(run: RunSummary) -> list[dict[str, Any]]:
    """Return the commands that work on a run with weights, as text and whether it may be copied."""
    found = [_command("verify", run.path), _command("export", run.path, "model")]
    if run.algorithm not in ("sft", "dpo") and run.step:
        replay = _command("replay", run.path, "--from-step", run.step - 1)
        found += [replay, _command("eval", run.path)]
    if run.state in ("stopped", "failed"):
        found.append(_command("up", run.path))
    return found


def of_ticket(path: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the commands that repeat a ticket."""
    step = found["step"]
    return [
        _command("replay", path, "--from-step", step - 1, "--to-step", step, "--tokens"),
        _command("reverify", path, "--env", found["env"]),
    ]


def _command(*words: object) -> dict[str, Any]:
    return {"text": quoted("volley", *words), "copy": all(map(is_visible, words))}
