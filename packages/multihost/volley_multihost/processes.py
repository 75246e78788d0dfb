"""Processes of one trainer: a leader and followers.

Process 0 leads: only it talks to Redis and to other services. The followers repeat its calls on the model, because
every process of a JAX program must run the same computations in the same order. The leader sends them its decisions
inside a call (which checkpoint is valid, where one is written). A call returns when all processes have finished it.

Invariant: after a call that raised in any process, all processes wait for the next call, or the incarnation ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, NoReturn

from shared.errors import (
    ConfigError,
    DecodeError,
    Forbidden,
    ProcessesMissing,
    ProcessLost,
    VolleyError,
    from_problem,
    problem,
)
from shared.process import telemetry
from shared.process.exit_codes import exit_code
from shared.process.ports import hold_free, host_problem
from volley_multihost.connection import Message, PeerConnection, greet, welcome
from volley_multihost.options import GroupOptions

_ASSEMBLE_S = 2.0
_AGAIN_S = 0.5
_OUTCOME_S = 600.0
_log = telemetry.Log("processes")

_STREAM = ContextVar("stream", default="calls")
"""Stream of calls that a thread leads or follows; other threads may have other streams."""

SAVES = "saves"
"""Stream of checkpoints that are written while steps run."""

type Calls = Mapping[str, Callable[[Mapping[str, Any]], object]]
"""Functions of calls, by name."""
type Lost = Callable[[VolleyError], None]


def end_process(error: VolleyError) -> NoReturn:
    """End the process at once.

    A thread in a collective that waits for a lost process cannot be interrupted; the next incarnation repeats the work
    that is not durable, as after a kill.
    """
    _log.error("this incarnation of the trainer ends", error=type(error).__name__, detail=str(error))
    os._exit(exit_code(error))


class Leader:
    """Process 0's end of the connections.

    Args:
        lost: called, in another thread, with the error if a process is lost after all had joined.

    Raises ConfigError if it cannot listen at the address.
    """

    def __init__(self, options: GroupOptions, lost: Lost = end_process) -> None:
        self._options, self._lost = options, lost
        self._there: dict[int, PeerConnection] = {}
        self._numbers = count(1)
        self._complete = False
        self._listener = _listener(options.address)

    @property
    def n(self) -> int:
        """Number of processes, this one included."""
        return self._options.n

    def assemble(self, wait_s: float = _ASSEMBLE_S) -> str | None:
        """Wait until all processes have joined; send them, and return, the address of JAX's coordinator.

        Returns None if this was done before. Raises ProcessesMissing.
        """
        if self._complete:
            return None
        deadline = time.monotonic() + wait_s
        while missing := [i for i in range(1, self._options.n) if i not in self._there]:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self._accept()
            except TimeoutError:
                names = ", ".join(map(str, missing))
                raise ProcessesMissing(f"waiting for process {names} of the trainer's {self._options.n}") from None
        self._complete = True
        self._listener.close()
        host = self._options.address[0]
        with hold_free(host) as held:
            coordinator = f"{host}:{held.getsockname()[1]}"
        self.send("start", coordinator=coordinator)
        return coordinator

    def send(self, kind: str, **fields: Any) -> int:
        """Send a message to all followers; return its number, for `outcomes`."""
        number = next(self._numbers)
        message = {"kind": kind, "number": number, "stream": _STREAM.get(), **fields}
        for connection in list(self._there.values()):
            try:
                connection.send(message)
            except OSError as error:
                self._report_lost(connection.peer, str(error))
        return number

    def outcomes(self, number: int, wait_s: float = _OUTCOME_S) -> None:
        """Wait until all followers have finished message `number`. Raises the first of their errors."""
        errors = [self._outcome(connection, number, wait_s) for connection in list(self._there.values())]
        if found := [error for error in errors if error is not None]:
            raise found[0]

    def end(self) -> None:
        """Tell the followers to end; one that disconnects from now on is not lost."""
        self._complete = False
        self.send("end")

    def close(self) -> None:
        self._listener.close()
        for connection in self._there.values():
            connection.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        try:
            given = welcome(sock, self._options.key, self._checked)
        except (OSError, DecodeError, Forbidden, KeyError, TypeError) as error:
            _log.warning("rejected a connection, not a process of this trainer", reason=str(error))
            sock.close()
            return
        peer = given["process_id"]
        if (former := self._there.pop(peer, None)) is not None:
            former.close()
        self._there[peer] = connection = PeerConnection(sock, peer)
        connection.watch(self._report_lost)
        _log.info("process joined", process=peer)

    def _checked(self, given: Message) -> Message:
        """Check a process that joins; return the reply. Raises Forbidden."""
        options, peer = self._options, given.get("process_id")
        if type(peer) is not int or not 0 < peer < options.n:
            raise Forbidden(f"services.trainer.process_id={peer} is not one of 1 to {options.n - 1}")
        if given.get("settings") != options.settings:
            raise Forbidden("its configuration differs: give every process the same configuration")
        return {"n": options.n}

    def _report_lost(self, peer: int, reason: str) -> None:
        if self._complete:
            self._lost(ProcessLost(f"process {peer} of the trainer is gone: {reason}"))
        self._there.pop(peer, None)

    def _outcome(self, connection: PeerConnection, number: int, wait_s: float) -> VolleyError | None:
        try:
            while (message := connection.receive(_STREAM.get(), wait_s)) is not None:
                if message.get("number") == number:
                    return _error_in(message)
            error = ProcessLost(f"process {connection.peer} of the trainer is gone")
        except TimeoutError as late:
            error = ProcessLost(str(late))
        self._lost(error)
        raise error


class Follower:
    """A follower's end of the connection.

    Args:
        lost: called, in another thread, with the error if process 0 is lost.
    """

    def __init__(self, options: GroupOptions, lost: Lost = end_process) -> None:
        self._options, self._lost = options, lost
        self._connection: PeerConnection | None = None

    def join(self) -> str:
        """Wait for process 0 and all others; return the address of JAX's coordinator.

        Raises ConfigError if process 0 refuses this process, and ProcessLost.
        """
        options = self._options
        about = {"process_id": options.process_id, "settings": options.settings}
        while self._connection is None:
            try:
                sock = socket.create_connection(options.address, timeout=_ASSEMBLE_S)
                greet(sock, options.key, about)
                self._connection = PeerConnection(sock, 0)
            except Forbidden as error:
                raise ConfigError(error.detail) from error
            except (OSError, DecodeError, KeyError, TypeError):
                time.sleep(_AGAIN_S)
        self._connection.watch(self._report_lost)
        return self._next()["coordinator"]

    def call(self) -> Message | None:
        """Wait for the next call; None when the leader ends. Raises ProcessLost."""
        while (message := self._next())["kind"] not in ("call", "end"):
            pass  # belongs to a call that has ended here
        return message if message["kind"] == "call" else None

    def receive_value(self) -> Any:
        """Receive the leader's decision inside a call. Raises the leader's error."""
        return self.receive_message()["value"]

    def receive_message(self) -> Message:
        """Receive the leader's message inside a call. Raises the leader's error."""
        message = self._next()
        if (error := _error_in(message)) is not None:
            raise error
        if "value" not in message:
            raise ProcessLost("process 0 of the trainer has ended in the middle of a call")
        return message

    def report(self, number: int, error: VolleyError | None = None) -> None:
        """Report that message `number` is finished, or its error."""
        assert self._connection is not None
        try:
            message = {"number": number, "problem": None if error is None else problem(error), "stream": _STREAM.get()}
            self._connection.send(message)
        except OSError as gone:
            self._report_lost(0, str(gone))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _next(self) -> Message:
        assert self._connection is not None
        message = self._connection.receive(_STREAM.get())
        if message is None:
            raise ProcessLost("process 0 of the trainer is gone")
        return message

    def _report_lost(self, peer: int, reason: str) -> None:
        self._lost(ProcessLost(f"process {peer} of the trainer is gone: {reason}"))


@contextmanager
def stream(name: str) -> Iterator[None]:
    """Lead or follow calls of the named stream inside the context."""
    token = _STREAM.set(name)
    try:
        yield
    finally:
        _STREAM.reset(token)


def together[R](leader: Leader, name: str, arguments: Mapping[str, Any], ours: Callable[[], R]) -> R:
    """Run `ours` while the followers run the call `name`; return its result when all have finished.

    Raises its error, or the first of theirs.
    """
    number = leader.send("call", name=name, arguments=dict(arguments))
    try:
        result = ours()
    except VolleyError as error:
        leader.send("failed", problem=problem(error))
        try:
            leader.outcomes(number)
        except VolleyError as theirs:
            _log.warning("a follower failed too", call=name, detail=str(theirs))
        raise
    leader.outcomes(number)
    return result


def follow(follower: Follower, calls: Calls) -> None:
    """Run the leader's calls until it ends. Raises ProcessLost."""
    while (message := follower.call()) is not None:
        error: VolleyError | None = None
        try:
            calls[message["name"]](message["arguments"])
        except ProcessLost:
            raise
        except VolleyError as met:
            error = met
            _log.warning("call failed", call=message["name"], detail=str(met))
        follower.report(message["number"], error)


def _error_in(message: Message) -> VolleyError | None:
    found = message.get("problem")
    return None if found is None else from_problem(found["status"], found)


def _listener(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = host_problem(error) or error.strerror or str(error)
        raise ConfigError(
            f"services.trainer.coordinator_address={host}:{port}: cannot listen there: {reason}",
            "set it to a free address of process 0's host that the trainer's other processes can reach",
        ) from error
