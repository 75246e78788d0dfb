"""Protocols of remote environments, by name, with their settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shared.errors import InputError, TooLarge
from volley_sandbox.backends.remote.address import read_address
from volley_sandbox.backends.remote.site import RemoteAccess, RemoteContext
from volley_sandbox.backends.submitted import SubmittedBackend

MAX_TASKS_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class RemoteEnvironment:
    """A submitted remote environment: its address, protocol and settings.

    `tasks` holds JSON lines by split, for servers without tasks of their own.
    """

    protocol: str
    url: str
    config: Mapping[str, Any]
    tasks: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True, slots=True)
class RemoteProtocol[C: BaseModel]:
    """One protocol. `check_tasks` raises InputError for invalid tasks; None accepts no tasks."""

    config: type[C]
    open: Callable[[RemoteContext, C], SubmittedBackend]
    check_tasks: Callable[[Mapping[str, bytes]], None] | None = None


@cache
def protocols() -> Mapping[str, RemoteProtocol[Any]]:
    """Protocols by name. Their clients are imported when the first remote environment is used."""
    from volley_sandbox.backends.remote.nemo_gym import NemoGymBackend, NemoGymConfig
    from volley_sandbox.backends.remote.nemo_gym_rows import check_rows
    from volley_sandbox.backends.remote.openenv import OpenEnvBackend, OpenEnvConfig
    from volley_sandbox.backends.remote.volley import VolleyBackend, VolleyConfig

    return {
        "nemo_gym": RemoteProtocol(NemoGymConfig, NemoGymBackend, check_rows),
        "openenv": RemoteProtocol(OpenEnvConfig, OpenEnvBackend),
        "volley": RemoteProtocol(VolleyConfig, VolleyBackend),
    }


def checked(wanted: RemoteEnvironment) -> RemoteEnvironment:
    """Validate a remote environment and normalize its address. Raises InputError, TooLarge."""
    protocol = _protocol(wanted)
    try:
        _validated(protocol, wanted)
    except InputError as error:
        raise InputError(f"config: {error.detail}", error.hint) from error
    if protocol.check_tasks is not None:
        check_size(wanted.tasks)
        protocol.check_tasks(wanted.tasks)
    elif wanted.tasks:
        raise InputError(
            f"tasks: the protocol {wanted.protocol} accepts none", "remove tasks; its servers have their own"
        )
    return replace(wanted, url=str(read_address(wanted.url)))


def check_size(tasks: Mapping[str, bytes]) -> None:
    """Raises TooLarge."""
    if (size := sum(map(len, tasks.values()))) > MAX_TASKS_BYTES:
        raise TooLarge(f"the tasks have {size} bytes", f"the limit is {MAX_TASKS_BYTES}")


def open_remote(
    name: str,
    wanted: RemoteEnvironment,
    access: RemoteAccess,
    log: deque[str],
    splits: Mapping[str, int],
    has_demonstration: bool,
    folder: Path | None = None,
) -> SubmittedBackend:
    """Make the backend of an environment that passed `checked`, without connecting. Raises InputError."""
    protocol = _protocol(wanted)
    config = _validated(protocol, wanted)
    context = RemoteContext(name, read_address(wanted.url), access, log, splits, has_demonstration, folder)
    return protocol.open(context, config)


def _validated(protocol: RemoteProtocol[Any], wanted: RemoteEnvironment) -> Any:
    """Validate the settings of a protocol. Raises InputError."""
    from shared.web.http import validated  # imports FastAPI, which a check without a service does not need

    return validated(protocol.config, wanted.config, strict=False)


def _protocol(wanted: RemoteEnvironment) -> RemoteProtocol[Any]:
    known = protocols()
    if wanted.protocol not in known:
        raise InputError(f"protocol: {wanted.protocol[:80]!r} is unknown", f"use one of: {', '.join(known)}")
    return known[wanted.protocol]
