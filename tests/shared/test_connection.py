"""What one connection may cost: heads that drip or never end, bodies nobody reads, answers nobody reads, too many at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from shared.process import telemetry
from shared.services_schema import Limits, ServicesSection
from shared.web import serving
from shared.web.access import AccessTokens, Role
from shared.web.connection import MAX_FIELD_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, Connection
from shared.web.http import create_app
from shared.web.limits import RateLimiter
from tests.support.asgi import served
from tests.support.loop_clock import skip

LIMITS = Limits(max_connections=8, max_body_bytes=2**20, grace_s=1)
HURRIED = LIMITS.model_copy(update={"header_timeout_s": 0.3})
ROLES = {"POST /size": Role.ANYONE, "GET /large": Role.ANYONE, "GET /long": Role.ANYONE}
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def make_app(limits: Limits = LIMITS, long: Callable[[], Awaitable[object]] | None = None) -> FastAPI:
    app = create_app(
        "demo", limits=limits, tokens=AccessTokens({Role.ADMIN: "secret"}), ready=lambda: None, roles=ROLES
    )

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/forbidden")
    async def forbidden() -> None: ...

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * 2**24)

    @app.get("/long")
    async def answer_late() -> str:
        assert long is not None
        await long()
        return "done"

    return app


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, data: bytes, pause_s: float = 0.02) -> None:
        """A byte at a time, until the server has had enough."""
        for byte in data:
            if self.writer.is_closing() or self.reader.at_eof():
                return
            self.writer.write(bytes([byte]))
            await asyncio.sleep(pause_s)

    async def push(self, chunk: bytes, total: int) -> int:
        """Sends `chunk` again and again; returns how many bytes were taken, at most about `total`."""
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < total:
                await self.send(chunk)
                sent += len(chunk)
        return sent

    async def rest(self) -> bytes:
        """All that comes until the server ends the connection."""
        received = b""
        try:
            async with asyncio.timeout(60):
                while data := await self.reader.read(2**16):
                    received += data
        except ConnectionError:
            return received
        return received


type Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def serving_demo(
    limits: Limits = LIMITS, long: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[Connect]:
    async with served(make_app(limits, long), ServicesSection(limits=limits)) as url:
        port, opened = int(url.rpartition(":")[2]), []

        async def connect() -> Client:
            opened.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
            return opened[-1]

        try:
            yield connect
        finally:
            for client in opened:
                client.writer.close()


def cut(reason: str) -> float:
    return telemetry.REGISTRY.get_sample_value("volley_http_connections_cut_total", {"reason": reason}) or 0.0


def refused(answer: bytes, status: int, detail: str) -> None:
    """One whole problem body, and the end of the connection. `detail`: a pattern."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert {b"content-type: application/problem+json", b"content-length: %d" % len(body), b"connection: close"} <= set(
        head.split(b"\r\n")
    )
    problem = orjson.loads(body)
    assert problem["status"] == status
    assert re.search(detail, problem["detail"])


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", GET, GET + b"X-Part", b"\r\n", GET + b"\r\n" + GET])
async def test_a_head_that_does_not_end_is_cut(sent: bytes):
    async with serving_demo(HURRIED) as connect:
        before, client = cut("slow head"), await connect()
        await client.send(sent)
        answer = await client.rest()
        refused(answer[answer.rindex(b"HTTP/1.1 ") :], 408, "in time")
        assert cut("slow head") == before + 1


async def test_a_head_that_drips_is_cut_although_bytes_keep_coming():
    async with serving_demo(HURRIED) as connect:
        before, client = cut("slow head"), await connect()
        await client.drip(GET + b"X: " + b"y" * 500)
        assert cut("slow head") == before + 1


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"X: " + b"y" * 2**20,
        b"GET /" + b"y" * 2 * MAX_HEAD_BYTES,
        GET + b"".join(b"X-%d: y\r\n" % i for i in range(MAX_HEADERS + 1)) + b"\r\n",
        GET + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(70)) + b"\r\n",
    ],
    ids=["one value", "address", "many", "long"],
)
async def test_a_large_head_is_refused(sent: bytes):
    async with serving_demo() as connect:
        client = await connect()
        await client.send(sent)
        refused(await client.rest(), 431, "the head of the request exceeds 65536 bytes or 100 headers|a value")


@pytest.mark.parametrize("step", [1000, 2**16])
@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        (b"GET /health?", b" HTTP/1.1\r\nHost: x\r\n", 431),
        (GET + b"X: ", b"\r\n", 431),
        (GET + b"CooKie: ", b"\r\n", 200),
    ],
    ids=["target", "header", "cookies"],
)
async def test_only_cookies_may_be_longer_than_a_header(before: bytes, after: bytes, status: int, step: int):
    """Browsers send those of all services of a machine, and none is read; the target may arrive in parts."""
    sent = before + b"y" * (MAX_FIELD_BYTES + 1) + after + b"Connection: close\r\n\r\n"
    async with serving_demo() as connect:
        client = await connect()
        for at in range(0, len(sent), step):
            await client.send(sent[at : at + step])
            await asyncio.sleep(0)
        assert (await client.rest()).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "endless", [b"1;" + b"x" * 2**18, b"0\r\nTrailer: " + b"x" * 2**18], ids=["extension", "trailer"]
)
async def test_what_a_parser_would_hold_back_for_ever_is_bounded(endless: bytes):
    async with serving_demo() as connect:
        client = await connect()
        await client.send(b"POST /size HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + endless)
        refused(await client.rest(), 431, "a chunk's size, an extension or a trailer")


CHUNKED = b"POST /size HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /size HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (CHUNKED + b"FFFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED + b"7FFFFFFFFFFFFFFF\r\n", 413),
        (CHUNKED + b"%x\r\n" % (2**20 + 1), 413),
        (CHUNKED + b"5\r\nhello\r\n" + b"%x\r\n" % (2**20 - 4), 413),
        (CHUNKED + b"10000000000000000\r\n", 400),
        (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5_0\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"\r\nhello\r\n0\r\n\r\n", 400),
        (CHUNKED + b"5\r\nhelloX0\r\n\r\n", 400),
        (CHUNKED + b"1" * 2000, 431),
        (CHUNKED + (b"1;" + b"x" * 1000 + b"\r\ny\r\n") * 17, 431),
        (CHUNKED + b"0\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 17, 431),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
        (POST + b"Content-Length: 5, 5\r\n\r\nhello", 400),
        (POST + b"Content-Length: -5\r\n\r\nhello", 400),
        (POST + b"Content-Length: +5\r\n\r\nhello", 400),
        (POST + b"Content-Length: 0x5\r\n\r\nhello", 400),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello", 400),
        (POST + b"Content-Length: 1048577\r\n\r\n", 413),
        (POST + b"Content-Length: 18446744073709551615\r\n\r\n", 413),
        (POST + b"Content-Length: 1048577\r\nExpect: 100-continue\r\n\r\n", 413),
        (POST + b"Transfer-Encoding: gzip, identity\r\n\r\nhello", 400),
        (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\nhello", 400),
        (b"POST /size HTTP/1.1\nHost: x\nTransfer-Encoding: chunked\n\n5\nhello\n0\n\n", 400),
        (b"POST /size HTTP/1.1\nHost: x\nContent-Length: 5\n\nhello", 400),
    ],
)
async def test_a_body_that_lies_about_its_length_is_refused_at_once(sent: bytes, status: int):
    """By what it announces: none of them is waited for."""
    async with serving_demo(Limits(header_timeout_s=30, body_timeout_s=30, max_body_bytes=2**20, grace_s=1)) as connect:
        client = await connect()
        await client.send(sent)
        refused(
            await client.rest(),
            status,
            {413: "the body exceeds|the chunks announce", 400: "not valid|does not follow", 431: "exceeds"}[status],
        )


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_bodies_arrive_whole_however_they_are_cut(step: int):
    """Several requests sent ahead, in pieces of `step` bytes."""
    chunked = CHUNKED + b"5;a=b\r\nhello\r\n0003;x\r\nyou\r\n0\r\nX-Trailer: 1\r\n\r\n"
    sized = POST + b"Content-Length: 4\r\n\r\n\r\n\r\n"
    stream = (
        b"\r\n" + chunked + sized + POST + b"Content-Length: 0\r\n\r\n" + chunked + POST + b"Connection: close\r\n\r\n"
    )
    async with serving_demo(Limits(max_body_bytes=2**20, grace_s=1)) as connect:
        client = await connect()
        for at in range(0, len(stream), step):
            await client.send(stream[at : at + step])
            await asyncio.sleep(0)
        answers = (await client.rest()).split(b"HTTP/1.1 200 OK")
    assert [answer[-1:] for answer in answers[1:]] == [b"8", b"4", b"0", b"8", b"0"]


async def test_an_expected_body_is_asked_for():
    async with serving_demo() as connect:
        client = await connect()
        await client.send(POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 100 ")


async def test_malformed_bytes_are_refused():
    async with serving_demo() as connect:
        client = await connect()
        await client.send(b"\x16\x03\x01 no http\r\n\r\n")
        refused(await client.rest(), 400, "not valid HTTP/1.1")


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "second"])
@pytest.mark.parametrize("head", [b"CONNECT evil:80", b"CONNECT http://:x/", b"GET http://:x/", b"GET http://x"])
async def test_a_target_that_is_no_path_is_refused(head: bytes, before: bytes, caplog: pytest.LogCaptureFixture):
    async with serving_demo() as connect:
        client = await connect()
        if before:
            await client.send(before)
            await client.reader.readuntil(b"}")
        await client.send(head + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        refused(await client.rest(), 400, "not valid HTTP/1.1")
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


async def test_many_requests_sent_ahead_are_refused_and_a_few_are_answered():
    async with serving_demo() as connect:
        few, many = await connect(), await connect()
        await few.send((GET + b"\r\n") * 4 + GET + b"Connection: close\r\n\r\n")
        await many.send((GET + b"\r\n") * 100)
        assert (await few.rest()).count(b'{"status":"ok"') == 5
        assert b"more than 8 requests were pipelined" in await many.rest()


@pytest.mark.parametrize(
    "head", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"], ids=["declared", "chunked"]
)
async def test_the_rest_of_a_body_that_is_too_large_is_read_up_to_a_bound(head: bytes):
    async with serving_demo() as connect:
        client = await connect()
        await client.send(b"POST /size HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        assert await client.push(b"10000\r\n" + b"x" * 2**16 + b"\r\n", 10**9) < 2**29


@pytest.mark.parametrize("path", ["/size", "/forbidden"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_learns_that_its_connection_ends_with_an_early_answer(path: str, chunked: bool):
    """So it sends its next request on another one."""
    large = b"x" * 2**21

    async def pieces() -> AsyncIterator[bytes]:
        yield large

    limits = Limits(max_body_bytes=2**20, grace_s=1)
    async with (
        served(make_app(limits), ServicesSection(limits=limits)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
    ):
        refused = await client.post(path, content=pieces() if chunked else large)
        assert refused.status_code in (413, 401)
        assert refused.headers["connection"] == "close"
        assert (await client.post("/size", content=b"hello")).json() == 5


async def test_nothing_is_answered_after_an_answer_that_ends_the_connection():
    async with serving_demo() as connect:
        client = await connect()
        await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"connection: close" in await client.reader.readuntil(b"}")
        await client.send(b"5\r\nhello\r\n0\r\n\r\n" + GET + b"\r\n")
        assert await client.rest() == b""


async def test_a_client_that_asked_for_the_end_gets_its_early_answer_whole():
    async with serving_demo() as connect:
        client = await connect()
        await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\n")
        assert b"401" in await client.reader.readuntil(b"}")
        await client.send(b"hello")
        assert await client.rest() == b""


async def test_the_connection_stays_open_when_the_rest_of_a_refused_request_is_short():
    """The answer comes before the body, which a client may well have on its way."""
    async with serving_demo() as connect:
        client = await connect()
        for _ in range(3):
            await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
            assert b"401" in await client.reader.readuntil(b"}")
            await client.send(b"hello")
        await client.send(GET + b"\r\n")
        assert b"200 OK" in await client.reader.readline()


async def test_a_long_request_that_comes_with_the_rest_of_a_refused_one_is_answered():
    asked, ended = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        asked.set()
        await ended.wait()

    async with serving_demo(long=long) as connect:
        client = await connect()
        await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        assert b"401" in await client.reader.readuntil(b"}")
        await client.send(b"helloGET /long HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asked.wait()
        skip(serving._KEEP_ALIVE_S)
        for _ in range(10):  # a timer that is due would be heard
            await asyncio.sleep(0)
        ended.set()
        assert (await client.rest()).endswith(b'"done"')


async def test_the_connection_stays_open_after_a_whole_body():
    async with serving_demo() as connect:
        client = await connect()
        for _ in range(2):
            await client.send(b"POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
            assert b"200 OK" in await client.reader.readuntil(b"\r\n\r\n5")


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
async def test_an_answer_nobody_reads_is_given_up(last: bytes):
    async with serving_demo() as connect:
        before, client = cut("slow reader"), await connect()
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n" + last + b"\r\n")
        assert b"200 OK" in await client.reader.readline()
        while cut("slow reader") == before:
            skip(LIMITS.body_timeout_s)
            await asyncio.sleep(0.02)
        assert len(await client.rest()) < 2**24


async def test_an_answer_whose_end_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """The client reads until the server may write again, and no further."""
    resumed = asyncio.Event()

    class Seen(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # as uvicorn's
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=2**23)

        def resume_writing(self) -> None:
            super().resume_writing()
            resumed.set()

    monkeypatch.setattr(serving, "Connection", Seen)
    async with serving_demo() as connect:
        before, client = cut("slow reader"), await connect()
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while not resumed.is_set():
            assert await client.reader.read(2**16)
        while cut("slow reader") == before:
            skip(LIMITS.body_timeout_s)
            await asyncio.sleep(0.02)


async def test_an_answer_that_is_read_late_arrives_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_KEEP_ALIVE_S", 0.1)
    async with serving_demo(Limits(grace_s=1)) as connect:
        client = await connect()
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.5)
        assert len(await client.rest()) > 2**24


async def test_an_answer_that_is_read_arrives_whole():
    async with serving_demo(Limits(grace_s=1)) as connect:
        client = await connect()
        await client.send(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert len(await client.rest()) > 2**24


async def test_more_connections_than_allowed_are_turned_away_and_the_others_live():
    async with serving_demo(Limits(max_connections=LIMITS.max_connections, grace_s=1)) as connect:
        clients = [await connect() for _ in range(LIMITS.max_connections)]
        await clients[-1].send(GET + b"\r\n")
        assert b"200 OK" in await clients[-1].reader.readline()
        extra = await connect()
        assert await extra.rest() == b""
        await clients[0].send(GET + b"\r\n")
        assert b"200 OK" in await clients[0].reader.readline()


def test_connections_leave_file_descriptors_for_the_service():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert serving.connections_for(10) == 10
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    assert serving.connections_for(hard) < hard


def test_a_bucket_lets_bursts_through_and_then_its_pace():
    buckets = RateLimiter(2.0)
    assert [buckets.wait_s("a", 0.0) for _ in range(20)] == [0.0] * 20
    assert buckets.wait_s("a", 0.0) == 0.5
    assert buckets.wait_s("b", 0.0) == 0.0
    assert [buckets.wait_s("a", 0.5), buckets.wait_s("a", 0.5)] == [0.0, 0.5]
    assert [buckets.wait_s("a", 1000.0) for _ in range(21)] == [0.0] * 20 + [0.5]


def test_the_number_of_buckets_is_bounded():
    buckets = RateLimiter(1.0)
    for n in range(10_000):
        buckets.wait_s(str(n), 0.0)
    assert len(buckets._filled) == 4096
