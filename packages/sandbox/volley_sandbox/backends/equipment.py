"""Tools and sandboxes for built-in environments, as the catalogue gives them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.env.backend import EnvironmentBackend
from shared.errors import InputError
from volley_sandbox.backends.tools import WithTools
from volley_sandbox.tools.settings import check_requested, split_config
from volley_sandbox.tools.toolset import Toolbox, ToolSet


@dataclass(frozen=True, slots=True)
class ToolSetTools:
    """The tools of one configuration."""

    tool_set: ToolSet

    def check_requested(self) -> None:
        check_requested(self.tool_set.config)

    def around(self, name: str, backend: EnvironmentBackend) -> WithTools:
        return WithTools(name, backend, self.tool_set)

    def describe(self) -> Mapping[str, Any]:
        return self.tool_set.config.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True, slots=True)
class EquippingToolbox(Toolbox):
    """A toolbox that reads the tools of a configuration."""

    def split(self, kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], ToolSetTools | None]:
        """Split an environment's own settings from those of its tools. Raises InputError."""
        own, tools = split_config(kind, config)
        if tools.tools:
            return own, ToolSetTools(ToolSet(self, tools))
        if "tool_use" in tools.model_fields_set:
            raise InputError(f"{kind}: tool_use is set but tools is empty", "list tools in tools, or remove tool_use")
        return own, None
