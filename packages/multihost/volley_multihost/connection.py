"""Connection between two processes of a trainer: messages both ways over TCP.

Each end first proves that it knows the run's service token (HMAC of the other's nonce), then sends a heartbeat every
second. A peer that closes the connection, or is silent for `SILENCE_S`, is lost; the kernel reports a killed process at
once.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shared import codec
from shared.errors import DecodeError, Forbidden

SILENCE_S = 30.0
_ALIVE_EVERY_S = 1.0
_GREETING_S = 10.0
_GREETING_BYTES = 4096
_LENGTH = struct.Struct(">Q")
_ALIVE = "alive"

type Message = Mapping[str, Any]


class PeerConnection:
    """Messages of one peer, in named streams, each in order. Any thread may send; one thread receives each stream."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self._sock, self.peer = sock, peer
        self._sending, self._streams, self._has_ended = threading.Lock(), threading.Lock(), False
        self._received = defaultdict[str, queue.SimpleQueue[Message | None]](queue.SimpleQueue)
        self._closed = threading.Event()

    def watch(self, lost: Callable[[int, str], None]) -> None:
        """Start receiving. `lost` gets the peer's number and the reason if it disconnects before `close`."""
        self._sock.settimeout(SILENCE_S)
        for work in (lambda: self._read(lost), self._live):
            threading.Thread(target=work, name=f"peer-{self.peer}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the peer is gone."""
        data = codec.pack(message)
        with self._sending:
            self._sock.sendall(_LENGTH.pack(len(data)))
            self._sock.sendall(data)

    def receive(self, stream: str, timeout_s: float | None = None) -> Message | None:
        """Wait for the next message; None once the connection has ended. Raises TimeoutError."""
        try:
            message = self._queue(stream).get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"process {self.peer} sent nothing for {timeout_s:g} s") from None
        if message is None:
            self._queue(stream).put(None)
        return message

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, lost: Callable[[int, str], None]) -> None:
        reason = "its connection has ended"
        try:
            while (message := _message(self._sock)) is not None:
                if message.get("kind") != _ALIVE:
                    self._queue(message.get("stream", "")).put(message)
        except TimeoutError:
            reason = f"it was silent for {SILENCE_S:g} s"
        except (OSError, DecodeError) as error:
            reason = str(error)
        if not self._closed.is_set():
            lost(self.peer, reason)
        with self._streams:
            self._has_ended = True
            for received in self._received.values():
                received.put(None)

    def _queue(self, stream: str) -> queue.SimpleQueue[Message | None]:
        with self._streams:
            if stream not in self._received and self._has_ended:
                self._received[stream].put(None)
            return self._received[stream]

    def _live(self) -> None:
        while not self._closed.wait(_ALIVE_EVERY_S):
            try:
                self.send({"kind": _ALIVE})
            except OSError:
                return  # the reader reports it


def greet(sock: socket.socket, key: bytes, given: Message) -> Message:
    """Greet as the connecting end: prove the key, send `given`, return the other end's answer.

    Raises OSError, DecodeError, Forbidden (the other end does not know the key, or refuses this process).
    """
    sock.settimeout(_GREETING_S)
    theirs, ours = _expected(sock)["nonce"], os.urandom(32)
    about = codec.pack(given)
    _send(sock, {"about": about, "nonce": ours, "proof": _proof(key, b"connects", theirs, about)})
    answer = _expected(sock)
    if "refused" in answer:
        raise Forbidden(f"process 0 of the trainer refuses this one: {answer['refused']}")
    if not hmac.compare_digest(bytes(answer["proof"]), _proof(key, b"listens", ours, answer["about"])):
        raise Forbidden("the listener at services.trainer.coordinator_address does not know the run's service token")
    return codec.unpack(answer["about"])


def welcome(sock: socket.socket, key: bytes, answer: Callable[[Message], Message]) -> Message:
    """Greet as the listening end: check the other end's key; return what it says of itself.

    `answer` makes the reply, and raises Forbidden for a process that does not belong to this trainer.

    Raises OSError, DecodeError, Forbidden.
    """
    sock.settimeout(_GREETING_S)
    nonce = os.urandom(32)
    _send(sock, {"nonce": nonce})
    greeting = _expected(sock)
    try:
        if not hmac.compare_digest(bytes(greeting["proof"]), _proof(key, b"connects", nonce, greeting["about"])):
            raise Forbidden("it does not know the run's service token")
        given = codec.unpack(greeting["about"])
        about = codec.pack(answer(given))
    except Forbidden as error:
        _send(sock, {"refused": error.detail})
        raise
    _send(sock, {"about": about, "proof": _proof(key, b"listens", greeting["nonce"], about)})
    return given


def _proof(key: bytes, side: bytes, nonce: bytes, about: bytes) -> bytes:
    return hmac.digest(key, side + nonce + about, "sha256")


def _send(sock: socket.socket, message: Message) -> None:
    data = codec.pack(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _expected(sock: socket.socket) -> Message:
    """Read a message of a greeting. Raises DecodeError for any other message."""
    message = _message(sock, _GREETING_BYTES)
    if message is None or not all(isinstance(value, bytes | str) for value in message.values()):
        raise DecodeError("a message is not a greeting of a trainer's process")
    return message


def _message(sock: socket.socket, most: int | None = None) -> Message | None:
    """Read a message; None at the end of the connection. Raises OSError, DecodeError."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if most is not None and length > most:
        raise DecodeError(f"a greeting has {length} bytes, more than {most}")
    body = _exactly(sock, length)
    message = None if body is None else codec.unpack(body, "message")
    if message is not None and not isinstance(message, dict):
        raise DecodeError("a message is not an object")
    return message


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    made, view = bytearray(n), 0
    while view < n:
        got = sock.recv_into(memoryview(made)[view:])
        if not got:
            return None
        view += got
    return bytes(made)
