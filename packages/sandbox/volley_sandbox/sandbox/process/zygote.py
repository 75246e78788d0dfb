"""The service's side of a zygote: the process from which sandboxes are forked (see inside/zygote.py).

Invariant: if the zygote is lost, every task that waits for one of its sandboxes is notified.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from shared.errors import Forbidden, Unavailable
from shared.process.descriptors import HINT, exhausted
from volley_sandbox.sandbox.limits import SandboxKind
from volley_sandbox.sandbox.process import seccomp
from volley_sandbox.sandbox.process.spawned import ProcessEnd, ProcessSignal, SpawnedProcess, open_ends
from volley_sandbox.sandbox.tier import NAMESPACED, Tier

START_S = 20.0
STOP_S = 5.0
SEND_S = 5.0
MAX_LANDLOCK = 99
_SCRIPT = Path(__file__).parents[1] / "inside" / "zygote.py"
_KEPT = ("LD_LIBRARY_PATH",)
"""Variables that some interpreters need to start. The hash seed is fixed, so that every zygote makes the same tasks."""
_MAX_PACKET = 2**16
_PROGRAMS_HINT = (
    "run the service on Linux, as root or where users may make namespaces (docs/agents.md); or run the agent yourself:"
    ' agent = "external"'
)
_LANDLOCK_SCOPES_SIGNALS = 6


class ZygoteProcess:
    """A running zygote, made by `open_zygote`. `tmp` is its sandboxes' own tmpfs, None if they have none."""

    def __init__(self, control: socket.socket, process: asyncio.subprocess.Process, root: Path) -> None:
        self.tier = Tier()
        self.tmp: str | None = None
        self._control, self._process, self._root = control, process, root
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, SpawnedProcess] = {}
        self._signals: deque[tuple[int, ProcessSignal]] = deque()
        self._looked: asyncio.Future[list[int]] | None = None
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.alive = True
        self._loop.add_reader(control.fileno(), self._on_packet)

    @property
    def n_children(self) -> int:
        return len(self._children)

    async def prepare(self, folders: Sequence[str], namespaces: bool, landlock: int, kind: SandboxKind) -> str | None:
        """Prepare the zygote. Returns None if it is ready, else why it cannot enter namespaces. Raises Unavailable."""
        await self._send(
            {
                "op": "start",
                "namespaces": namespaces,
                "landlock": landlock,
                "root": str(self._root),
                "folders": list(folders),
                "kind": kind,
            }
        )
        said = await self._hello()
        if said["op"] == "failed":
            return said["error"]
        missing = [] if said["landlock"] else ["the kernel has no Landlock (since Linux 5.13)"]
        program = b""
        if sys.platform == "linux":
            signals = said["landlock"] >= _LANDLOCK_SCOPES_SIGNALS
            try:
                program = await asyncio.to_thread(
                    seccomp.build_program,
                    signals=signals,
                    metadata=bool(said["namespaces"]),
                    programs=kind == "agent",
                )
            except Unavailable as error:
                missing.append(str(error))
        self.tmp = said["tmp"]
        await self._send({"op": "filter", "program": base64.b64encode(program).decode()})
        self.tier = Tier(
            landlock=said["landlock"],
            seccomp=bool(program),
            namespaces=tuple(said["namespaces"]),
            bounds_threads=said["bounds_threads"],
            missing=tuple(missing),
        )
        return None

    async def spawn(self, number: int, limits: Mapping[str, int], tmp: str) -> SpawnedProcess:
        """Fork a sandbox. Raises Unavailable, OSError."""
        with open_ends() as ends:
            child = self._children[number] = SpawnedProcess(ends.channel, ends.log)
            try:
                request = {"op": "spawn", "id": number, "limits": dict(limits), "tmp": tmp}
                await self._send(request, (ends.other_channel.fileno(), ends.other_log.fileno()))
            except BaseException:
                self._children.pop(number, None)
                raise
            return child

    def signal(self, number: int, what: ProcessSignal) -> None:
        """Kill, pause or resume a sandbox, in the order of calls. One that has ended is ignored."""
        if not self.alive or number not in self._children:
            return
        self._signals.append((number, what))
        if len(self._signals) == 1:
            self._send_signals()

    async def look(self) -> list[int]:
        """Return the sandboxes that computed for 0.1 s or more since the last look; none if unknown.

        Only one task at a time may call this.
        """
        self._looked = looked = self._loop.create_future()
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(SEND_S):
                await self._send({"op": "look"})
                return await looked
        return []

    def _send_signals(self) -> None:
        while self.alive and self._signals:
            number, what = self._signals[0]
            try:
                if number in self._children:
                    self._control.send(orjson.dumps({"op": what, "id": number}))
            except BlockingIOError:
                self._loop.call_later(0.01, self._send_signals)
                return
            except OSError:
                self._lose()
                return
            self._signals.popleft()

    def destroy(self) -> None:
        """Kill it and all its sandboxes at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._lose()

    async def close(self) -> None:
        """End it and all its sandboxes, and wait until the processes are gone."""
        self._lose()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        with contextlib.suppress(OSError):
            self._root.rmdir()

    async def _hello(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(START_S):
                said = await self._ready
        except TimeoutError:
            raise Unavailable(f"the sandbox's zygote did not start within {START_S:g} s") from None
        if said["op"] == "lost":
            raise Unavailable("the sandbox's zygote ended at once", "use an interpreter of Python 3.10 or newer")
        return said

    async def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        packet = orjson.dumps(message)
        try:
            async with asyncio.timeout(SEND_S):
                while True:
                    try:
                        socket.send_fds(self._control, [packet], list(descriptors))
                        return
                    except BlockingIOError:
                        await asyncio.sleep(0.002)
        except TimeoutError:
            self.destroy()
            raise Unavailable(f"the sandbox's zygote accepted no request within {SEND_S:g} s") from None
        except OSError as error:
            self._lose()
            raise Unavailable(f"the sandbox's zygote is gone: {error}") from error

    def _on_packet(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, _MAX_PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._lose()
            return
        message = orjson.loads(packet)
        if message["op"] in ("ready", "failed"):
            if not self._ready.done():
                self._ready.set_result(message)
        elif message["op"] == "computed":
            if self._looked is not None and not self._looked.done():
                self._looked.set_result(message["ids"])
        elif message["op"] == "spawned":
            if (child := self._children.get(message["id"])) is not None and not child.pid.done():
                child.pid.set_result(message["pid"])
        elif message["op"] == "door":
            self._received_door(message["id"], descriptors)
        else:
            fields = {name: value for name, value in message.items() if name not in ("op", "id")}
            self._ended(message["id"], ProcessEnd(**fields))

    def _received_door(self, number: int, descriptors: Sequence[int]) -> None:
        child = self._children.get(number)
        for descriptor in descriptors:
            listening = socket.socket(fileno=descriptor)
            listening.setblocking(False)
            if child is None or child.door.done():
                listening.close()
            else:
                child.door.set_result(listening)

    def _ended(self, number: int, end: ProcessEnd) -> None:
        child = self._children.pop(number, None)
        if child is None:
            return
        if not child.end.done():
            child.end.set_result(end)
        child.forget()

    def _lose(self) -> None:
        """Mark the zygote as lost and notify all waiting tasks."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for number in list(self._children):
            self._ended(number, ProcessEnd(error="the process that sandboxes are forked from is gone"))
        if self._looked is not None and not self._looked.done():
            self._looked.set_result([])
        if not self._ready.done():
            self._ready.set_result({"op": "lost"})


async def open_zygote(
    python: Path,
    folders: Sequence[Path],
    root: Path,
    *,
    namespaces: bool,
    landlock: int = MAX_LANDLOCK,
    kind: SandboxKind = "plain",
) -> ZygoteProcess:
    """Start a zygote.

    Args:
        python: its interpreter.
        folders: folders that its sandboxes may read in addition to the interpreter's.
        root: an empty folder to mount on; it is made here.
        namespaces: enter namespaces where they are allowed; the zygote's tier gives the result.
        landlock: newest version of Landlock to use.
        kind: abilities of its sandboxes.

    Raises Forbidden if programs cannot be confined, Unavailable with the reason if the zygote cannot start.
    """
    await asyncio.to_thread(root.mkdir, parents=True, exist_ok=True)
    programs = kind == "agent"
    why = "namespaces are switched off, or not Linux's"
    for wanted in (True, False) if namespaces else (False,):
        zygote = await _started(python, root)
        try:
            refused = await zygote.prepare([str(folder) for folder in folders], wanted, landlock, kind)
        except BaseException:
            await zygote.close()
            raise
        if refused is None and programs and zygote.tier.level < NAMESPACED:
            refused = "; ".join(zygote.tier.missing)
        if refused is None:
            if not wanted:
                zygote.tier = replace(zygote.tier, missing=(*zygote.tier.missing, why))
            return zygote
        why = f"namespaces are not allowed: {refused}"
        await zygote.close()
        if programs:
            break
        await asyncio.to_thread(root.mkdir, parents=True, exist_ok=True)
    if programs:
        raise Forbidden(f"a sandbox cannot start programs here: {why}", _PROGRAMS_HINT)
    raise Unavailable(f"the sandbox's zygote could not start: {why}")


async def _started(python: Path, root: Path) -> ZygoteProcess:
    """Raises Unavailable."""
    kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise _cannot_start(python, error) from error
    ours.setblocking(False)
    try:
        process = await asyncio.create_subprocess_exec(
            str(python),
            *("-s", "-S", "-B", "-X", "utf8", str(_SCRIPT), str(theirs.fileno())),
            env={"PYTHONHASHSEED": "0", **{name: os.environ[name] for name in _KEPT if name in os.environ}},
            cwd="/",
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise _cannot_start(python, error) from error
    finally:
        theirs.close()
    return ZygoteProcess(ours, process, root)


def _cannot_start(python: Path, error: OSError) -> Unavailable:
    lacking = exhausted(error)
    detail = f"the sandbox's interpreter {python} cannot be started: {lacking or error}"
    return Unavailable(detail, HINT if lacking else "")
