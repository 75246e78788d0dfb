"""Compare the retained checkpoints with the log: checksums of their arrays, and their description.

A program of the trainer's virtual environment reads the arrays; if that is not installed, the result says so.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError
from shared.run import checksums
from shared.run.checkpoint_files import MANIFEST, PARAMS
from shared.run.checksums import Told
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from volley.layout import python_of, variables_of
from volley_proof.verify import budget
from volley_proof.verify.checkpoints import RetainedCheckpoint
from volley_proof.verify.violation import Violation, ViolationKind

ORBAX = f"{PARAMS}/manifest.ocdbt"
"""File of every checkpoint but those of the simulated trainer."""
_MODULE = "volley_proof.checkpoints.parameters"
_OF_ARRAYS = re.compile(r"[0-9a-f]{32}")
"""Format of the checksum of a trainer's arrays. The simulated trainer, with other files, uses another."""
_START_S, _BYTES_A_SECOND = 20.0, 10**7


def check(
    folder: RunFolder, found: Sequence[RetainedCheckpoint], records: Sequence[CommitRecord]
) -> tuple[list[Violation], list[str]]:
    """Differences found, and comparisons that could not be made."""
    witnesses = _by_log(folder, found, {record.version: record for record in records})
    manifests = {str(one.version): one.manifest for one in found}
    violations = [
        _of(folder, one, why)
        for one in found
        if (why := checksums.misdescribed(one.manifest, one.state, witnesses[one.version], manifests.get)) is not None
    ]
    readable = dict[str, RetainedCheckpoint]()
    for one in found:
        if not _is_there(folder, one):
            continue
        expected = [theirs[PARAMS] for _, theirs in witnesses[one.version] if PARAMS in theirs]
        if (folder.checkpoints / str(one.version) / ORBAX).exists():
            readable |= {str(one.version): one} if expected else {}
        elif any(map(_OF_ARRAYS.fullmatch, expected)):
            detail = f"it has no {ORBAX}, but the log has a checksum of its parameters"
            violations += [_of(folder, one, detail)] if _is_there(folder, one) else []
    missing = _not_compared(folder, [one for one in found if str(one.version) not in readable])
    if not readable:
        return violations, missing
    answer = _answer(folder, [*readable])
    if isinstance(answer, str):
        return violations, [f"parameters: {answer}", *missing]
    return violations + [
        _of(folder, one, why)
        for name, one in readable.items()
        if (why := _differs(answer, name, witnesses[one.version])) is not None and _is_there(folder, one)
    ], missing


def _not_compared(folder: RunFolder, absent: Sequence[RetainedCheckpoint]) -> list[str]:
    """Sentences on retained checkpoints whose parameters cannot be compared."""
    names = [str(one.version) for one in absent if _is_there(folder, one)]
    arrays = [name for name in names if (folder.checkpoints / name / ORBAX).exists()]
    others = [name for name in names if name not in arrays]
    whys = {"no step recorded their checksum; a run's first weights have none": arrays, "no Orbax arrays": others}
    return [f"parameters of {', '.join(found)}: {why}" for why, found in whys.items() if found]


def _is_there(folder: RunFolder, one: RetainedCheckpoint) -> bool:
    """Return True if no running trainer has removed it meanwhile."""
    return (folder.checkpoints / str(one.version) / MANIFEST).exists()


def _by_log(
    folder: RunFolder, found: Sequence[RetainedCheckpoint], records: Mapping[WeightVersion, CommitRecord]
) -> Mapping[WeightVersion, Sequence[Told]]:
    """Checksums in the log for each checkpoint."""
    try:
        lines = [*checksums.lines_of(folder, {checksums.made_as(one.state) for one in found})]
    except OSError:
        lines = []  # the check of the steps reports it
    return {one.version: checksums.witnesses(one.state, records, lines) for one in found}


def _differs(answer: Mapping[str, Any], version: str, log: Sequence[Told]) -> str | None:
    if (found := answer["checksums"].get(version)) is None:
        return str(answer["damaged"].get(version, "its arrays were not read"))
    return checksums.contradiction(found, log)


def _of(folder: RunFolder, one: RetainedCheckpoint, detail: str) -> Violation:
    file = f"{folder.checkpoints.name}/{one.version}"
    return Violation(ViolationKind.CHECKPOINT, detail, step=one.version.step, file=file)


def _answer(folder: RunFolder, versions: Sequence[str]) -> Mapping[str, Any] | str:
    """Result of the program, or the reason why there is none."""
    n_bytes = sum(_size(path) for version in versions for path in (folder.checkpoints / version).rglob("*"))
    try:
        python = python_of("trainer")
    except ConfigError as error:
        return f"not compared with the log: {error.detail}"

    command = [str(python), "-P", "-m", _MODULE, str(folder.path), *versions]
    seconds = _START_S + n_bytes / _BYTES_A_SECOND
    try:
        done = subprocess.run(
            command,
            env=variables_of("trainer", cpu=True),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise budget.NotFinished(f"the checkpoints were not read within {seconds:.0f} s: run it again") from error
    except OSError as error:
        damage = f"reading them failed: {type(error).__name__}"
        return {"checksums": {}, "damaged": dict.fromkeys(versions, damage)}
    return _with_unread(done, versions)


def _with_unread(done: subprocess.CompletedProcess[bytes], versions: Sequence[str]) -> Mapping[str, Any]:
    """Result of the program; checkpoints that it did not read are damaged, with the one at which it ended."""
    try:
        answer = orjson.loads(done.stdout.splitlines()[-1])
        checksums, damaged = dict(answer["checksums"]), dict(answer["damaged"])
    except (ValueError, IndexError, KeyError, TypeError):
        checksums, damaged = {}, {}
    unread = [version for version in versions if version not in checksums and version not in damaged]
    if unread:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        bound = (
            "it takes more memory or CPU time than checkpoints of its size do" if done.returncode < 0 else "no result"
        )
        damaged |= dict.fromkeys(unread, f"not compared: the process that read {unread[0]} ended with {how}: {bound}")
    return {"checksums": checksums, "damaged": damaged}


def _size(path: Path) -> int:
    """Size of a file in bytes; 0 if it is no file, or if a running trainer has removed it."""
    with suppress(OSError):
        if path.is_file():
            return path.stat().st_size
    return 0
