"""Chunks of published weights, from whoever has them, into a folder of this server's own.

A chunk is asked for at the source that does least for us, several at once, about in the order in which they are placed
on the devices, but drawn by chance among the next ones: so servers that pull the same version soon have different
chunks and get the others from each other. What a source has sent when its connection breaks is kept, and the rest is
asked for at any other.

Invariants: a chunk gets into the folder only with the digest that its name says, whoever sent it; a source that sent
something else, too much, or too slowly is named, counted, and left out for a while; what was pulled is not pulled
again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from services.rollout import metrics
from shared.clients.weights import WeightSource
from shared.errors import NotFound, Unavailable, VolleyError
from shared.process import telemetry
from shared.weights.chunks import ChunkFolder
from shared.weights.delta import apply
from shared.weights.manifest import Chunk, Delta
from shared.weights.serving import SLOW_S, SLOWEST_BYTES_PER_S

N_AT_ONCE = 4
_N_DRAWN = 32
PATIENCE_S, PATIENCE_FIRST_S, PATIENCE_BUSY_S = 10.0, 3.0, 30.0
_PROGRESS_BYTES = 2**16
_LACKS_S, _LACKS_MOST_S = 0.05, 0.5
_AVOID_S: Mapping[str, float] = {"wrong": 60.0, "long": 60.0, "short": 5.0, "slow": 30.0, "broken": 0.2, "refused": 5.0}
"""For how long a source is left out, by what it did."""
_log = telemetry.Log("pull")


type Way = Callable[[Chunk], Sequence[Delta]]
"""The deltas that make a chunk of one that is in the folder, in order; none where it is to be pulled whole."""


def _whole(_: Chunk) -> Sequence[Delta]:
    return ()


def _last_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order of the stream, from its end, but drawn by chance within each `_N_DRAWN`."""
    parts = [chunks[i : i + _N_DRAWN] for i in range(0, len(chunks), _N_DRAWN)]
    return [chunk for part in reversed(parts) for chunk in random.sample(part, len(part))]


class TooMuch(Exception):
    """A source sends more than the chunk has."""


@dataclass(eq=False)
class Source:
    """Where chunks may be had; `avoided` is until when it is left out, by the monotonic clock, and `reason` why."""

    url: str
    client: WeightSource
    is_trainer: bool
    n_transfers: int = 0
    n_failures: int = 0
    avoided: float = 0.0
    reason: str = ""
    is_busy: bool = False


@dataclass
class _Download:
    """A chunk on its way: the first `n_bytes` of `into` are here, who sent some of them, and who has not got it just
    now.
    """

    chunk: Chunk
    into: memoryview
    n_bytes: int = 0
    givers: set[Source] = field(default_factory=set)
    lacking: dict[Source, tuple[int, float]] = field(default_factory=dict)
    is_mixed: bool = True  # whether several sources may send parts of it


class ChunkPuller:
    """Args: chunks: where they go; connect: a client for a source's address; own: this server's address."""

    def __init__(self, chunks: ChunkFolder, connect: Callable[[str], WeightSource], own: str) -> None:
        self.chunks, self._connect, self._own = chunks, connect, own
        self._avoided: dict[str, tuple[float, str]] = {}

    async def pull(self, wanted: Iterable[Chunk], sources: Sequence[str], way: Way = _whole) -> int:
        """All of them are in the folder then, some of them made of others by the deltas on their `way`. Returns how
        many bytes were pulled for that.

        Raises Unavailable if no source sends anything for `PATIENCE_S` (`PATIENCE_FIRST_S` at first, `PATIENCE_BUSY_S`
        while one has enough to do), or none is left, naming what they did; and StorageFull. What was pulled until then
        stays.
        """
        lacking = await asyncio.to_thread(lambda: [chunk for chunk in wanted if chunk.blake3 not in self.chunks])
        missing = _last_first(lacking)
        async with AsyncExitStack() as stack:
            pull = _Pull(self.chunks, way, [await self._opened(stack, i, url) for i, url in self._others(sources)])
            try:
                async with asyncio.TaskGroup() as group:
                    room = max((chunk.size for chunk in missing), default=0)
                    for _ in range(min(N_AT_ONCE, len(missing))):
                        group.create_task(pull.work(missing, memoryview(bytearray(room))))
            finally:
                self._avoided |= {one.url: (one.avoided, one.reason) for one in pull.sources}
        if pull.failure is not None:
            raise pull.failure
        return pull.n_bytes

    @asynccontextmanager
    async def beside(
        self, wanted: Iterable[Chunk], sources: Sequence[str], way: Way = _whole
    ) -> AsyncIterator[asyncio.Future[dict[str, float]]]:
        """Pulls while something else goes on inside, and not after it. What it yields is done, with seconds and bytes,
        when all are in the folder; it raises as `pull`.
        """

        async def timed() -> dict[str, float]:
            start = time.perf_counter()
            n_bytes = await self.pull(wanted, sources, way)
            metrics.PULLED.inc(n_bytes)
            return {"pull_s": time.perf_counter() - start, "pulled_bytes": n_bytes}

        pulling = asyncio.ensure_future(timed())
        try:
            yield pulling
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)

    def _others(self, sources: Sequence[str]) -> list[tuple[int, str]]:
        return [(i, url.rstrip("/")) for i, url in enumerate(sources) if url.rstrip("/") != self._own]

    async def _opened(self, stack: AsyncExitStack, i: int, url: str) -> Source:
        client = await stack.enter_async_context(self._connect(url))
        avoided, reason = self._avoided.get(url, (0.0, ""))
        return Source(url, client, i == 0, avoided=avoided, reason=reason)


class _Pull:
    """One update's chunks."""

    def __init__(self, chunks: ChunkFolder, way: Way, sources: Sequence[Source]) -> None:
        self._way, self.sources, self.n_bytes = way, sources, 0
        self.failure: VolleyError | None = None
        self._chunks, self._last_byte, self._n_blocks, self._fresh = chunks, time.monotonic(), 0, 0

    async def work(self, missing: list[Chunk], room: memoryview) -> None:
        """One of several that share the chunks still to come, with `room` for one. What ends it is the `failure`, and
        not raised: Python 3.12.1 would count the cancellation of who waits for all of them as one that is still under
        way.
        """
        try:
            while missing:
                chunk = missing.pop()
                if not await self._is_made(chunk, room):
                    await self._fetch(chunk, room)
        except VolleyError as error:
            self.failure = self.failure or error
            missing.clear()

    async def _is_made(self, chunk: Chunk, room: memoryview) -> bool:
        """Whether deltas have made it of a chunk that was here."""
        if not (deltas := await asyncio.to_thread(self._way, chunk)):
            return False
        try:
            for delta in deltas:
                if delta.chunk.blake3 not in self._chunks:
                    await self._fetch(delta.chunk, room)
        except Unavailable as error:
            _log.info("a delta cannot be had", chunk=chunk.blake3, reason=str(error))
            return False
        if not await asyncio.to_thread(self._made, chunk, deltas, room):
            _log.warning("a delta does not make its chunk", chunk=chunk.blake3, base=deltas[0].base)
            return False
        return True

    def _made(self, chunk: Chunk, deltas: Sequence[Delta], room: memoryview) -> bool:
        """It blocks. Nothing is kept that is not the chunk: of a wrong base, or a wrong delta, it is pulled whole."""
        try:
            data = room[: self._chunks.read_into(deltas[0].base, room)]
            for delta in deltas:
                apply(data, self._chunks.read(delta.chunk.blake3))
        except (ValueError, NotFound):
            return False
        return self._chunks.add(chunk, data)

    async def _fetch(self, chunk: Chunk, room: memoryview) -> None:
        """Raises Unavailable, StorageFull."""
        download = _Download(chunk, room[: chunk.size])
        while not await self._is_kept(download):
            await self._more(download, await self._choose(download))
        self.n_bytes += chunk.size

    async def _is_kept(self, download: _Download) -> bool:
        """Whether a chunk was whole and right; of a wrong one nothing is left."""
        chunk = download.chunk
        if download.n_bytes < chunk.size:
            return False
        if await asyncio.to_thread(self._chunks.add, chunk, download.into):
            return True
        if len(download.givers) == 1:
            self._avoid(download.givers.pop(), "wrong", f"chunk {chunk.blake3} has another digest")
        download.n_bytes, download.givers, download.is_mixed = 0, set(), False
        return False

    async def _choose(self, download: _Download) -> Source:
        """Raises Unavailable."""
        while True:
            now = time.monotonic()
            deadline = self._last_byte + (PATIENCE_S if self._n_blocks else PATIENCE_FIRST_S)
            if any(s.is_busy for s in self.sources):
                deadline = self._last_byte + PATIENCE_BUSY_S
            free = [s for s in self.sources if s.avoided <= now and download.lacking.get(s, (0, 0.0))[1] <= now]
            if free:
                return min(free, key=lambda s: (s.n_transfers, s.is_trainer, random.random()))
            if now > deadline or all(s.avoided > deadline for s in self.sources):
                told = "; ".join(f"{s.url}: {s.reason or 'has not got it'}" for s in self.sources) or "there is none"
                raise Unavailable(f"no source has chunk {download.chunk.blake3}: {told}")
            await asyncio.sleep(_LACKS_S)

    async def _more(self, download: _Download, source: Source) -> None:
        """As much of the chunk as the source sends."""
        chunk = download.chunk
        if not download.is_mixed:
            download.n_bytes = 0
        start = download.n_bytes

        def take(block: bytes) -> None:
            if (end := download.n_bytes + len(block)) > chunk.size:
                raise TooMuch
            download.into[download.n_bytes : end] = block
            download.n_bytes = end
            self._fresh += len(block)
            if self._fresh >= _PROGRESS_BYTES or end == chunk.size:  # a byte now and then is none
                self._last_byte, self._n_blocks, self._fresh = time.monotonic(), self._n_blocks + 1, 0

        source.n_transfers += 1
        try:
            async with asyncio.timeout(SLOW_S + (chunk.size - start) / SLOWEST_BYTES_PER_S):
                await source.client.chunk(chunk.blake3, take, start)
            if (n := download.n_bytes) < chunk.size:
                self._avoid(source, "short", f"chunk {chunk.blake3} ends after {n} of {chunk.size} bytes")
            source.n_failures, source.is_busy = 0, False
        except TooMuch:
            download.n_bytes, download.givers = 0, set()
            self._avoid(source, "long", f"chunk {chunk.blake3} is longer than {chunk.size} bytes")
        except TimeoutError:
            self._avoid(source, "slow", f"chunk {chunk.blake3}: {download.n_bytes - start} bytes in time")
        except VolleyError as error:
            self._failed(download, source, error)
        finally:
            source.n_transfers -= 1
            if download.n_bytes > start:
                download.givers.add(source)

    def _failed(self, download: _Download, source: Source, error: VolleyError) -> None:
        """Who has not got a chunk, or enough to do, is asked again soon; less and less often."""
        source.is_busy = isinstance(error, Unavailable) and error.retry_after_s < 1
        if isinstance(error, NotFound) or source.is_busy:
            source.reason = str(error) if source.is_busy else ""
            n, _ = download.lacking.get(source, (0, 0.0))
            wait_s = min(_LACKS_MOST_S, _LACKS_S * 2**n)
            download.lacking[source] = n + 1, time.monotonic() + wait_s * random.uniform(0.5, 1.0)
        else:
            self._avoid(source, "broken" if isinstance(error, Unavailable) else "refused", str(error))

    def _avoid(self, source: Source, kind: str, reason: str) -> None:
        source.n_failures += 1
        seconds = _AVOID_S[kind] * (2 ** min(source.n_failures - 1, 5) if kind == "broken" else 1)
        source.avoided, source.reason, source.is_busy = time.monotonic() + seconds, reason, False
        metrics.AVOIDED.labels(kind).inc()
        _log.warning("source avoided", url=source.url, kind=kind, reason=reason, seconds=seconds)
