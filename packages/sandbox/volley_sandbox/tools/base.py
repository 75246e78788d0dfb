"""Interface of tools: a name, a description, a JSON schema of the arguments, and a call that returns text.

Invariants
- A session belongs to one episode; its variables, files and database live as long as the episode.
- A mistake of the model is a ToolFault: text that the model reads, while its episode continues. A broken tool raises a
  VolleyError: the episode fails without a reward.
- The same seed and calls give the same answers, except for tools of other servers (MCP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

MAX_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class ToolDescription:
    """`parameters` is the JSON schema of the arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """Schema in OpenAI's shape, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolFault(Exception):
    """The call cannot be carried out as written; the text gives the reason, for a model to act on."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Context of an episode. `database` is its task's database in the SQL tool's format, if there is one."""

    seed: int
    database: str | None = None


class ToolSession(Protocol):
    """Tools of one kind in one episode.

    Calls in the same `lane` run one after the other, in their order; calls of a session without a lane run
    concurrently.
    """

    @property
    def tools(self) -> Sequence[ToolDescription]: ...

    @property
    def lane(self) -> str | None: ...

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Answer a call, with text of any length.

        Raises ToolFault, Busy (no capacity, and the call has not begun), and VolleyError if the tool itself is broken.
        """
        ...

    async def close(self) -> None:
        """Free the session's resources. Never raises."""
        ...


class Arguments(BaseModel):
    """Arguments of a built-in tool."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def describe(name: str, description: str, arguments: type[Arguments]) -> ToolDescription:
    """Describe a tool by its arguments' model, with a short schema."""
    schema = arguments.model_json_schema()
    properties = {
        key: {name: part for name, part in value.items() if name not in ("title", "maxLength")}
        for key, value in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return ToolDescription(name, description, parameters)


def read_arguments[A: Arguments](model: type[A], arguments: Mapping[str, Any]) -> A:
    """Validate a call's arguments. Raises ToolFault naming the fault."""
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        raise ToolFault(
            "; ".join(_format_problem(problem, model) for problem in error.errors()[:MAX_PROBLEMS])
        ) from None


def _format_problem(problem: Any, model: type[Arguments]) -> str:
    key = ".".join(str(part) for part in problem["loc"])[:80]
    if problem["type"] == "missing":
        return f"the argument {key} is missing"
    if problem["type"] == "extra_forbidden":
        return f"there is no argument {key} (there are: {', '.join(model.model_fields) or 'none'})"
    return f"the argument {key}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
