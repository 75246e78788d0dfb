"""Replay of a refused step: retrains the steps since the checkpoint before it, then its kept groups. Reads only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared import codec, config
from shared.config import LoadedConfig
from shared.errors import ConfigError, DecodeError, NonFinite
from shared.files import storage
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group, WeightVersion
from volley_proof.replay.recorded import RecordedStep

_NEVER_REFUSED = "choose a version that `refused.jsonl` in the run's folder names"
_MAX_DETAIL = 300


def replay(folder: Path, name: str) -> dict[str, Any]:
    """Retrain a refused step; return {ok, steps, refused, recorded}.

    `recorded` names the non-finite numbers of the refusal, `refused` those of the replay; `ok` if they are the same.

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
    """Read the non-finite numbers of the last refusal of `name`.

    Raises DecodeError that names an invalid line, and ConfigError if `name` was never refused.
    """
    path, what = RunFolder(folder).refused, None
    for number, text in enumerate(storage.whole_lines(path), start=1):
        version, found = _parsed(text, f"line {number} of {path}")
        what = found if version == name else what
    if what is None:
        raise ConfigError(f"{name} was never refused", _NEVER_REFUSED)
    return what


def _parsed(text: bytes, where: str) -> tuple[str, list[str]]:
    """Parse version and non-finite numbers."""
    line = codec.from_json(text, where)
    try:
        version, what = str(WeightVersion.parse(line["version"])), line["what"]
        if not isinstance(what, list) or not all(isinstance(name, str) for name in what):
            raise TypeError("`what` is not a list of names")
    except (KeyError, TypeError, DecodeError) as error:
        raise DecodeError(f"{where} is not a refusal: {error!r}"[:_MAX_DETAIL], "restore the run's own file") from error
    return version, what


def _again(folder: Path, stored: LoadedConfig, version: WeightVersion, file: Path) -> tuple[str, ...]:
    """Retrain up to the step; return the names of its non-finite numbers."""
    from services.trainer.groups.group_buffer import ready_group
    from volley_proof.replay.rebuild import RebuiltPolicy

    run = stored.config.run.name
    recorded = RecordedStep.read(folder, run)
    before = [step for step in recorded.checkpoints if step < version.step]
    if not before:
        raise ConfigError(f"no checkpoint before {version} is retained", "choose a newer version")
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
