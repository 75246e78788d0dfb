"""The processes of one trainer, as a leader and those who follow it.

Process 0 leads: it alone talks to Redis and to other services. The others do what it does on the model, call by call,
because every process of a JAX program has to run the same computations in the same order. What the leader decides by
itself inside a call (which checkpoint is whole, where one is written) it tells; a call is over when all have ended it.

Invariant: after a call that raised, whoever raised it, all processes wait for the next one; or the incarnation ends.
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

from services.trainer.multihost.connection import Connection, Message, greet, welcome
from services.trainer.multihost.options import GroupOptions
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
from shared.process.ports import hold_free, host_problem

_ASSEMBLE_S = 2.0
_AGAIN_S = 0.5
_OUTCOME_S = 600.0
_log = telemetry.Log("processes")

_STREAM = ContextVar("stream", default="calls")
"""Which calls a thread leads or follows: there may be others beside them, of another thread."""

SAVES = "saves"
"""The stream of checkpoints that are written beside the steps."""

type Calls = Mapping[str, Callable[[Mapping[str, Any]], object]]
"""What is done for a call, by its name."""
type Lost = Callable[[VolleyError], None]


def end_process(error: VolleyError) -> NoReturn:
    """At once: a thread that waits in a collective for a process that is gone cannot be called back, and what is not
    durable is done again by the next incarnation, as after a kill.
    """
    _log.error("this incarnation of the trainer ends", error=type(error).__name__, detail=str(error))
    os._exit(1)


class Leader:
    """Process 0's end.

    Args:
        lost: is told, in a thread of its own, of a process that is gone once all were there.

    Raises ConfigError if the address cannot be listened at.
    """

    def __init__(self, options: GroupOptions, lost: Lost = end_process) -> None:
        self._options, self._lost = options, lost
        self._there: dict[int, Connection] = {}
        self._numbers = count(1)
        self._complete = False
        self._listener = _listener(options.address)

    @property
    def n(self) -> int:
        """Processes, this one included."""
        return self._options.n

    def assemble(self, wait_s: float = _ASSEMBLE_S) -> str | None:
        """Waits until all processes are there; then returns the address of JAX's coordinator, which all of them are
        told, and None if this was done before. Raises ProcessesMissing.
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
        self.tell("start", coordinator=coordinator)
        return coordinator

    def tell(self, kind: str, **fields: Any) -> int:
        """To all that follow; returns the message's number, to which `outcomes` belong."""
        number = next(self._numbers)
        message = {"kind": kind, "number": number, "stream": _STREAM.get(), **fields}
        for connection in list(self._there.values()):
            try:
                connection.send(message)
            except OSError as error:
                self._gone(connection.peer, str(error))
        return number

    def outcomes(self, number: int, wait_s: float = _OUTCOME_S) -> None:
        """Waits until all that follow have done what message `number` asked for. Raises the first of their errors."""
        errors = [self._outcome(connection, number, wait_s) for connection in list(self._there.values())]
        if found := [error for error in errors if error is not None]:
            raise found[0]

    def end(self) -> None:
        """Nothing more is to be done: who goes from now on is not lost."""
        self._complete = False
        self.tell("end")

    def close(self) -> None:
        self._listener.close()
        for connection in self._there.values():
            connection.close()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        try:
            given = welcome(sock, self._options.key, self._checked)
        except (OSError, DecodeError, Forbidden, KeyError, TypeError) as error:
            _log.warning("no process of this trainer", reason=str(error))
            sock.close()
            return
        peer = given["process_id"]
        if (former := self._there.pop(peer, None)) is not None:
            former.close()
        self._there[peer] = connection = Connection(sock, peer)
        connection.watch(self._gone)
        _log.info("process is there", process=peer)

    def _checked(self, given: Message) -> Message:
        """Raises Forbidden."""
        options, peer = self._options, given.get("process_id")
        if type(peer) is not int or not 0 < peer < options.n:
            raise Forbidden(f"services.trainer.process_id={peer} is not one of 1 to {options.n - 1}")
        if given.get("settings") != options.settings:
            raise Forbidden("it is configured otherwise: give every process the same configuration")
        return {"n": options.n}

    def _gone(self, peer: int, reason: str) -> None:
        if self._complete:
            self._lost(ProcessLost(f"process {peer} of the trainer is gone: {reason}"))
        self._there.pop(peer, None)

    def _outcome(self, connection: Connection, number: int, wait_s: float) -> VolleyError | None:
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
    """The end of any other process.

    Args:
        lost: is told, in a thread of its own, that process 0 is gone.
    """

    def __init__(self, options: GroupOptions, lost: Lost = end_process) -> None:
        self._options, self._lost = options, lost
        self._connection: Connection | None = None

    def join(self) -> str:
        """Waits for process 0, and for all others; returns the address of JAX's coordinator. Raises ConfigError if
        process 0 will not have us, ProcessLost.
        """
        options = self._options
        about = {"process_id": options.process_id, "settings": options.settings}
        while self._connection is None:
            try:
                sock = socket.create_connection(options.address, timeout=_ASSEMBLE_S)
                greet(sock, options.key, about)
                self._connection = Connection(sock, 0)
            except Forbidden as error:
                raise ConfigError(error.detail) from error
            except (OSError, DecodeError, KeyError, TypeError):
                time.sleep(_AGAIN_S)
        self._connection.watch(self._gone)
        return self._next()["coordinator"]

    def call(self) -> Message | None:
        """The next call; None when the leader ends. Raises ProcessLost."""
        while (message := self._next())["kind"] not in ("call", "end"):
            pass  # of a call that we ended before
        return message if message["kind"] == "call" else None

    def told(self) -> Any:
        """What the leader decided, inside a call. Raises the error that it met."""
        return self.asked()["value"]

    def asked(self) -> Message:
        """The same, with its number."""
        message = self._next()
        if (error := _error_in(message)) is not None:
            raise error
        if "value" not in message:
            raise ProcessLost("process 0 of the trainer has ended in the middle of a call")
        return message

    def report(self, number: int, error: VolleyError | None = None) -> None:
        """Says that we have done what message `number` asked for, or why not."""
        assert self._connection is not None
        try:
            told = {"number": number, "problem": None if error is None else problem(error), "stream": _STREAM.get()}
            self._connection.send(told)
        except OSError as gone:
            self._gone(0, str(gone))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _next(self) -> Message:
        assert self._connection is not None
        message = self._connection.receive(_STREAM.get())
        if message is None:
            raise ProcessLost("process 0 of the trainer is gone")
        return message

    def _gone(self, peer: int, reason: str) -> None:
        self._lost(ProcessLost(f"process {peer} of the trainer is gone: {reason}"))


@contextmanager
def stream(name: str) -> Iterator[None]:
    """Inside, calls are led, or followed, that have nothing to do with those of other streams."""
    token = _STREAM.set(name)
    try:
        yield
    finally:
        _STREAM.reset(token)


def together[R](leader: Leader, name: str, arguments: Mapping[str, Any], ours: Callable[[], R]) -> R:
    """Does `ours` while all others do the call `name`; returns its result when all have ended. Raises its error, or the
    first of theirs.
    """
    number = leader.tell("call", name=name, arguments=dict(arguments))
    try:
        result = ours()
    except VolleyError as error:
        leader.tell("failed", problem=problem(error))
        try:
            leader.outcomes(number)
        except VolleyError as theirs:
            _log.warning("a process met an error too", call=name, detail=str(theirs))
        raise
    leader.outcomes(number)
    return result


def follow(follower: Follower, calls: Calls) -> None:
    """Does what the leader does, until it ends. Raises ProcessLost."""
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
            "it is the address of process 0, at which the trainer's other processes reach it",
        ) from error
