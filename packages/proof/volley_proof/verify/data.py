"""Verify the environments' data.

All evaluations and the environment service's record must name the same digests, and the code of submitted environments,
which is in the folder, must have them. Data files are read only if this user's
supervisor wrote the configuration: an untrusted folder must not choose files.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shared import codec
from shared.data_schema import DataSection
from shared.errors import DecodeError, VolleyError
from shared.files.reading import confined, read_file, whole_lines
from shared.run import checkpoint_files, trust
from shared.run.data import SOURCE, Digests, combined, differing, tree_digest
from shared.run.folder import RunFolder
from volley_proof.records import evaluations
from volley_proof.verify.violation import Violation, ViolationKind

_MOST_BYTES = 2**22
_MOST_VALUES = 2**16
_SHOWN = 16
_MOST_NAME = 200
_MOST_FILES, _MOST_SOURCE = 20_000, 2**30
"""Files and bytes of one submission, above all limits of the environment service."""


def check(folder: RunFolder, main: str) -> Iterator[Violation]:
    """Yield differences between digests.

    Args:
        main: the run's main environment, which its evaluations do not name.
    """
    known = dict[str, dict[str, str]]()
    for _, step, env, data in evaluations.measured(_lines(folder.evals), main):
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
            yield Violation(ViolationKind.CONFIG, f"{env} was evaluated with different data: {difference}", file=file)
    yield from _sources(folder, {env: {**recorded.get(env, {}), **known.get(env, {})} for env in {*known, *recorded}})


def _sources(folder: RunFolder, known: Mapping[str, Digests]) -> Iterator[Violation]:
    """Compare the code of submitted environments; a folder that has none of it was not the environment service's."""
    for env, digests in sorted(known.items()):
        name, _, number = env.partition("@")
        if (expected := digests.get(SOURCE)) is None or not (number.isdecimal() and number.isascii()):
            continue
        try:
            source = confined(folder.environments, f"{name}/{number}/{SOURCE}")
            if not source.parent.exists():
                continue
            why = None if _plain(source) and tree_digest(source) == expected else "it is not the code that was played"
        except (OSError, VolleyError) as error:
            why = f"it cannot be read: {error}"
        if why is not None:
            file = f"{folder.environments.name}/{name}/{number}/{SOURCE}"[:_MOST_NAME]
            yield Violation(ViolationKind.CONFIG, why, file=file)


def _plain(folder: Path) -> bool:
    """Return True if a folder holds plain files alone, and no more than a submission may."""
    entries = [one.lstat() for one in islice(folder.rglob("*"), _MOST_FILES + 1)]
    plain = all(stat.S_ISREG(one.st_mode) or stat.S_ISDIR(one.st_mode) for one in entries)
    return plain and len(entries) <= _MOST_FILES and sum(one.st_size for one in entries) <= _MOST_SOURCE


def changed(folder: RunFolder, data: DataSection) -> list[str]:
    """Configured files of the main environment whose content has changed since the run played them.

    They are not violations: the run may be over. Empty for a folder that is not trusted to name files.
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


def _lines(path: Path) -> list[bytes]:
    """Lines of a file; none if it cannot be read, which another check reports."""
    with suppress(OSError):
        return [*whole_lines(path)]
    return []


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
