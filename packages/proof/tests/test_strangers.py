"""`volley verify` where another program has taken the port of the run's Redis: the files are proven all the same, in
bounded time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from shared.run import trust
from shared.run.folder import RunFolder
from tests.support import small_run
from volley_proof.verify import command

ANSWERS = {
    "silence": None,
    "a closed connection": b"",
    "a web server": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "noise": bytes(range(256)) * 16,
    "a string without an end": b"$9999999999\r\nx",
    "a list of a billion": b"*1000000000\r\n",
    "a list in a list in a list": b"*1\r\n" * 100_000,
    "a number for everything": b":7\r\n" * 1000,
    "a text for everything": b"+OK\r\n" * 1000,
    "an error for everything": b"-ERR no\r\n" * 1000,
}


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """The port of a program that answers every connection so; None: it accepts and says nothing."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.recv(4096)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in held:
                connection.close()
            thread.join(5)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(small_run.make(tmp_path_factory.mktemp("valid") / small_run.RUN))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_stranger_on_the_port_of_redis_is_told_of_and_changes_nothing(valid: RunFolder, answer: bytes | None) -> None:
    with listening(answer) as port:
        valid.services.write_text(
            yaml.safe_dump({"services": {"redis_url": f"redis://127.0.0.1:{port}/0"}}), encoding="utf-8"
        )
        trust.accept(valid)
        result = command.verify(valid)
    assert result["ok"], result["violations"]
    assert result["redis"] not in ("agrees", "differs")
