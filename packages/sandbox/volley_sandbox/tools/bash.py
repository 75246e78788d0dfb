"""A shell as a tool: commands in a container.

Files and background processes persist between commands; variables and the working folder do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.text import well_formed
from volley_sandbox.tools.base import Arguments, ToolFault, describe, read_arguments


class BashArguments(Arguments):
    command: str


BASH = describe(
    "bash",
    "Runs a command in bash, and shows what it prints and its exit code. Files and background processes stay from one "
    "call to the next; variables and the working directory do not. When the task is done, answer without a call.",
    BashArguments,
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output and exit code of a command; `ended` names the limit for which it was killed, if any."""

    output: str
    exit: int
    ended: Literal["", "time", "disk"]
    limit_s: float

    @property
    def why_ended(self) -> str:
        if self.ended == "time":
            return f"it took longer than {self.limit_s:g} s"
        return "the files of the container exceed their limit"


class Shell(Protocol):
    """Runs commands."""

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Raises Busy (repeat the call), ToolFault, SandboxFailed."""
        ...


class BashSession:
    """The tool `bash` in one episode. The owner of the container removes it."""

    tools = (BASH,)
    lane = "shell"

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def call(self, name: str, arguments: Mapping[str, object], timeout_s: float) -> str:
        command = well_formed(read_arguments(BashArguments, arguments).command)
        if "\0" in command:
            raise ToolFault("a command has no NUL characters")
        result = await self._shell.run(command, timeout_s)
        if result.ended:
            raise ToolFault(f"{result.output.rstrip()}\n[ended: {result.why_ended}]".lstrip())
        shown = result.output.rstrip("\n") or "(no output)"
        return f"{shown}\n[exit code {result.exit}]" if result.exit else shown

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""
