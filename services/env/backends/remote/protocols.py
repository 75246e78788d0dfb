"""The protocols that remote environments speak, by name, with the settings that each takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from services.env.backends.base import SubmittedBackend
from services.env.backends.remote.address import RemoteAddress, read_address
from services.env.backends.remote.site import RemoteAccess
from shared.errors import InputError
from shared.web.http import validated


@dataclass(frozen=True, slots=True)
class RemoteEnvironment:
    """What a submission names: an address, the protocol that is spoken there, and its settings."""

    protocol: str
    url: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RemoteProtocol[C: BaseModel]:
    config: type[C]
    open: Callable[[str, RemoteAddress, C, RemoteAccess, deque[str], Mapping[str, int], bool], SubmittedBackend]


@cache
def protocols() -> Mapping[str, RemoteProtocol[Any]]:
    """By name. Their clients are imported when somebody submits, or has submitted, a remote environment."""
    from services.env.backends.remote.openenv import OpenEnvBackend, OpenEnvConfig
    from services.env.backends.remote.volley import VolleyBackend, VolleyConfig

    return {
        "openenv": RemoteProtocol(OpenEnvConfig, OpenEnvBackend),
        "volley": RemoteProtocol(VolleyConfig, VolleyBackend),
    }


def checked(wanted: RemoteEnvironment) -> RemoteEnvironment:
    """The same, its address written in one way. Raises InputError."""
    protocol = _protocol(wanted)
    try:
        validated(protocol.config, wanted.config, strict=False)
    except InputError as error:
        raise InputError(f"config: {error.detail}", error.hint) from error
    return RemoteEnvironment(wanted.protocol, str(read_address(wanted.url)), wanted.config)


def open_remote(
    name: str,
    wanted: RemoteEnvironment,
    access: RemoteAccess,
    log: deque[str],
    splits: Mapping[str, int],
    has_demonstration: bool,
) -> SubmittedBackend:
    """The backend of what `checked` has found right; nothing is connected yet. Raises InputError."""
    protocol = _protocol(wanted)
    config = validated(protocol.config, wanted.config, strict=False)
    return protocol.open(name, read_address(wanted.url), config, access, log, splits, has_demonstration)


def _protocol(wanted: RemoteEnvironment) -> RemoteProtocol[Any]:
    known = protocols()
    if wanted.protocol not in known:
        raise InputError(f"protocol: there is none {wanted.protocol[:80]!r}", f"there are: {', '.join(known)}")
    return known[wanted.protocol]
