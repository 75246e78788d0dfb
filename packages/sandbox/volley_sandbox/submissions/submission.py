"""Submissions: a Python file, a zip file or wheel, or the address of a remote environment."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.env.catalogue import check_name
from shared.errors import Forbidden, InputError, TooLarge
from volley_sandbox.backends.remote.protocols import RemoteEnvironment, checked
from volley_sandbox.backends.submitted import EnvironmentDescription
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.submissions.record import SubmittedVersion, Transition

MAX_SOURCE = 256 * 1024
"""Bytes of one Python file."""
MAX_ARCHIVE = 4 * 2**20
"""Bytes of a zip file or wheel, packed."""
TASKS = "tasks"
"""Folder with the files from which a remote environment's tasks are made."""
MIN_TIER = 1
"""Lowest tier of a sandbox that may run submitted code."""
_RESERVED = frozenset({"environments", "episodes", "splits", "num_tasks", "task", "demonstration", "test"})
"""Names that are parts of the service's paths."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission: a Python file, an `archive` (zip or wheel), or a remote environment.

    `entry` names the class if there are several (in an archive `package.module:Class`); `config` holds its arguments,
    or the settings of the remote's protocol; `weight` is the share in live runs, relative to 1 for the run's own
    environment, and 0 joins none.
    """

    name: str
    source: bytes | RemoteEnvironment
    entry: str | None = None
    config: Mapping[str, Any] | None = None
    weight: float = 0.0
    archive: bool = False

    @property
    def remote(self) -> RemoteEnvironment | None:
        return self.source if isinstance(self.source, RemoteEnvironment) else None

    @property
    def content(self) -> bytes:
        """Bytes from which the version's digest is computed."""
        if isinstance(self.source, bytes):
            return self.source
        tasks = [split.encode() + b"\n" + text for split, text in sorted(self.source.tasks.items())]
        return b"\n".join([f"{self.source.protocol} {self.source.url}".encode(), *tasks])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def check_size(content: bytes, *, archive: bool) -> None:
    """Raises InputError, TooLarge."""
    most = MAX_ARCHIVE if archive else MAX_SOURCE
    if len(content) > most:
        raise TooLarge(f"the source has {len(content)} bytes", f"send at most {most} bytes")
    if not content.strip():
        raise InputError("the source is empty", "send a Python file: curl --data-binary @environment.py")
    if archive:
        return
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"the source is not UTF-8: {error}", "send a Python file in UTF-8") from error


async def check_admission(wanted: Submission, sandboxes: Sandboxes, unsandboxed: Collection[str]) -> Submission:
    """Check that a submission may run here, and validate remote tasks.

    Args:
        unsandboxed: names that may be submitted on a machine without an adequate sandbox.

    Raises InputError, TooLarge, Forbidden.
    """
    check_name(wanted.name)
    if wanted.name in _RESERVED:
        raise InputError(f"{wanted.name!r} is reserved for the service's own paths", "choose another name")
    if isinstance(wanted.source, RemoteEnvironment):
        return replace(wanted, source=await asyncio.to_thread(checked, wanted.source))
    tier = await sandboxes.probe()
    if tier.level < MIN_TIER and wanted.name not in unsandboxed:
        raise Forbidden(
            f"this machine cannot confine submitted code: {'; '.join(tier.missing)}",
            f"to allow it anyway, set services.env.unsandboxed: [{wanted.name}] in the run's configuration",
        )
    return wanted


def stored_files(remote: RemoteEnvironment) -> Mapping[str, bytes]:
    """Files to store for a remote environment: its tasks."""
    return {f"{TASKS}/{split}.jsonl": text for split, text in remote.tasks.items()}


def numbered(wanted: Submission, number: int, protocol: str) -> SubmittedVersion:
    """Make the version record of a submission.

    Args:
        protocol: empty if only the validation can determine it.
    """
    return SubmittedVersion(
        name=wanted.name,
        version=number,
        entry=wanted.entry,
        config=dict(wanted.config or {}),
        weight=wanted.weight,
        url=wanted.remote.url if wanted.remote else None,
        archive=wanted.archive,
        protocol=protocol,
        digest=wanted.digest,
        size=len(wanted.content),
        history=(Transition(state="submitted", at=time.time()),),
    )


def described(version: SubmittedVersion, known: EnvironmentDescription | None) -> SubmittedVersion:
    """The version with what its validation has found out so far."""
    if known is None:
        return version
    found = {"splits": known.splits, "has_demonstration": known.has_demonstration, "agent": known.agent}
    return version.model_copy(update=found)


def is_same(version: SubmittedVersion, wanted: Submission) -> bool:
    """Compare a submission with an existing version. An `entry` that was found may be left out."""
    made_from = (version.digest, version.config, version.weight)
    return made_from == (wanted.digest, dict(wanted.config or {}), wanted.weight) and wanted.entry in (
        None,
        version.entry,
    )
