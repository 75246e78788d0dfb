"""One connection between two processes of a trainer: whole messages both ways, over TCP.

Each end proves that it knows the run's service token before anything else is read (HMAC of the other's nonce), and
sends a sign of life every second. Who closes the connection, or is silent for `SILENCE_S`, is lost: the kernel tells of
a process that was killed at once.
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


class Connection:
    """Messages of one peer, in streams by the name that they carry, each in its order; any thread may send, one
    receives those of a stream.
    """

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self._sock, self.peer = sock, peer
        self._sending, self._streams, self._has_ended = threading.Lock(), threading.Lock(), False
        self._received = defaultdict[str, queue.SimpleQueue[Message | None]](queue.SimpleQueue)
        self._closed = threading.Event()

    def watch(self, lost: Callable[[int, str], None]) -> None:
        """From now on messages are taken in, and `lost` is told of a peer that is gone, with the reason, unless we have
        closed the connection ourselves.
        """
        self._sock.settimeout(SILENCE_S)
        for work in (lambda: self._read(lost), self._live):
            threading.Thread(target=work, name=f"peer-{self.peer}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Raises OSError if the peer is gone."""
        data = codec.pack(message)
        with self._sending:
            self._sock.sendall(_LENGTH.pack(len(data)))
            self._sock.sendall(data)

    def receive(self, stream: str, timeout_s: float | None = None) -> Message | None:
        """The next message; None once the connection has ended. Raises TimeoutError."""
        try:
            message = self._queue(stream).get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"process {self.peer} said nothing for {timeout_s:g} s") from None
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
                return  # the reader tells of it


def greet(sock: socket.socket, key: bytes, given: Message) -> Message:
    """Of who connects: proves that we know the key, says who we are, and returns what the other end answers.

    Raises OSError, DecodeError, Forbidden (the other end does not know the key, or will not have us).
    """
    sock.settimeout(_GREETING_S)
    theirs, ours = _expected(sock)["nonce"], os.urandom(32)
    about = codec.pack(given)
    _send(sock, {"about": about, "nonce": ours, "proof": _proof(key, b"connects", theirs, about)})
    answer = _expected(sock)
    if "refused" in answer:
        raise Forbidden(f"process 0 of the trainer refuses this one: {answer['refused']}")
    if not hmac.compare_digest(bytes(answer["proof"]), _proof(key, b"listens", ours, answer["about"])):
        raise Forbidden("who listens for the processes of the trainer does not know the run's service token")
    return codec.unpack(answer["about"])


def welcome(sock: socket.socket, key: bytes, answer: Callable[[Message], Message]) -> Message:
    """Of who listens: what the other end says of itself, once it has proven that it knows the key. `answer` gives what
    it is told, and raises Forbidden for one that does not belong here.

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
    """Raises DecodeError for what is no part of a greeting."""
    message = _message(sock, _GREETING_BYTES)
    if message is None or not all(isinstance(value, bytes | str) for value in message.values()):
        raise DecodeError("this is not how processes of a trainer greet each other")
    return message


def _message(sock: socket.socket, most: int | None = None) -> Message | None:
    """None at the end of the connection. Raises OSError, DecodeError."""
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if most is not None and length > most:
        raise DecodeError(f"a greeting of {length} bytes")
    body = _exactly(sock, length)
    message = None if body is None else codec.unpack(body, "message")
    if message is not None and not isinstance(message, dict):
        raise DecodeError("a message that is no object")
    return message


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    made, view = bytearray(n), 0
    while view < n:
        got = sock.recv_into(memoryview(made)[view:])
        if not got:
            return None
        view += got
    return bytes(made)
