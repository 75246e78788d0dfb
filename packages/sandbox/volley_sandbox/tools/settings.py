"""Configuration of an environment's tools.

tools: [calculator, {python: {cpu_s: 5}}, {workspace: {files: {notes.txt: ""}}}, {mcp: {command: [my-server]}}]
tool_use: {format: hermes, max_turns: 10}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from shared.errors import Forbidden, InputError
from volley_sandbox.tools.base import ToolFault
from volley_sandbox.tools.workspace import Workspace, encoded
from volley_serving.dialects.calls import CallFormat

MAX_TOOLS = 16
_KEYS = ("tools", "tool_use")


class ToolSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CalculatorSettings(ToolSettings):
    """Exact arithmetic."""


class PythonSettings(ToolSettings):
    """A Python interpreter in a sandbox.

    `cpu_s` bounds one call, `total_cpu_s` an episode's process, in seconds; `memory_mb` is its address space.
    """

    cpu_s: float = Field(default=5.0, ge=0.1, le=20)
    total_cpu_s: int = Field(default=60, ge=1, le=600)
    memory_mb: int = Field(default=512, ge=128, le=16_384)


class SqlSettings(ToolSettings):
    """An SQLite database: the task's own, a file, or the result of the SQL in `script`; otherwise an empty one.

    With `writable` each episode has its own copy, which must be small.
    """

    script: str | None = Field(default=None, max_length=2**18)
    database: Path | None = None
    writable: bool = False
    max_rows: int = Field(default=100, ge=1, le=10_000)

    @model_validator(mode="after")
    def _one_source(self) -> SqlSettings:
        if self.script is not None and self.database is not None:
            raise ValueError("sql takes a script or a database, not both")
        if self.writable and self.database is not None:
            raise ValueError("a database file is read-only: remove writable, or give a script")
        return self

    @field_validator("database")
    @classmethod
    def _absolute(cls, database: Path | None) -> Path | None:
        """Make the path absolute, because the processes that read it have another working folder."""
        return None if database is None else database.absolute()


class WorkspaceSettings(ToolSettings):
    """Files of an episode, shared with the Python tool. `files` holds the initial files, as text by path."""

    files: dict[str, str] = {}
    max_files: int = Field(default=64, ge=1, le=1000)
    max_kb: int = Field(default=256, ge=1, le=512)

    def workspace(self) -> Workspace:
        """Workspace with the initial files. Raises ToolFault if they exceed the limits."""
        made = Workspace(self.max_files, self.max_kb * 1024)
        for path, text in self.files.items():
            made.write(path, encoded(text))
        return made

    @model_validator(mode="after")
    def _holds_its_files(self) -> WorkspaceSettings:
        try:
            self.workspace()
        except ToolFault as fault:
            raise ValueError(f"workspace.files: {fault}") from None
        return self


class McpSettings(ToolSettings):
    """A Model Context Protocol server: a program (stdio), or an address (streamable HTTP).

    Args:
        tools: the tools to offer; by default all.
        prefix: prefix of their names.
        env: variables of this service's environment that the program inherits.
        token_file: file with the bearer token for the address.
        shared: share one connection among all episodes; for servers without state between calls.
        start_s: deadline of the first answer, in seconds.
    """

    command: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1, max_length=64)
    url: str | None = Field(default=None, pattern=r"^https?://[^\s/@]+(/\S*)?$", max_length=2000)
    tools: tuple[str, ...] = ()
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,40}$")
    cwd: Path | None = None
    env: tuple[str, ...] = ()
    token_file: Path | None = None
    shared: bool = False
    start_s: float = Field(default=20.0, ge=1, le=25)

    @model_validator(mode="after")
    def _one_way(self) -> McpSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("mcp takes a command or a url")
        return self


class ToolEntry(ToolSettings):
    """One tool: exactly one of these keys."""

    calculator: CalculatorSettings | None = None
    python: PythonSettings | None = None
    sql: SqlSettings | None = None
    workspace: WorkspaceSettings | None = None
    mcp: McpSettings | None = None

    @property
    def settings(self) -> ToolSettings:
        return next(value for name in ToolEntry.model_fields if (value := getattr(self, name)) is not None)

    @model_validator(mode="after")
    def _one(self) -> ToolEntry:
        if len(self.model_fields_set) != 1 or getattr(self, next(iter(self.model_fields_set))) is None:
            raise ValueError(f"a tool is one of {', '.join(ToolEntry.model_fields)}, or {{NAME: its settings}}")
        return self


class ToolUse(ToolSettings):
    """Use of tools in an episode.

    Args:
        format: format of calls in the model's text (see `calls`); `auto` detects it.
        max_turns: assistant messages with calls; the episode is truncated after the last of them.
        max_calls_per_turn, max_calls: calls of a message and of an episode; further calls are answered with an error.
        parallel: calls of a message that run at once.
        timeout_s: deadline of one call, in seconds.
        max_output: characters of one answer; the middle of longer answers is dropped.
        describe: also describe the tools and the format of calls in a message, for chat templates that do not.
    """

    format: CallFormat = "auto"
    max_turns: int = Field(default=10, ge=1, le=200)
    max_calls_per_turn: int = Field(default=8, ge=1, le=64)
    max_calls: int = Field(default=64, ge=1, le=1000)
    parallel: int = Field(default=4, ge=1, le=16)
    timeout_s: float = Field(default=20.0, ge=0.1, le=24)
    max_output: int = Field(default=4000, ge=100, le=100_000)
    describe: bool = False


def _entry(value: Any) -> Any:
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, Mapping):
        return {name: {} if settings is None else settings for name, settings in value.items()}
    return value


class ToolsConfig(ToolSettings):
    tools: Annotated[tuple[Annotated[ToolEntry, BeforeValidator(_entry)], ...], Field(max_length=MAX_TOOLS)] = ()
    tool_use: ToolUse = ToolUse()

    @model_validator(mode="after")
    def _once(self) -> ToolsConfig:
        kinds = [next(iter(entry.model_fields_set)) for entry in self.tools]
        if twice := [kind for kind in ToolEntry.model_fields if kind != "mcp" and kinds.count(kind) > 1]:
            raise ValueError(f"tools has {twice[0]} twice")
        return self


_CONFIG = TypeAdapter(ToolsConfig)


def split_config(kind: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], ToolsConfig]:
    """Split an environment's own settings from those of its tools. Raises InputError."""
    own = {key: value for key, value in config.items() if key not in _KEYS}
    theirs = {key: config[key] for key in _KEYS if key in config}
    try:
        return own, _CONFIG.validate_python(theirs)
    except ValidationError as error:
        raise InputError(f"{kind}: {'; '.join(_explained(problem) for problem in error.errors()[:5])}") from error


def check_requested(config: ToolsConfig) -> None:
    """Raises Forbidden for settings that a request may not make: programs, addresses and files."""
    for entry in config.tools:
        if entry.mcp is not None or (entry.sql is not None and entry.sql.database is not None):
            what = "mcp" if entry.mcp is not None else "sql.database"
            raise Forbidden(f"tools: {what} cannot be set by a request", "set it in the configuration of the service")


def _explained(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        at = key.rpartition(".")[0]
        known = {"tools": ToolEntry, "tool_use": ToolUse}.get(at.partition(".")[0], ToolsConfig)
        if at.count(".") == 2:
            known = _SETTINGS.get(at.rpartition(".")[2], known)
        return f"unknown setting {key} (there are: {', '.join(known.model_fields)})"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


_SETTINGS: Mapping[str, type[ToolSettings]] = {
    "calculator": CalculatorSettings,
    "python": PythonSettings,
    "sql": SqlSettings,
    "workspace": WorkspaceSettings,
    "mcp": McpSettings,
}
