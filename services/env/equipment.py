"""Tools and sandboxes for environments of the catalogue, provided by an installed package (see `extension`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from services.env.backend import EnvironmentBackend


@runtime_checkable
class EquippedBackend(Protocol):
    """Backend of the environment `base` with tools."""

    @property
    def base(self) -> EnvironmentBackend: ...

    async def check_tools(self) -> None:
        """Try the tools that depend on the configuration alone. Raises InputError, Busy, Unavailable."""
        ...


class GivenTools(Protocol):
    """Tools that a configuration gives to an environment."""

    def check_requested(self) -> None:
        """Raises Forbidden for settings that a request may not make."""
        ...

    def around(self, name: str, backend: EnvironmentBackend) -> EnvironmentBackend:
        """Return the backend with the tools, as an `EquippedBackend`."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return their settings, as they are shown with the environment's."""
        ...


class Equipment(Protocol):
    """Resources of environments; kinds that run programs in sandboxes get them too."""

    def split(self, kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], GivenTools | None]:
        """Split an environment's own settings from those of its tools. Raises InputError."""
        ...
