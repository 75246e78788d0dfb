"""The tools of an environment as its configuration names them.

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

from services.env.tools.base import ToolFault
from services.env.tools.calls import CallFormat
from services.env.tools.workspace import Workspace, encoded
from shared.errors import Forbidden, InputError

MAX_TOOLS = 16
_KEYS = ("tools", "tool_use")


class ToolSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CalculatorSettings(ToolSettings):
    """Exact arithmetic."""


class PythonSettings(ToolSettings):
    """A Python interpreter in a sandbox. `cpu_s` is for one call, `total_cpu_s` for an episode's process, in seconds;
    `memory_mb` its address space.
    """

    cpu_s: float = Field(default=5.0, ge=0.1, le=20)
    total_cpu_s: int = Field(default=60, ge=1, le=600)
    memory_mb: int = Field(default=512, ge=128, le=16_384)


class SqlSettings(ToolSettings):
    """An SQLite database: the task's own, a file, or what the SQL in `script` makes; else an empty one. With `writable`
    each episode has a copy of its own, which must be small.
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
            raise ValueError("a database file is only read: leave out writable, or give a script")
        return self

    @field_validator("database")
    @classmethod
    def _absolute(cls, database: Path | None) -> Path | None:
        """The processes that read it have another working folder."""
        return None if database is None else database.absolute()


class WorkspaceSettings(ToolSettings):
    """Files of an episode, which the Python tool sees too. `files` are there at the beginning, as text by path."""

    files: dict[str, str] = {}
    max_files: int = Field(default=64, ge=1, le=1000)
    max_kb: int = Field(default=256, ge=1, le=512)

    def workspace(self) -> Workspace:
        """As an episode has it at the beginning. Raises ToolFault for files it cannot hold."""
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
    """A server of the Model Context Protocol: a program (stdio), or an address (streamable HTTP).

    Args:
        tools: those of its tools that are offered; all if there are none named.
        prefix: put before their names.
        env: names of this service's environment variables that its program gets too.
        token_file: holds the bearer token that goes to its address.
        shared: all episodes use one connection, where the server keeps nothing between calls.
        start_s: how long it may take to answer first, in seconds.
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
    """Exactly one of them."""

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
    """How tools are used in an episode.

    Args:
        format: that of the calls in the model's text (see `calls`); `auto` recognises it.
        max_turns: assistant messages with calls; the episode is truncated with the last of them.
        max_calls_per_turn, max_calls: of a message, and of an episode; others are answered with an error.
        parallel: calls of a message that run at once.
        timeout_s: of one call.
        max_output: characters of one answer; of longer ones the middle is left out.
        describe: tells the tools and the format of calls in a message too, for chat templates that do not.
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
    """An environment's own settings, and those of its tools. Raises InputError."""
    own = {key: value for key, value in config.items() if key not in _KEYS}
    theirs = {key: config[key] for key in _KEYS if key in config}
    try:
        return own, _CONFIG.validate_python(theirs)
    except ValidationError as error:
        raise InputError(f"{kind}: {'; '.join(_explained(problem) for problem in error.errors()[:5])}") from error


def check_requested(config: ToolsConfig) -> None:
    """Raises Forbidden for what a request must not set: programs, addresses and files belong in the configuration."""
    for entry in config.tools:
        if entry.mcp is not None or (entry.sql is not None and entry.sql.database is not None):
            what = "mcp" if entry.mcp is not None else "sql.database"
            raise Forbidden(
                f"tools: {what} cannot be set by a request", "it belongs in the configuration of the service"
            )


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
