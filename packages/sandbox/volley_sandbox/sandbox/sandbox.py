"""One sandbox: a process that runs untrusted code and answers one request at a time.

Invariant: a sandbox is killed, and not called again, after a call that timed out, was cancelled, or got a malformed
answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.errors import SandboxFailed, SandboxLost, Why
from shared.process import telemetry
from volley_sandbox.sandbox.limits import LOG_FACTOR, SandboxLimits
from volley_sandbox.sandbox.long_calls import LONG_S, Turns
from volley_sandbox.sandbox.process import frames, workspace
from volley_sandbox.sandbox.process.spawned import ProcessEnd, SpawnedProcess, Spawner

END_S = 5.0
DRAIN_S = 0.5
_FAILURES = telemetry.Counter(
    "volley_env_sandbox_failures_total", "Calls that sandboxes failed, by why", ["why"], registry=telemetry.REGISTRY
)
_log = telemetry.Log("sandbox")


class Sandbox:
    """One process of untrusted code. `Sandboxes.start` makes it; the caller closes it.

    `description` is the environment's description of itself (see answers.read_description), None for a script.
    Sandboxes with the same `owner` share turns for long calls; an empty owner takes no turns.
    """

    def __init__(
        self,
        number: int,
        limits: SandboxLimits,
        spawner: Spawner,
        tmp: Path,
        owner: str,
        turns: Turns[Sandbox],
        forget: Callable[[Sandbox], None],
    ) -> None:
        self.description: Any = None
        self.owner, self._turns = owner, turns
        self.number, self.limits, self.spawner, self.tmp = number, limits, spawner, tmp
        self._forget = forget
        self.n_calls = 0
        self._turn = asyncio.Lock()
        self._process: SpawnedProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._output = LogPipe(limits.log_bytes, self._flooded)
        self._log_transport: asyncio.ReadTransport | None = None
        self._ended_for: tuple[Why, str] | None = None
        self._lost = False
        self.pauses_between_calls = False
        self.closed = False

    @property
    def log(self) -> str:
        """Last `log_bytes` of its stdout and stderr; untrusted content."""
        return self._output.tail.decode("utf-8", "replace")

    @property
    def pid(self) -> int | None:
        """Process id as the zygote sees it, once it is known."""
        known = self._process is not None and self._process.pid.done() and not self._process.pid.cancelled()
        return self._process.pid.result() if known and self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._ended_for is None and self._process is not None and not self._process.end.done()

    async def call(self, method: str, params: dict[str, Any], deadline_s: float) -> Any:
        """Call a method and return its unchecked JSON value.

        Raises SandboxFailed, and InputError if `params` are not JSON. An exception in the code leaves the sandbox
        alive; any other failure, including a deadline or a cancelled call, kills it.
        """
        async with self._turn:
            if not self.alive:
                raise await self._why_dead(method)
            self.n_calls += 1
            request = frames.encode(self.n_calls, method, params)
            assert self._reader is not None
            assert self._writer is not None
            if self.pauses_between_calls:
                self.resume()
            long = asyncio.get_running_loop().call_later(LONG_S, self._take_turns)
            try:
                async with asyncio.timeout(deadline_s):
                    self._writer.write(request)
                    await self._writer.drain()
                    return await frames.read_answer(self._reader, self.n_calls, self.limits.frame_bytes)
            except TimeoutError:
                self.end("time", f"{method} took longer than {deadline_s:g} s")
                raise await self._why_dead(method) from None
            except SandboxFailed as failed:
                _FAILURES.labels(failed.why).inc()
                if not failed.alive:
                    self.end(failed.why, failed.detail)
                raise
            except (asyncio.IncompleteReadError, OSError):
                raise await self._why_dead(method) from None
            except asyncio.CancelledError:
                self.end("time", f"{method} was given up")
                raise
            finally:
                long.cancel()
                self._turns.leave(self)
                if self.pauses_between_calls:
                    self.pause()

    def _take_turns(self) -> None:
        if self.owner:
            self._turns.join(self)

    @property
    def is_called(self) -> bool:
        return self._turn.locked()

    def pause_between_calls(self) -> None:
        """Pause the process between calls from now on, because it continued after an answer."""
        if not self.pauses_between_calls:
            _log.warning("sandbox paused between calls: it kept computing after an answer", owner=self.owner)
            self.pauses_between_calls = True
            self.pause()

    def pause(self) -> None:
        """Stop the process until `resume`; it cannot refuse."""
        self.spawner.signal(self.number, "pause")

    def resume(self) -> None:
        self.spawner.signal(self.number, "resume")

    def end(self, why: Why, detail: str) -> None:
        """Kill the process. Later calls fail with the first reason given."""
        if self._ended_for is None:
            self._ended_for = (why, detail)
        self.spawner.signal(self.number, "kill")

    async def door(self) -> socket.socket:
        """Socket that listens on the loopback address of an agent's sandbox. Raises SandboxFailed; call it once."""
        assert self._process is not None
        done, _ = await asyncio.wait([self._process.door], timeout=END_S)
        if not done or self._process.door.cancelled():
            raise SandboxFailed("the sandbox has no socket for its program", why="crash")
        return self._process.door.result()

    def stop_program(self) -> None:
        """End the program that a call waits for; the call then returns. The sandbox reads and drops the empty frame."""
        if self._writer is not None and self.alive:
            self._writer.write(frames.EMPTY)

    async def close(self) -> None:
        """End the process and remove its private folder. `log` is then final. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.end("crash", "the sandbox was closed")
        try:
            await self._end()
            if self._log_transport is not None:
                await self._output.drain()
        finally:
            if self._writer is not None:
                self._writer.transport.abort()
            elif self._process is not None:
                self._process.channel.close()
            if self._log_transport is not None:
                self._log_transport.close()
            elif self._process is not None:
                self._process.log.close()
            if self._process is not None and not self._process.end.done():
                self._process.end.add_done_callback(lambda end: self._forget(self))
            else:
                self._forget(self)
                await asyncio.shield(asyncio.to_thread(self._remove_folder))

    async def connect(self) -> None:
        """Start the process and connect to it. Raises Unavailable, RateLimited, OSError (no descriptors left)."""
        tmp = self.spawner.tmp or str(self.tmp)
        self._process = one = await self.spawner.spawn(self.number, asdict(self.limits), tmp)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=one.channel, limit=2**16)
        self._log_transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self._output, one.log)

    async def _why_dead(self, method: str) -> SandboxFailed:
        """Reason for its end. Returns once the process has ended or is abandoned."""
        end = await self._end()
        if self._ended_for is None:
            self._ended_for, self._lost = _cause(end, self.limits), end.status is None
        why, detail = self._ended_for
        _FAILURES.labels("lost" if self._lost else why).inc()
        return (SandboxLost if self._lost else SandboxFailed)(f"{method}: {detail}", why=why)

    async def _end(self) -> ProcessEnd:
        """Wait for the process; kill it if it only closed its channel.

        A process that survives the kill (it may wait for a disk) is abandoned; its number stays reserved until it is
        gone.
        """
        if self._process is None:
            return ProcessEnd(error="it was never started")
        end = self._process.end
        for timeout_s in (1.0, END_S):
            done, _ = await asyncio.wait([end], timeout=timeout_s)
            if done:
                return end.result()
            self.end("protocol", "it closed its channel and went on")
        _log.error("killed sandbox does not end", sandbox=self.number, pid=self.pid)
        return ProcessEnd(error="its process does not end")

    def _remove_folder(self) -> None:
        if self.spawner.tmp is None:
            try:
                workspace.remove(self.tmp)
            except OSError as error:
                _log.error("folder of a sandbox cannot be removed", folder=str(self.tmp), error=str(error))

    def _flooded(self) -> None:
        self.end("output", f"it wrote more than {LOG_FACTOR * self.limits.log_bytes} bytes to stdout and stderr")


class LogPipe(asyncio.Protocol):
    """Keep the last `most` bytes; call `flooded` after LOG_FACTOR times as many."""

    def __init__(self, most: int, flooded: Callable[[], None]) -> None:
        self.tail = bytearray()
        self._most, self._flooded, self._n = most, flooded, 0
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def drain(self) -> None:
        """Wait until the other end is closed, at most DRAIN_S."""
        await asyncio.wait([self._closed], timeout=DRAIN_S)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.tail += data
        del self.tail[: -self._most]
        before, self._n = self._n, self._n + len(data)
        if before <= LOG_FACTOR * self._most < self._n:
            self._flooded()


def _cause(end: ProcessEnd, limits: SandboxLimits) -> tuple[Why, str]:
    """Cause of an end that the service did not request."""
    if end.status is None:
        return "crash", end.error or "its process ended for an unknown reason"
    code = os.waitstatus_to_exitcode(end.status)
    if code >= 0:
        return "crash", f"its process ended by itself with exit code {code}"
    number = -code
    if number == signal.SIGXCPU or (number == signal.SIGKILL and end.cpu_s >= limits.cpu_s):
        return "cpu", f"it used up its {limits.cpu_s} s of CPU time"
    if number == signal.SIGKILL:
        return "memory", "it was killed, most likely because memory ran out"
    if number == signal.SIGSYS:
        return "refused", "it made a system call of another architecture"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return "crash", f"its process died of {name}"
