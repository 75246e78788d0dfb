"""The protocols that remote environments speak, by name, with the settings that each takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.env.backend import SubmittedBackend
from services.env.backends.remote.address import read_address
from services.env.backends.remote.site import RemoteAccess, RemoteContext
from shared.errors import InputError, TooLarge
from shared.web.http import validated

MAX_TASKS_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class RemoteEnvironment:
    """What a submission names: an address, the protocol that is spoken there, and its settings; and what it brings for
    servers that have no tasks of their own: JSON lines by split.
    """

    protocol: str
    url: str
    config: Mapping[str, Any]
    tasks: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True, slots=True)
class RemoteProtocol[C: BaseModel]:
    """`check_tasks` raises InputError for tasks that cannot be played; without it, none are taken."""

    config: type[C]
    open: Callable[[RemoteContext, C], SubmittedBackend]
    check_tasks: Callable[[Mapping[str, bytes]], None] | None = None


@cache
def protocols() -> Mapping[str, RemoteProtocol[Any]]:
    """By name. Their clients are imported when somebody submits, or has submitted, a remote environment."""
    from services.env.backends.remote.nemo_gym import NemoGymBackend, NemoGymConfig
    from services.env.backends.remote.nemo_gym_rows import check_rows
    from services.env.backends.remote.openenv import OpenEnvBackend, OpenEnvConfig
    from services.env.backends.remote.volley import VolleyBackend, VolleyConfig

    return {
        "nemo_gym": RemoteProtocol(NemoGymConfig, NemoGymBackend, check_rows),
        "openenv": RemoteProtocol(OpenEnvConfig, OpenEnvBackend),
        "volley": RemoteProtocol(VolleyConfig, VolleyBackend),
    }


def checked(wanted: RemoteEnvironment) -> RemoteEnvironment:
    """The same, its address written in one way. Raises InputError, TooLarge."""
    protocol = _protocol(wanted)
    try:
        validated(protocol.config, wanted.config, strict=False)
    except InputError as error:
        raise InputError(f"config: {error.detail}", error.hint) from error
    if protocol.check_tasks is not None:
        check_size(wanted.tasks)
        protocol.check_tasks(wanted.tasks)
    elif wanted.tasks:
        raise InputError(f"tasks: the protocol {wanted.protocol} takes none", "its servers have tasks of their own")
    return replace(wanted, url=str(read_address(wanted.url)))


def check_size(tasks: Mapping[str, bytes]) -> None:
    """Raises TooLarge."""
    if (size := sum(map(len, tasks.values()))) > MAX_TASKS_BYTES:
        raise TooLarge(f"the tasks have {size} bytes", f"at most {MAX_TASKS_BYTES} are taken")


def open_remote(
    name: str,
    wanted: RemoteEnvironment,
    access: RemoteAccess,
    log: deque[str],
    splits: Mapping[str, int],
    has_demonstration: bool,
    folder: Path | None = None,
) -> SubmittedBackend:
    """The backend of what `checked` has found right; nothing is connected yet. Raises InputError."""
    protocol = _protocol(wanted)
    config = validated(protocol.config, wanted.config, strict=False)
    context = RemoteContext(name, read_address(wanted.url), access, log, splits, has_demonstration, folder)
    return protocol.open(context, config)


def _protocol(wanted: RemoteEnvironment) -> RemoteProtocol[Any]:
    known = protocols()
    if wanted.protocol not in known:
        raise InputError(f"protocol: there is none {wanted.protocol[:80]!r}", f"there are: {', '.join(known)}")
    return known[wanted.protocol]
