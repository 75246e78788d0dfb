"""A Python interpreter as a tool: one sandboxed process for an episode, started with the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import Busy, Conflict, RateLimited, SandboxFailed, SandboxLost
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.clock import limited, processor_share
from volley_sandbox.sandbox.limits import SandboxLimits, ScriptProgram
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.base import Arguments, ToolFault, describe, read_arguments
from volley_sandbox.tools.files import changes_to_send, store_changes
from volley_sandbox.tools.settings import PythonSettings
from volley_sandbox.tools.workspace import Workspace

MAX_OUTPUT = 2**17
"""Characters of output that a call may return from its sandbox."""

_GONE = "the interpreter was restarted, and its variables are lost"


class PythonArguments(Arguments):
    code: str


PYTHON = describe(
    "python",
    "Runs Python code (the standard library, no network) and shows what it prints and the value of a last expression. "
    "Variables stay from one call to the next.",
    PythonArguments,
)


class PythonSession:
    """The tool `python` in one episode.

    Args:
        seed: seeds `random` in the interpreter.
        workspace: files in the interpreter's working folder.
        share_now: measures the share of a processor that a program gets, for the time limit of a call.
    """

    tools = (PYTHON,)
    lane = "files"

    def __init__(
        self,
        settings: PythonSettings,
        sandboxes: Sandboxes,
        seed: int,
        workspace: Workspace | None = None,
        share_now: Callable[[], float] = processor_share,
    ) -> None:
        self._settings, self._sandboxes, self._seed, self._workspace = settings, sandboxes, seed, workspace
        self._share_now = share_now
        self._sandbox: Sandbox | None = None
        self._closed = False
        self._received = True

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Run a program. Raises ToolFault, SandboxLost (its machine or engine failed), Busy, Conflict, Unavailable."""
        code = read_arguments(PythonArguments, arguments).code
        fresh = self._sandbox is None or not self._sandbox.alive
        sandbox = await self._start() if self._sandbox is None or fresh else self._sandbox
        files, removed = changes_to_send(self._workspace, all_of_them=fresh)
        asked = {
            "source": code,
            "seed": self._seed if fresh else None,
            "cpu_s": self._settings.cpu_s,
            "max_output": MAX_OUTPUT,
            "files": files,
            "removed": removed,
            "received": fresh or self._received,
            "max_bytes": self._workspace.max_bytes if self._workspace is not None else 0,
        }
        try:
            call = sandbox.call("cell", asked, 2 * timeout_s)
            answer, _ = await limited(call, timeout_s, timeout_s, self._share_now)
            found = answers.read_cell(answer)
        except SandboxLost:
            raise
        except TimeoutError:
            self._received = False
            raise ToolFault(f"the program took longer than {timeout_s:g} s; {_GONE}") from None
        except SandboxFailed as failed:
            self._received = False
            if self._workspace is not None and failed.why == "refused":  # the files were not written
                self._workspace.changed |= {*files, *removed}
            raise ToolFault(self._why(failed)) from None
        self._received = True
        output = "\n".join(part.rstrip("\n") for part in (found.script.stdout, found.script.stderr) if part)
        notes = store_changes(self._workspace, found) if self._workspace is not None else []
        if found.script.cut:
            notes.append(f"only the first {MAX_OUTPUT} characters of the output were kept")
        output = "\n".join([*([output] if output else []), *(f"[{note}]" for note in notes)]) or "(no output)"
        if found.script.exit:
            raise ToolFault(output)
        return output

    async def close(self) -> None:
        self._closed = True
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _start(self) -> Sandbox:
        """Start a process, replacing one that ended.

        Raises Unavailable, Busy (no capacity), Conflict (the episode was closed meanwhile; the new process is killed).
        """
        if self._sandbox is not None:
            await self._sandbox.close()
        self._check_open()
        limits = SandboxLimits(cpu_s=self._settings.total_cpu_s, memory_mb=self._settings.memory_mb)
        try:
            sandbox = self._sandbox = await self._sandboxes.start(ScriptProgram(), limits)
        except RateLimited as full:
            raise Busy(full.detail, full.hint, full.retry_after_s) from full
        if self._closed:
            await sandbox.close()
            self._check_open()
        return sandbox

    def _check_open(self) -> None:
        if self._closed:
            raise Conflict("the episode was deleted during a tool call", "create another one")

    def _why(self, failed: SandboxFailed) -> str:
        if failed.alive:
            return failed.detail
        match failed.why:
            case "cpu":
                return f"the program used up its CPU time; {_GONE}"
            case "memory":
                return f"the program needed more memory than the machine has; {_GONE}"
            case _:
                return f"the program ended its interpreter ({failed.detail.removeprefix('cell: ')}); {_GONE}"
