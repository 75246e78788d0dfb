"""Trains a refused step again: the groups that were kept, on the retained checkpoint before it, and the steps between.
Reads only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.trainer.replay.recorded import RecordedStep
from shared import codec, config
from shared.config import LoadedConfig
from shared.errors import ConfigError, DecodeError, NonFinite
from shared.files import storage
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group, WeightVersion

_NEVER_REFUSED = "`refused.jsonl` in the run's folder names those there are"
_MAX_DETAIL = 300


def replay(folder: Path, name: str) -> dict[str, Any]:
    """{ok, steps, refused, recorded}: `recorded` is what was not finite then, `refused` what is not now, `ok` if it is
    the same.

    Raises ConfigError, WeightsError, DecodeError.
    """
    version, then = WeightVersion.parse(name), _recorded(folder, name)
    groups = RunFolder(folder).refused_groups
    file = next((path for found, path in reversed(archive.refused(groups)) if found == version), None)
    if file is None:
        raise ConfigError(f"the groups of {name} are not in {groups}", _NEVER_REFUSED)
    found = _again(folder, config.stored(folder), version, file)
    return {"ok": list(found) == then, "steps": 1, "refused": found, "recorded": then}


def _recorded(folder: Path, name: str) -> list[str]:
    """What was not finite when `name` was last refused. Raises DecodeError naming a line that is none, ConfigError
    without one.
    """
    path, what = RunFolder(folder).refused, None
    for number, text in enumerate(storage.whole_lines(path), start=1):
        version, found = _parsed(text, f"line {number} of {path}")
        what = found if version == name else what
    if what is None:
        raise ConfigError(f"{name} was never refused", _NEVER_REFUSED)
    return what


def _parsed(text: bytes, where: str) -> tuple[str, list[str]]:
    """Version, and what was not finite."""
    line = codec.from_json(text, where)
    try:
        version, what = str(WeightVersion.parse(line["version"])), line["what"]
        if not isinstance(what, list) or not all(isinstance(name, str) for name in what):
            raise TypeError("`what` is no list of names")
    except (KeyError, TypeError, DecodeError) as error:
        raise DecodeError(
            f"{where} is not that of a refusal: {error!r}"[:_MAX_DETAIL], "put the run's own file back"
        ) from error
    return version, what


def _again(folder: Path, stored: LoadedConfig, version: WeightVersion, file: Path) -> tuple[str, ...]:
    """What is not finite after the step; empty if it all is."""
    from services.trainer.groups.group_buffer import ready_group
    from services.trainer.replay.rebuild import RebuiltPolicy

    run = stored.config.run.name
    recorded = RecordedStep.read(folder, run)
    before = [step for step in recorded.checkpoints if step < version.step]
    if not before:
        raise ConfigError(f"there is no checkpoint before {version}", "choose a newer one")
    start = max(before)
    first = version if start + 1 == version.step else recorded.version(start + 1)
    rebuilt = RebuiltPolicy(
        recorded.config_of(first.epoch, stored), recorded.checkpoints[start], recorded.checkpoints[start].parent
    )
    for step in range(start + 1, version.step + 1):
        at = version if step == version.step else recorded.version(step)
        path = file if step == version.step else archive.path_of(RunFolder(folder).archive, at)
        payloads = archive.read_file(path, run, at)
        held = [ready_group(Group.decode(payload), payload, "") for payload in payloads]
        try:
            rebuilt.policy_for(recorded.config_of(at.epoch, stored)).step(held, WeightVersion(at.epoch, step - 1))
        except NonFinite as error:
            return error.what
    return ()
