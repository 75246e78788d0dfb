"""Verify the environments' data.

All evaluations and the environment service's record must name the same digests. Data files are read only if this user's
supervisor wrote the configuration: an untrusted folder must not choose files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shared import codec
from shared.bounds import MAX_LINE_VALUES
from shared.data_schema import DataSection
from shared.errors import DecodeError
from shared.files.reading import read_file, whole_lines
from shared.run import checkpoint_files, trust
from shared.run.data import Digests, combined, differing
from shared.run.folder import RunFolder
from volley.verify.violation import Violation, ViolationKind

_MOST_BYTES = 2**22
_MOST_VALUES = 2**16
_SHOWN = 16


def check(folder: RunFolder, main: str) -> Iterator[Violation]:
    """Yield differences between digests.

    Args:
        main: the run's main environment, which its evaluations do not name.
    """
    known = dict[str, dict[str, str]]()
    for step, env, data in _measured(folder, main):
        first = known.setdefault(env, {})
        for part in differing(first, data):
            detail = f"the evaluation of {env} used other data than those before: {_difference(part, first, data)}"
            yield Violation(ViolationKind.CONFIG, detail, step=step, file=folder.evals.name)
        known[env] = {**data, **first}
    file = f"{folder.environments.name}/{folder.environment_data.name}"
    try:
        recorded = _recorded(folder)
    except (OSError, DecodeError, AttributeError, KeyError, TypeError) as error:
        yield Violation(ViolationKind.CONFIG, f"it cannot be read: {error!r}"[:200], file=file)
        return
    for env in sorted(known.keys() & recorded.keys()):
        for part in differing(known[env], recorded[env]):
            difference = _difference(part, known[env], recorded[env])
            yield Violation(ViolationKind.CONFIG, f"{env} was evaluated with other data: {difference}", file=file)


def changed(folder: RunFolder, data: DataSection) -> list[str]:
    """Configured files of the main environment whose content has changed since the run played them.

    They are no violations: the run may be over. Empty for a folder that is not trusted to name files.
    """
    if not trust.is_own(folder):
        return []
    with suppress(OSError, DecodeError, AttributeError, KeyError, TypeError):
        recorded = _recorded(folder).get(data.env, {})
        files = {part: path for part, path in (("train", data.train), ("eval", data.eval)) if path and part in recorded}
        found = {part: checkpoint_files.digest(path) for part, path in files.items() if path.is_file()}
        return [f"{files[part]}: {_difference(part, recorded, found)}" for part in differing(recorded, found)]
    return []


def _difference(part: str, was: Digests, now: Digests) -> str:
    return f"{part} has the digest {now[part][:_SHOWN]}, it was {was[part][:_SHOWN]}"


def _measured(folder: RunFolder, main: str) -> Iterator[tuple[int | None, str, Digests]]:
    """Yield step, environment and digests of each evaluation; other checks report unreadable lines."""
    try:
        for line in whole_lines(folder.evals):
            row = _object(line)
            data, step = row.get("data"), row.get("step")
            if isinstance(data, dict) and all(isinstance(one, str) for one in data.values()):
                yield step if isinstance(step, int) else None, str(row.get("env") or main), data
    except OSError:
        return


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        row = codec.from_json(line, "a line of evaluations", MAX_LINE_VALUES)
    except DecodeError:
        return {}
    return row if isinstance(row, dict) else {}


def _recorded(folder: RunFolder) -> dict[str, dict[str, str]]:
    """Raises OSError, DecodeError, or AttributeError, KeyError or TypeError for a malformed record."""
    try:
        text = read_file(folder.environment_data, _MOST_BYTES)
    except FileNotFoundError:
        return {}
    raw = codec.from_json(text, folder.environment_data.name, _MOST_VALUES)
    return {
        str(env): combined({str(part): str(one["digest"]) for part, one in parts.items()}) for env, parts in raw.items()
    }
