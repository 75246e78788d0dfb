"""The parameters of the retained checkpoints against the checksums of the commit records.

Their arrays are read by a process of the trainer's virtual environment, for the CLI has no library that can. Where that
is not installed the result says so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from services.cli.layout import python_of, variables_of
from services.cli.verify import budget
from services.cli.verify.checkpoints import RetainedCheckpoint
from services.cli.verify.violation import Violation, ViolationKind
from shared.errors import ConfigError
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.state import epoch_of
from shared.run.weights import MANIFEST
from shared.types import WeightVersion

_ORBAX = "params/manifest.ocdbt"
_MODULE = "services.trainer.checkpoints.parameters"
_START_S, _BYTES_A_SECOND = 20.0, 10**7


def check(
    folder: RunFolder, found: Sequence[RetainedCheckpoint], records: Sequence[CommitRecord]
) -> tuple[list[Violation], list[str]]:
    """Differences found, and comparisons that could not be made."""
    known = {record.version: record.checksum for record in records}
    expected = dict[WeightVersion, str]()
    for one in found:
        version, step = one.version, one.version.step
        made = WeightVersion(epoch_of(step, one.state.lineage) or version.epoch, step)
        checksum = known.get(version) or known.get(made)  # an epoch begins with the parameters of the step before it
        if checksum is not None and (folder.checkpoints / str(version) / _ORBAX).exists():
            expected[version] = checksum
    absent = [str(one.version) for one in found if one.version not in expected]
    why = "no commit record tells their checksum, or they are no arrays of Orbax"
    missing = [f"parameters of {', '.join(absent)}: {why}"] if absent else []
    if not expected:
        return [], missing
    told = _told(folder, [one for one in found if one.version in expected])
    if isinstance(told, str):
        return [], [f"parameters: {told}", *missing]
    return [
        Violation(ViolationKind.CHECKPOINT, detail, step=version.step, file=f"{folder.checkpoints.name}/{version}")
        for version, checksum in expected.items()
        if (detail := _differs(told, str(version), checksum)) is not None
        and (folder.checkpoints / str(version) / MANIFEST).exists()  # else a running trainer has removed it
    ], missing


def _differs(told: Mapping[str, Any], version: str, expected: str) -> str | None:
    if (why := told["damaged"].get(version)) is not None:
        return str(why)
    found = told["checksums"].get(version)
    return None if found == expected else f"the checksum of its parameters is {found}, the log says {expected}"


def _told(folder: RunFolder, found: Sequence[RetainedCheckpoint]) -> Mapping[str, Any] | str:
    """Answer of the process, or the reason why there is none."""
    versions = [str(one.version) for one in found]
    n_bytes = sum(path.stat().st_size for version in versions for path in _files(folder.checkpoints / version))
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
    """What the process said, and of the checkpoints that it was not able to read: at which of them it ended."""
    try:
        told = orjson.loads(done.stdout.splitlines()[-1])
        checksums, damaged = dict(told["checksums"]), dict(told["damaged"])
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


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
