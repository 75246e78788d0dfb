"""Chunks over real connections, from sources that lie, break off, drip, are busy, or die: what arrives is right, and
who sent something else is named and left out.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import httpx
import numpy as np
import orjson
import pytest
from fastapi import Request
from fastapi.responses import Response

from services.rollout import metrics
from services.rollout.weights import pulling
from services.rollout.weights.pulling import ChunkPuller, WantedVersion
from shared.clients.chunks import WeightSource
from shared.errors import NotFound, StorageFull, Unavailable, VolleyError
from shared.published import serving
from shared.published.chunks import ChunkFolder
from shared.published.delta import encode
from shared.published.holding import Holding
from shared.published.manifest import Chunk, Delta
from shared.published.order import drawn
from shared.published.serving import Uplink
from shared.services_schema import Limits
from shared.web.http import create_app
from shared.web.problems import problem_response
from tests.support.asgi import served
from tests.support.disk import file_size_limit

DATA = [random.Random(i).randbytes(200_000 + i) for i in range(6)]
CHUNKS = [Chunk(blake3.blake3(data).hexdigest(), len(data)) for data in DATA]
MANY = [random.Random(i).randbytes(20_000) for i in range(100, 140)]
VERSION = "m" * 64
BY_DIGEST = {chunk.blake3: data for chunk, data in zip(CHUNKS, DATA, strict=True)}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No source is slow on a busy machine, unless a test says otherwise."""
    monkeypatch.setattr(pulling, "PATIENCE_FIRST_S", 60.0)
    monkeypatch.setattr(pulling, "PATIENCE_S", 60.0)
    monkeypatch.setattr(pulling, "SLOW_S", 60.0)
    monkeypatch.setattr(pulling, "SLOWEST_BYTES_PER_S", 2**20)


@pytest.fixture
def impatient(monkeypatch, patient):
    """Give up soon if no source sends anything."""
    monkeypatch.setattr(pulling, "PATIENCE_S", 2.0)
    monkeypatch.setattr(pulling, "PATIENCE_FIRST_S", 2.0)
    monkeypatch.setattr(pulling, "PATIENCE_BUSY_S", 4.0)


@dataclass
class Scripted:
    """A source on a socket. Args: send: writes the answer for a chunk from a start on."""

    send: Callable[[asyncio.StreamWriter, bytes, int], Awaitable[None]]
    asked: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                digest = head.split()[1].rpartition("/")[2]
                start = int(head.partition("range: bytes=")[2].partition("-")[0] or 0)
                self.asked[digest] += 1
                await self.send(writer, BY_DIGEST[digest], start)
                await writer.drain()
                if writer.is_closing():
                    return


def head(n: int, start: int = 0) -> bytes:
    status = b"206 Partial Content" if start else b"200 OK"
    return b"HTTP/1.1 %s\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % (status, n)


async def honest(writer, data, start):
    writer.write(head(len(data) - start, start) + data[start:])


async def wrong(writer, data, start):
    writer.write(head(len(data) - start, start) + bytes(len(data) - start))


async def of_another_version(writer, data, start):
    other = DATA[(DATA.index(data) + 1) % len(DATA)][: len(data)].ljust(len(data), b"x")
    writer.write(head(len(data) - start, start) + other[start:])


async def endless(writer, data, start):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
        await writer.drain()


async def short(writer, data, start):
    writer.write(head(1000) + data[:1000])


async def drip(writer, data, start):
    writer.write(head(len(data) - start, start))
    for i in range(start, len(data)):
        writer.write(data[i : i + 1])
        await writer.drain()
        await asyncio.sleep(0.05)


async def silent(writer, data, start):
    await asyncio.sleep(60)


async def refusing(writer, data, start):
    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


async def no_http(writer, data, start):
    writer.write(b"hello\r\n\r\n")
    writer.close()


async def slowly(writer, data, start):
    await asyncio.sleep(0.1)
    await honest(writer, data, start)


async def busy(writer, data, start):
    told = orjson.dumps({"type": "unavailable", "detail": "8 transfers are already running", "retry_after_s": 0.1})
    writer.write(
        b"HTTP/1.1 503 Busy\r\nContent-Type: application/problem+json\r\nRetry-After: 0\r\n"
        b"Content-Length: %d\r\n\r\n" % len(told) + told
    )


def cut_after(n: int):
    """Breaks the connection after so many bytes of each answer."""

    async def cut(writer, data, start):
        writer.write(head(len(data) - start, start) + data[start : start + n])
        await writer.drain()
        if len(data) - start > n:
            writer.transport.abort()

    return cut


LIARS = {
    "wrong": wrong,
    "wrong, of another version": of_another_version,
    "long": endless,
    "short": short,
    "slow": drip,
    "slow, silent": silent,
    "refused": refusing,
    "broken": no_http,
}


@contextlib.asynccontextmanager
async def sources(*sends) -> AsyncIterator[list[Scripted]]:
    async with contextlib.AsyncExitStack() as stack:
        found = [Scripted(send) for send in sends]
        for one in found:
            server = await asyncio.start_server(one.answer, "127.0.0.1", 0)
            stack.callback(server.close)
            one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> ChunkFolder:
    return ChunkFolder(tmp_path / "pulled")


@pytest.fixture
def puller(folder: ChunkFolder) -> ChunkPuller:
    return ChunkPuller(folder, lambda url: WeightSource(url), "http://own")


def avoided(kind: str) -> float:
    return metrics.AVOIDED.labels(kind)._value.get()


def whole(folder: ChunkFolder) -> bool:
    return all(folder.read(chunk.blake3) == data for chunk, data in zip(CHUNKS, DATA, strict=True))


@pytest.mark.parametrize("lie", LIARS)
async def test_a_source_that_sends_something_else_is_left_out_and_counted(puller, folder, lie, monkeypatch):
    kind = lie.partition(",")[0]
    before = avoided(kind)
    monkeypatch.setattr(pulling, "SLOW_S", 2.0 if kind == "slow" else 60.0)  # longer than the honest source takes
    async with sources(LIARS[lie], honest) as (liar, other):
        assert await puller.pull(CHUNKS, [liar.url, other.url]) == sum(map(len, DATA))
    assert whole(folder)
    assert avoided(kind) > before
    assert sum(liar.asked.values()) <= pulling.N_AT_ONCE * (3 if kind == "broken" else 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lie", LIARS)
async def test_where_all_lie_nothing_is_kept_and_they_are_named(puller, folder, lie, monkeypatch):
    monkeypatch.setattr(pulling, "SLOW_S", 0.3)
    async with sources(LIARS[lie]) as (liar,):
        with pytest.raises(Unavailable, match=liar.url):
            await puller.pull(CHUNKS[:2], [liar.url])
    assert list(folder.folder.iterdir()) == []


async def test_a_source_that_has_enough_to_do_is_waited_for_and_named(puller, folder, monkeypatch):
    """All servers may be behind one address, and the trainer the only one they reach."""
    monkeypatch.setattr(pulling, "PATIENCE_FIRST_S", 0.2)
    answers = [0]

    async def at_first_busy(writer, data, start):
        answers[0] += 1
        await (honest if answers[0] > 4 else busy)(writer, data, start)

    async with sources(at_first_busy) as (source,):
        await puller.pull(CHUNKS[:1], [source.url])
        assert folder.read(CHUNKS[0].blake3) == DATA[0]
        monkeypatch.setattr(pulling, "PATIENCE_BUSY_S", 0.2)
        answers[0] = -100
        with pytest.raises(Unavailable, match="already running"):
            await puller.pull(CHUNKS[1:2], [source.url])


async def test_what_has_arrived_is_not_asked_for_again(puller, folder):
    async with sources(cut_after(70_000)) as (source,):
        await puller.pull(CHUNKS[:1], [source.url])
        assert folder.read(CHUNKS[0].blake3) == DATA[0]
        assert source.asked[CHUNKS[0].blake3] == 3  # of 200,000 bytes
        assert await puller.pull(CHUNKS[:1], [source.url]) == 0
        assert source.asked.total() == 3


async def test_a_chunk_of_several_sources_that_is_wrong_is_asked_for_whole_of_one(puller, folder):
    """The first breaks off after wrong bytes, the others go on honestly: nobody is to blame for sure."""

    async def wrong_then_gone(writer, data, start):
        writer.write(head(len(data) - start, start) + bytes(1000))
        await writer.drain()
        writer.transport.abort()

    before = avoided("wrong")
    async with sources(wrong_then_gone, honest) as (liar, other):
        for _ in range(5):
            folder.clear()
            await puller.pull(CHUNKS, [liar.url, other.url])
            assert whole(folder)
    assert avoided("wrong") == before


async def test_chunks_are_asked_for_in_the_order_that_is_given(puller, monkeypatch):
    monkeypatch.setattr(pulling, "N_AT_ONCE", 1)
    async with sources(honest) as (source,):
        await puller.pull(CHUNKS, [source.url])
        assert list(source.asked) == [chunk.blake3 for chunk in CHUNKS]


async def test_nothing_is_pulled_any_more_when_what_it_was_for_has_ended(puller, folder):
    async with sources(silent) as (source,):
        async with puller.pull_in_background(CHUNKS, [source.url]) as arriving:
            while not source.asked:
                await asyncio.sleep(0.01)
        assert arriving.cancelled()
    async with sources(honest) as (source,), puller.pull_in_background(CHUNKS, [source.url]) as arriving:
        told = await arriving
    assert told["pulled_bytes"] == sum(map(len, DATA))
    assert told["pull_s"] > 0
    assert whole(folder)


async def test_own_address_is_no_source(puller):
    with pytest.raises(Unavailable, match="none is known"):
        await puller.pull(CHUNKS, ["http://own/"])


async def test_a_full_disk_is_named_and_what_was_kept_stays(puller, folder):
    async with sources(honest) as (source,):
        with file_size_limit(100_000), pytest.raises(StorageFull):
            await puller.pull(CHUNKS[:1], [source.url])
        assert list(folder.folder.iterdir()) == []
        await puller.pull(CHUNKS, [source.url])
    assert whole(folder)


@dataclass
class Passing:
    """A service that passes on what is in its folder, once it has `puller`; the chunks that it has `sent`."""

    folder: ChunkFolder
    pause_s: float = 0.0
    sent: list[str] = field(default_factory=list)
    url: str = ""
    puller: ChunkPuller | None = None

    def read(self, digest: str) -> bytes:
        data = self.folder.read(digest)
        time.sleep(self.pause_s)
        self.sent.append(digest)
        return data


@contextlib.asynccontextmanager
async def passing_on(folder: ChunkFolder, max_transfers: int = 8, pause_s: float = 0.0) -> AsyncIterator[Passing]:
    app, made = create_app("source", limits=Limits(), tokens=None, ready=lambda: None), Passing(folder, pause_s)
    uplink = Uplink(made.read, max_transfers)

    async def chunk(request: Request) -> Response:
        try:
            return await uplink.answer(request, request.path_params["digest"])
        except VolleyError as error:
            return problem_response(error)

    async def holding(request: Request) -> Response:
        try:
            assert made.puller is not None
            return Response(made.puller.holding(request.path_params["digest"]).to_bytes())
        except VolleyError as error:
            return problem_response(error)

    app.add_route("/weights/chunks/{digest}", chunk)
    app.add_route("/weights/holdings/{digest}", holding)
    async with served(app) as made.url:
        made.puller = ChunkPuller(folder, lambda url: WeightSource(url), made.url)
        yield made


async def test_servers_that_pull_together_get_most_of_it_from_each_other(tmp_path, monkeypatch):
    """The trainer sends to two at once, and slowly; each of four servers gets all of it, and the trainer sends hardly
    more than one copy: the others tell what they have.
    """
    monkeypatch.setattr(pulling, "_POLL_S", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(passing_on(ChunkFolder(tmp_path / "trainer"), 4, 0.02))
        chunks = [Chunk(trainer.folder.put(data), len(data)) for data in MANY]
        servers = [await stack.enter_async_context(passing_on(ChunkFolder(tmp_path / str(i)))) for i in range(4)]
        urls, names = [trainer.url, *(one.url for one in servers)], [chunk.blake3 for chunk in chunks]

        async def pull(one: Passing, seed: int) -> None:
            assert one.puller is not None
            await one.puller.pull(drawn(chunks, seed), urls, of=WantedVersion(VERSION, names))
            assert one.puller.holding(VERSION).has.all()
            assert not one.puller.holding(VERSION).pending.any()

        await asyncio.gather(*(pull(one, seed) for seed, one in enumerate(servers)))
        assert all(one.folder.read(name) == data for one in servers for name, data in zip(names, MANY, strict=True))
        assert len(MANY) <= len(trainer.sent) < 2 * len(MANY)
        # On a busy machine a source may be given up and a chunk asked for again.
        assert 4 * len(MANY) <= sum(len(one.sent) for one in (trainer, *servers)) < 5 * len(MANY)


@contextlib.asynccontextmanager
async def telling(told: bytes, chunk: Callable[[str], Response], pause_s: float = 0.0) -> AsyncIterator[str]:
    """A server that says whatever a test wants of what it has; with a path after its address it is another source."""
    app = create_app("source", limits=Limits(), tokens=None, ready=lambda: None)

    async def answer(request: Request) -> Response:
        await asyncio.sleep(pause_s)
        return chunk(request.path_params["digest"])

    async def holding(_: Request) -> Response:
        return Response(told)

    for path in ("", "/{source}"):
        app.add_route(f"{path}/weights/chunks/{{digest}}", answer)
        app.add_route(f"{path}/weights/holdings/{{digest}}", holding)
    async with served(app) as url:
        yield url


OF = WantedVersion(VERSION, [chunk.blake3 for chunk in CHUNKS])


async def test_who_tells_of_what_it_has_not_got_costs_little(puller, folder, monkeypatch):
    monkeypatch.setattr(pulling, "_POLL_S", 0.01)
    told = Holding(*np.ones((2, len(CHUNKS)), np.bool_)).to_bytes()
    lacks = problem_response(NotFound("it is not here"))
    async with telling(told, lambda _: lacks) as liar, sources(slowly) as (trainer,):
        await puller.pull(CHUNKS, [trainer.url, liar], of=OF)
    assert whole(folder)
    assert trainer.asked.total() == len(CHUNKS)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [NotFound("it is not here"), Unavailable("enough to do", retry_after_s=0.1)])
async def test_slow_servers_that_tell_of_what_they_do_not_send_hold_nothing_up_for_ever(puller, folder, error):
    """One of them has always rested long enough; the trainer, if it sends, is asked all the same."""
    told = Holding(*np.ones((2, len(CHUNKS)), np.bool_)).to_bytes()

    def lacks(_: str) -> Response:
        return problem_response(error)

    async with telling(told, lacks, 0.3) as url, sources(honest, refusing) as (trainer, silent_trainer):
        liars = [f"{url}/{i}" for i in range(6)]
        async with asyncio.timeout(60):
            await puller.pull(CHUNKS, [trainer.url, *liars], of=OF)
        assert whole(folder)
        folder.clear()
        with pytest.raises(Unavailable, match="no source has chunk"):
            async with asyncio.timeout(60):
                await puller.pull(CHUNKS, [silent_trainer.url, *liars], of=OF)


def test_who_was_busy_a_thousand_times_is_asked_again():
    assert 0 < pulling._wait_s(5000) <= 0.5


@pytest.mark.usefixtures("impatient")
async def test_many_busy_servers_of_which_one_has_always_rested_are_given_up(puller):
    """Each is asked again later than the others take to answer: nobody but the clock would end it."""
    told = Holding(*np.ones((2, len(CHUNKS)), np.bool_)).to_bytes()
    has_enough = problem_response(Unavailable("enough to do", retry_after_s=0.1))
    async with telling(told, lambda _: has_enough, 0.1) as url, sources(busy) as (trainer,):
        others = [f"{url}/{i}" for i in range(60)]
        with pytest.raises(Unavailable, match="enough to do"):
            async with asyncio.timeout(40):
                await puller.pull(CHUNKS, [trainer.url, *others], of=OF)


async def test_what_is_pulled_again_makes_nothing_else_forgotten(puller):
    other = WantedVersion("n" * 64, OF.chunks)
    async with sources(honest) as (source,):
        for version in (OF, other, other, other):
            await puller.pull(CHUNKS, [source.url], of=version)
    assert puller.holding(VERSION).has.all()


@pytest.mark.parametrize("told", [b"", b"\0", bytes(3), bytes(2**20)])
async def test_who_tells_nothing_that_can_be_read_is_a_source_like_others(puller, folder, told):
    async with telling(told, lambda digest: Response(BY_DIGEST[digest])) as url, sources(refusing) as (trainer,):
        await puller.pull(CHUNKS, [trainer.url, url], of=OF)
    assert whole(folder)


async def test_while_the_trainer_has_enough_to_do_others_are_asked_for_what_they_have(puller, folder, tmp_path):
    """And nothing waits for the chunk that the trainer was asked for first."""
    async with passing_on(ChunkFolder(tmp_path / "other")) as other, sources(busy) as (trainer,):
        for data in DATA:
            other.folder.put(data)
        assert other.puller is not None
        await other.puller.pull(CHUNKS, [], of=OF)
        await puller.pull(CHUNKS, [trainer.url, other.url], of=OF)
    assert whole(folder)
    assert len(other.sent) == len(CHUNKS)


async def test_what_is_not_pulled_any_more_is_not_told_of(puller):
    with pytest.raises(NotFound):
        puller.holding(VERSION)
    async with sources(honest) as (source,):
        for name in "abc":
            await puller.pull(CHUNKS, [source.url], of=WantedVersion(name, [chunk.blake3 for chunk in CHUNKS]))
    assert puller.holding("c").has.all()
    with pytest.raises(NotFound):
        puller.holding("a")


async def test_an_uplink_sends_what_it_has_to_so_many_at_once(tmp_path):
    folder = ChunkFolder(tmp_path / "chunks")
    digest = folder.put(DATA[0])
    async with passing_on(folder, 1) as one, httpx.AsyncClient(trust_env=False, base_url=one.url) as client:
        path = f"/weights/chunks/{digest}"
        assert (await client.get(path)).content == DATA[0]
        rest = await client.get(path, headers={"Range": "bytes=1000-"})
        assert (rest.status_code, rest.content) == (206, DATA[0][1000:])
        assert rest.headers["content-range"] == f"bytes 1000-{len(DATA[0]) - 1}/{len(DATA[0])}"
        assert (await client.get(path, headers={"Range": "bytes=999999-"})).status_code == 422
        assert (await client.get(f"/weights/chunks/{'0' * 64}")).status_code == 404
        assert (await client.get("/weights/chunks/..%2Fsecret")).status_code == 404
        assert (await client.get("/weights/chunks/secret")).status_code == 422
        assert (await client.get(path)).status_code == 200  # what failed holds no place


def asked_by(address: str) -> Request:
    return Request({"type": "http", "headers": [], "client": (address, 1)})


async def test_one_address_never_has_all_transfers_of_a_source(folder):
    uplink, digest = Uplink(lambda _: DATA[0], 4), CHUNKS[0].blake3
    for _ in range(2):
        await uplink.answer(asked_by("10.0.0.1"), digest)
    with pytest.raises(Unavailable, match="2 transfers are already running"):
        await uplink.answer(asked_by("10.0.0.1"), digest)
    for _ in range(2):
        await uplink.answer(asked_by("10.0.0.2"), digest)
    with pytest.raises(Unavailable, match="4 transfers are already running"):
        await uplink.answer(asked_by("10.0.0.3"), digest)


async def test_who_does_not_read_is_cut_off_and_holds_no_place(monkeypatch):
    monkeypatch.setattr(serving, "SLOW_S", 0.05)
    monkeypatch.setattr(serving, "SLOWEST_BYTES_PER_S", 2**30)
    uplink, digest, scope = Uplink(lambda _: DATA[0], 1), CHUNKS[0].blake3, asked_by("10.0.0.1").scope
    sent = list[str]()

    async def send(message) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        raise AssertionError

    await (await uplink.answer(asked_by("10.0.0.1"), digest))(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    await uplink.answer(asked_by("10.0.0.2"), digest)


async def test_deltas_make_chunks_of_what_is_there(puller, folder):
    base = DATA[0][:200_000]
    new = bytes([base[0] ^ 1]) + base[1:]
    made = encode(base, new, 2)
    assert made is not None
    wanted, step = (Chunk(blake3.blake3(data).hexdigest(), len(data)) for data in (new, made))
    BY_DIGEST.update({wanted.blake3: new, step.blake3: made})
    delta = Delta(folder.put(base), step)
    async with sources(honest) as (source,):
        assert await puller.pull([wanted], [source.url], lambda _: [delta]) == len(made)
        assert folder.read(wanted.blake3) == new
        assert source.asked == {step.blake3: 1}


@pytest.mark.parametrize("damage", ["base", "delta", "of another chunk"])
async def test_a_delta_that_does_not_make_its_chunk_is_not_kept(puller, folder, damage):
    """A base whose file was changed, a delta that is none, one that makes something else: the chunk is pulled whole."""
    base = DATA[1][:200_000]
    new, other = (bytes([base[0] ^ bit]) + base[1:] for bit in (1, 2))
    made = {"delta": b"none", "of another chunk": encode(base, other, 2)}.get(damage) or encode(base, new, 2)
    assert made is not None
    wanted, step = (Chunk(blake3.blake3(data).hexdigest(), len(data)) for data in (new, made))
    BY_DIGEST.update({wanted.blake3: new, step.blake3: made})
    delta = Delta(folder.put(base), step)
    if damage == "base":
        folder.path(delta.base).write_bytes(bytes(len(base)))
    async with sources(honest) as (source,):
        assert await puller.pull([wanted], [source.url], lambda _: [delta]) == len(made) + len(new)
    assert folder.read(wanted.blake3) == new
    assert blake3.blake3(other).hexdigest() not in folder


@pytest.mark.usefixtures("impatient")
async def test_a_source_that_sends_a_byte_now_and_then_holds_nobody_for_long(puller, folder, monkeypatch):
    """Each time its connection breaks, and what it has sent is kept."""

    async def a_byte(writer, data, start):
        writer.write(head(len(data) - start, start) + data[start : start + 1])
        writer.close()

    monkeypatch.setitem(pulling._AVOID_S, "broken", 0.01)
    async with sources(a_byte) as (miser,):
        with pytest.raises(Unavailable, match=miser.url):
            await asyncio.wait_for(puller.pull(CHUNKS[:1], [miser.url]), 60)
    assert list(folder.folder.iterdir()) == []
