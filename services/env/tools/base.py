"""What a tool is: a name, a description, a JSON schema of its arguments, and a call that answers with text.

Invariants
- A session belongs to one episode, and what it keeps (variables, files, a database) lives as long as that.
- What the model did wrong is a ToolFault: text that it reads, never the end of its episode. A tool that is itself
  broken raises a VolleyError: the episode fails, and is never a reward.
- The same seed and the same calls have the same answers, unless the tool says that it is not the service's own (MCP).
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
        """OpenAI's shape, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolFault(Exception):
    """The call cannot be carried out as it was made; the text says why, in words a model can act on."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Of an episode. `database` is what its task is about, as the SQL tool takes it, if there is one."""

    seed: int
    database: str | None = None


class ToolSession(Protocol):
    """The tools of one kind in one episode. Calls in the same `lane` run one after the other, in their order; those of
    a session without a lane all at once.
    """

    @property
    def tools(self) -> Sequence[ToolDescription]: ...

    @property
    def lane(self) -> str | None: ...

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """The answer, of any length. Raises ToolFault, Busy where there is no room and the call has not begun, and
        VolleyError where the tool itself is broken.
        """
        ...

    async def close(self) -> None:
        """Frees what the session holds. Never raises."""
        ...


class Arguments(BaseModel):
    """What a built-in tool is called with."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def describe(name: str, description: str, arguments: type[Arguments]) -> ToolDescription:
    """A tool whose arguments are a model; its schema is kept as short as a prompt wants it."""
    schema = arguments.model_json_schema()
    properties = {
        key: {name: part for name, part in value.items() if name not in ("title", "maxLength")}
        for key, value in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return ToolDescription(name, description, parameters)


def read_arguments[A: Arguments](model: type[A], arguments: Mapping[str, Any]) -> A:
    """Raises ToolFault naming what is wrong."""
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        raise ToolFault("; ".join(_told(problem, model) for problem in error.errors()[:MAX_PROBLEMS])) from None


def _told(problem: Any, model: type[Arguments]) -> str:
    key = ".".join(str(part) for part in problem["loc"])[:80]
    if problem["type"] == "missing":
        return f"the argument {key} is missing"
    if problem["type"] == "extra_forbidden":
        return f"there is no argument {key} (there are: {', '.join(model.model_fields) or 'none'})"
    return f"the argument {key}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
