"""A shell as a tool: commands in a sandbox that starts programs.

Files persist between commands; variables, the working folder and background processes do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from services.env.sandbox.sandbox import Sandbox
from services.env.tools.base import Arguments, ToolFault, describe, read_arguments
from shared.errors import SandboxFailed
from shared.text import well_formed

MAX_OUTPUT = 2**16
"""Bytes of output that a command may return from its sandbox."""
_LATER_S = 5.0
"""Grace after a command's time limit, which the sandbox enforces itself, before the sandbox is given up."""


class BashArguments(Arguments):
    command: str


BASH = describe(
    "bash",
    "Runs a command in bash, without a network, and shows what it prints and its exit code. Files stay from one call "
    "to the next; variables, the working directory and background processes do not. When the task is done, answer "
    "without a call.",
    BashArguments,
)


class CommandResult(BaseModel):
    """Output and exit code of a command; `ended` names the limit for which it was killed, if any."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    output: str
    exit: int
    ended: Literal["", "time", "memory"]

    def why_ended(self, timeout_s: float) -> str:
        if self.ended == "time":
            return f"it took longer than {timeout_s:g} s"
        return "its processes together needed more memory than there is"

    @property
    def summary(self) -> str:
        """Summary for a log."""
        how = f"ended for {self.ended}" if self.ended else f"ended with {self.exit}"
        return f"{how}: {self.output[-500:].strip()}" if self.output.strip() else how


@dataclass(frozen=True, slots=True)
class Shell:
    """Shell of one sandbox.

    Args:
        workdir: working folder of every command.
        env: its variables in addition to PATH, HOME, LANG and TZ.
    """

    sandbox: Sandbox
    workdir: str
    env: Mapping[str, str]

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command. Raises SandboxFailed if the sandbox is gone."""
        asked = {
            "text": command,
            "cwd": self.workdir,
            "env": dict(self.env),
            "timeout_s": timeout_s,
            "cpu_s": self.sandbox.limits.cpu_s,
            "memory_mb": self.sandbox.limits.memory_mb,
            "max_output": MAX_OUTPUT,
        }
        found = await self.sandbox.call("command", asked, timeout_s + _LATER_S)
        try:
            return CommandResult.model_validate(found)
        except ValidationError:
            raise SandboxFailed("the answer to a command is not a result", why="protocol") from None


class BashSession:
    """The tool `bash` in one episode. The owner of the sandbox closes it."""

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
            raise ToolFault(f"{result.output.rstrip()}\n[ended: {result.why_ended(timeout_s)}]".lstrip())
        shown = result.output.rstrip("\n") or "(no output)"
        return f"{shown}\n[exit code {result.exit}]" if result.exit else shown

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""
