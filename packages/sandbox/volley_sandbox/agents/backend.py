"""Environments whose episodes are played by an agent: a program in the sandbox, or an external one.

Every episode has its own sandbox from its reset to its judgement. A program runs once. One that ends in another way
than the author declares, or uses too much memory, has failed: that is a fault of the program or the machine, and gives
no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.env.backend import AgentSpec, ModelAddress, ProgramState, call_seconds
from services.env.episode_types import Message, StepResult, assistant
from shared.errors import Conflict, RateLimited, VolleyError
from volley_sandbox.backends.sandboxed import SandboxedBackend
from volley_sandbox.sandbox import answers
from volley_sandbox.sandbox.limits import EnvironmentProgram, SandboxLimits
from volley_sandbox.sandbox.long_calls import n_processors
from volley_sandbox.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from volley_sandbox.agents.door import Handler

THREADS, OPEN_FILES, DISK_MB = 64, 256, 128
BASE_URL = "http://127.0.0.1:4010/v1"
"""Address of the model inside a sandbox; see inside/namespaces.py."""
STARTS_PER_PROCESSOR = 2
"""Agents that are started at once, for each processor: imports of their packages take seconds of computing."""
MAX_OUTPUT = 16_384
"""Bytes that are kept from the end of a program's output."""
START_S = 50.0
"""Seconds for a start and reset, less than a client waits."""
_LATER_S, _MAX_REASON, _MAX_LOGGED = 10.0, 500, 4000


@dataclass(eq=False, kw_only=True)
class AgentBackend(SandboxedBackend):
    """Backend of an agent.

    Args:
        agent: how its episodes are played.
        ca_file: certificate authorities for a model at an https address.
    """

    agent: AgentSpec
    ca_file: Path | None = None
    _starting: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.deadline_s = max(self.deadline_s, START_S)
        if self.agent.kind == "program":
            own, make = self.limits, self.program
            self.limits = agent_limits(own)

            async def program() -> EnvironmentProgram:
                return replace(await make(), kind="agent")

            self.program = program

    async def reset(self, split: str, index: int, seed: int) -> AgentEpisode:
        """Raises RateLimited while as many others are starting as the machine can carry."""
        if self._starting >= STARTS_PER_PROCESSOR * n_processors():
            raise RateLimited(f"{self._starting} agents of {self.name} are starting", "try again later", 0.5)
        self._starting += 1
        try:
            sandbox, opened, _ = await self._opened(split, index, seed)
        finally:
            self._starting -= 1
        return AgentEpisode(self, sandbox, opened.task, opened.messages, opened.tools)

    async def openings(self, tasks: Sequence[tuple[str, int]]) -> list[tuple[Message, ...]]:
        """First messages of tasks, from one process: its imports may take seconds. The seed is the index."""
        async with self._process() as sandbox:
            asked = [{"split": split, "index": index, "seed": index} for split, index in tasks]
            return [answers.read_opening(await self.call(sandbox, "reset", "reset", one)).messages for one in asked]

    @property
    def owner(self) -> str:
        """No turns: pausing would stop the process that waits, not its programs."""
        return "" if self.agent.kind == "program" else self.name


def agent_limits(own: SandboxLimits) -> SandboxLimits:
    """Limits of a sandbox that starts an agent's program."""
    return replace(own, threads=THREADS, open_files=OPEN_FILES, disk_mb=DISK_MB, file_mb=DISK_MB)


class AgentEpisode:
    """One task and the agent that works on it."""

    database: None = None

    def __init__(
        self,
        backend: AgentBackend,
        sandbox: Sandbox,
        task: str,
        opening: tuple[Message, ...],
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self.task, self.opening, self.tools = task, opening, tools
        self.agent = backend.agent
        self._backend, self._sandbox = backend, sandbox
        self._begun: tuple[str, ModelAddress] | None = None
        self._state = ProgramState("running")
        self._ended = asyncio.Event()

    async def step(self, message: Message) -> StepResult:
        raise Conflict(f"an episode of {self._backend.name} is played by its agent", "send no steps; finish it")

    def begin(self, request_id: str, address: ModelAddress) -> bool:
        """Note that the program is to be started; True if `play` has to be called, False for a repeated request.

        Raises Conflict if it was started by another request, or is not this service's to start.
        """
        if self.agent.kind != "program":
            raise Conflict(f"{self._backend.name} has no program: its agent is outside", "give it a session")
        if self._begun is not None:
            if self._begun != (request_id, address):
                raise Conflict("the program of this episode was started before", "create another episode")
            return False
        self._begun = request_id, address
        return True

    async def play(self, model: Handler | None = None, timeout_s: float | None = None) -> None:
        """Run the program to its end. Failures are its state.

        Args:
            model: answers its requests instead of the address that it was started with.
            timeout_s: seconds that it may take, if fewer than its own.
        """
        assert self._begun is not None
        limit_s = min(self.agent.timeout_s, timeout_s or self.agent.timeout_s)
        try:
            with call_seconds(self._backend.name, "step").time():
                self._state = await self._played(self._begun[1], model, limit_s)
        except VolleyError as error:
            self._state = ProgramState("failed", None, error.detail)
        except BaseException:
            self._state = ProgramState("failed", None, "the program was given up")
            raise
        finally:
            self._ended.set()
        if self._state.state == "failed":
            self._backend.log.append(f"program: {self._state.detail}\n{self._state.output[-_MAX_LOGGED:]}".rstrip())

    async def _played(self, address: ModelAddress, model: Handler | None, timeout_s: float) -> ProgramState:
        from volley_sandbox.agents import door  # aiohttp, which only agents need

        opened = door.Door()
        asked = {
            "base_url": BASE_URL,
            "api_key": address.api_key,
            "model": address.model,
            "timeout_s": timeout_s,
            "memory_mb": self._sandbox.limits.memory_mb,
            "max_output": MAX_OUTPUT,
        }
        async with (
            door.relay(address, opened, self._backend.ca_file) as handler,
            door.serve(await self._sandbox.door(), model or handler),
        ):
            found = await self._sandbox.call("program", asked, timeout_s + _LATER_S)
            outage = opened.outage
        spec = self.agent.model_copy(update={"timeout_s": timeout_s})
        return state_of(answers.read_program_end(found), spec, self._sandbox.limits.memory_mb, outage=outage)

    async def state(self, wait_s: float) -> ProgramState:
        """State of the program, after its end or `wait_s`. Raises Conflict if it was not started.

        An agent outside is always running; asking keeps its episode from expiring.
        """
        if self.agent.kind == "external":
            return ProgramState("running")
        if self._begun is None:
            raise Conflict("the program of this episode was not started", "POST …/run starts it")
        try:
            async with asyncio.timeout(wait_s):
                await self._ended.wait()
        except TimeoutError:
            return ProgramState("running")
        return self._state

    def set_output(self, output: str) -> None:
        """Store the final output of an external agent. Raises Conflict for a program."""
        if self.agent.kind == "program":
            raise Conflict(
                f"{self._backend.name} has a program: its own output is judged", "remove output from the request"
            )
        self._state = replace(self._state, output=output)

    async def finish(self) -> StepResult:
        """Judge the task as it stands, after ending a program that still runs.

        Raises SandboxFailed, Conflict (the environment gives no rewards).
        """
        if self._begun is not None and not self._ended.is_set():
            self._sandbox.stop_program()
            await self._ended.wait()
        if not self.agent.judged:
            raise Conflict(f"{self._backend.name} gives no rewards", "the agent sends its own reward")
        said = self._state.output if self.agent.kind == "external" else None
        return answers.read_step(await self._backend.call(self._sandbox, "step", "judge", {"output": said}))

    @property
    def played(self) -> tuple[Message, ...]:
        """The agent's last output, for judges and reward services."""
        return (assistant(self._state.output),) if self._state.output else ()

    async def close(self) -> None:
        await self._backend.end(self._sandbox)


def state_of(end: answers.ProgramEnd, agent: AgentSpec, memory_mb: int, *, outage: bool) -> ProgramState:
    """State after a program's end.

    Args:
        outage: the model could not be reached at that time.
    """
    why = ""
    if end.ended == "memory":
        why = f"its processes needed more than {memory_mb} MiB together (services.env.sandbox_memory_mb)"
    elif end.ended and outage:
        why = "it was ended while the model could not be reached"
    elif not end.ended and end.exit not in agent.exit_codes:
        why = f"it ended with exit code {end.exit}: {reason_in(end.output) or 'it printed nothing'}"
    if why:
        return ProgramState("failed", end.exit, why, end.output)
    if end.ended == "time":
        return ProgramState("exited", None, f"it was ended after {agent.timeout_s:g} s", end.output)
    if end.ended == "stop":
        return ProgramState("exited", None, "it was ended, because the episode was finished", end.output)
    return ProgramState("exited", end.exit, "", end.output)


def reason_in(output: str) -> str:
    """Line of a program's output that tells why it failed: its last exception, else the last line; may be empty."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    trace = max((at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=len(lines))
    raised = [line for line in lines[trace + 1 :] if not line.startswith(" ")]
    return (raised[:1] or lines[-1:] or [""])[0].strip()[:_MAX_REASON]
