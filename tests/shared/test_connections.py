"""Connections of our own answer as aiohttp's do, whatever the server sends."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from shared.clients import connections, wires
from shared.clients.base import HttpClient
from shared.clients.connections import is_plain
from shared.clients.wires import Network, Plain
from shared.errors import MalformedAnswer, ServiceUnreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nhi"


class ByteServer:
    """Sends the same bytes for each request; `seen` has the request heads, and the connections' numbers."""

    def __init__(self, answer: bytes, *, ends: bool = False) -> None:
        self.answer, self.ends, self.seen, self.n = answer, ends, list[tuple[int, bytes]](), 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n += 1
        number = self.n
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.seen.append((number, head))
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line[15:]))
                writer.write(self.answer)
                await writer.drain()
                if self.ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: ByteServer):
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/base"


def client(url: str, kind: str) -> HttpClient:
    """One over our connections, or one over aiohttp's."""
    return HttpClient(url, timeout_s=2.0, keep_cookies=kind == "aiohttp", token="a-token")


async def asked(url: str, kind: str, path: str = "/x", body: object = None) -> object:
    """The reply, or the error's text without the port."""
    async with client(url, kind) as c:
        try:
            return await c.exchange("POST" if body else "GET", path, body)
        except (ServiceUnreachable, MalformedAnswer) as error:
            return type(error), str(error).replace(url, "")


ANSWERS = {
    "a length": (WHOLE, False),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n", False),
    "until the end": (OK + b"\r\nhi", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", False),
    "an earlier 103": (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + WHOLE, False),
    "closes": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", True),
    "HTTP 1.0": (b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nhi", True),
    "when to ask again": (b"HTTP/1.1 429 Wait\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n", False),
    "cut content": (OK + b"Content-Length: 5\r\n\r\nhi", True),
    "cut chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhi", True),
    "cut head": (OK, True),
    "nothing": (b"", True),
    "another protocol": (b"+PONG\r\n", True),
    "bad chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n", True),
    "bad status": (b"HTTP/1.1 abc OK\r\n\r\n", True),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_is_read_as_aiohttp_reads_it(name: str) -> None:
    answer, ends = ANSWERS[name]
    async with serving(ByteServer(answer, ends=ends)) as url:
        ours, theirs = await asked(url, "ours"), await asked(url, "aiohttp")
    if "cut" in name:  # aiohttp says how many bytes are missing
        assert isinstance(ours, tuple)
        assert isinstance(theirs, tuple)
        assert ours[0] is theirs[0] is ServiceUnreachable
    else:
        assert ours == theirs


@pytest.mark.parametrize("path", ["/a/b", "/a b", "/ä", "/x%20y", "/env@1/step", "/a?b=c&d=é", "/a+b;c=1,2:3"])
@pytest.mark.parametrize("body", [None, {"a": 1}])
async def test_a_request_is_sent_as_aiohttp_sends_it(path: str, body: object) -> None:
    server = ByteServer(WHOLE)
    async with serving(server) as url:
        for kind in ("ours", "aiohttp"):
            await asked(url, kind, path, body)
    (first, *ours), (second, *theirs) = (
        sorted(head.split(b"\r\n"), key=lambda line: not line.startswith((b"GET ", b"POST ")))
        for _, head in server.seen
    )
    assert first == second
    assert {line.lower() for line in theirs} - {line.lower() for line in ours} == {b"accept: */*"}


async def test_parameters_are_sent_as_aiohttp_sends_them() -> None:
    server = ByteServer(WHOLE)
    async with serving(server) as url:
        for kind in ("ours", "aiohttp"):
            async with client(url, kind) as c:
                with pytest.raises(MalformedAnswer):
                    await c.get("/x", {"a": "b c&d", "n": 3})
    assert len({head.split(b"\r\n")[0] for _, head in server.seen}) == 1


async def test_connections_are_used_again_while_they_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ByteServer(WHOLE)
    async with serving(server) as url, client(url, "ours") as c:
        await c.exchange("GET", "/1")
        await asyncio.gather(c.exchange("GET", "/2"), c.exchange("GET", "/3"))
        assert server.n == 2
        monkeypatch.setattr(connections, "KEEPALIVE_S", -1.0)
        await c.exchange("GET", "/4")
    assert [number for number, _ in server.seen] in ([1, 1, 2, 3], [1, 2, 1, 3])


@pytest.mark.parametrize("answer", [WHOLE + WHOLE, OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi"])
async def test_a_connection_with_more_than_the_answer_is_not_used_again(answer: bytes) -> None:
    server = ByteServer(answer)
    async with serving(server) as url, client(url, "ours") as c:
        for _ in range(3):
            assert (await c.exchange("GET", "/")).content == b"hi"
            await asyncio.sleep(0.05)
    assert server.n == 3


async def test_a_call_that_ends_early_closes_its_connection() -> None:
    server = ByteServer(OK + b"Content-Length: 5\r\n\r\nhi")
    async with serving(server) as url, client(url, "ours") as c:
        with pytest.raises(ServiceUnreachable, match="did not answer in time"):
            await c.exchange("GET", "/", timeout_s=0.1)
        task = asyncio.create_task(c.exchange("GET", "/"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.answer = WHOLE
        assert (await c.exchange("GET", "/")).content == b"hi"
    assert server.n == 3


async def test_what_takes_a_stream_may_end_it() -> None:
    def take(block: bytes) -> None:
        blocks.append(block)
        if len(blocks) > 1:
            raise MalformedAnswer("too much")

    blocks = list[bytes]()
    async with serving(ByteServer(OK + b"Content-Length: 4\r\n\r\nhi")) as url, client(url, "ours") as c:
        stream = asyncio.create_task(c.download("/", take))
        await asyncio.sleep(0.1)
        assert blocks == [b"hi"]
        stream.cancel()
    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"
    async with serving(ByteServer(chunked)) as url, client(url, "ours") as c:
        blocks.clear()
        with pytest.raises(MalformedAnswer, match="too much"):
            await c.download("/", take)


@pytest.mark.parametrize("kind", ["ours", "aiohttp"])
async def test_a_long_answer_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "MAX_ANSWER_BYTES", 3)
    async with serving(ByteServer(OK + b"Content-Length: 4\r\n\r\nlong")) as url, client(url, kind) as c:
        with pytest.raises(MalformedAnswer, match="longer than 3 bytes"):
            await c.exchange("GET", "/x")


async def test_a_connection_that_was_closed_before_the_request_does_not_wait_for_an_answer() -> None:
    async with serving(ByteServer(WHOLE)) as url:
        pool = connections.Connections(url, {})
        connection = await pool._connected()
        connection.transport.abort()
        await asyncio.sleep(0.01)  # the loss is known before there is an exchange to end
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(connection.carry(b"", connections.HttpExchange(lambda _: bytes)), 5)


async def test_closing_ends_what_is_under_way() -> None:
    async with serving(ByteServer(OK)) as url:
        async with client(url, "ours") as c:
            waiting = asyncio.create_task(c.exchange("GET", "/", timeout_s=30))
            await asyncio.sleep(0.1)
        with pytest.raises(ServiceUnreachable, match="closed before the answer"):
            await waiting


async def test_a_header_cannot_hold_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        Plain("http://127.0.0.1:1", {"Authorization": "Bearer x\r\nX: y"})


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("http://127.0.0.1:80", True),
        ("http://[::1]:80/x", True),
        ("http://rollout", True),
        ("https://rollout", False),
        ("http://user:word@rollout", False),
        ("http://röllout", False),
        ("http://rollout:99999", False),
        ("http://", False),
        ("rollout:80", False),
    ],
)
async def test_other_addresses_are_left_to_aiohttp(url: str, *, ours: bool) -> None:
    assert is_plain(url) is ours
    async with HttpClient(url) as c:
        assert isinstance(c._wire, Plain if ours else Network)
