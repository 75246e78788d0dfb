"""Pull chunks of published weights from the trainer and other servers into a folder of this server's own.

Several chunks are pulled at once, roughly in the caller's order. `picking` chooses the source of each, from the chunks
that other servers report from time to time. If a connection breaks, the bytes received so far are kept, and the rest is
requested from any source.

Invariants: a chunk enters the folder only if it has the digest that names it, whichever source sent it; a source that
sent wrong bytes, too many, or too slowly is logged, counted, and avoided for a while; a chunk that was pulled is not
pulled again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from random import random, uniform

import numpy as np

from services.rollout import metrics
from services.rollout.weights.picking import ChunkPicker, Source
from shared.clients.chunks import WeightSource
from shared.errors import NotFound, Unavailable, VolleyError
from shared.process import telemetry
from shared.published.chunks import ChunkFolder
from shared.published.delta import apply
from shared.published.holding import Holding
from shared.published.manifest import Chunk, Delta
from shared.published.serving import SLOW_S, SLOWEST_BYTES_PER_S

N_AT_ONCE = 4
PATIENCE_S, PATIENCE_FIRST_S, PATIENCE_BUSY_S = 10.0, 3.0, 30.0
_PROGRESS_BYTES = 2**16
_LACKS_S, _LACKS_MOST_S = 0.05, 0.5
_POLL_S, _POLL_TIMEOUT_S = 0.2, 5.0
_N_HOLDINGS = 2
_AVOID_S: Mapping[str, float] = {"wrong": 60.0, "long": 60.0, "short": 5.0, "slow": 30.0, "broken": 0.2, "refused": 5.0}
"""Seconds for which a source is avoided, by its failure."""
_log = telemetry.Log("pull")

type DeltasOf = Callable[[Chunk], Sequence[Delta]]
"""Returns the deltas that turn a chunk in the folder into this one, in order; none if it must be pulled whole."""


def _whole(_: Chunk) -> Sequence[Delta]:
    return ()


class ChunkTooLong(Exception):
    """A source sent more bytes than the chunk has."""


class ChunkPostponed(Exception):
    """The source lacks the chunk or is busy, and nothing of it has arrived: another chunk may be picked."""


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """Version to pull: the digest of its manifest, and the digests of its chunks in the manifest's order."""

    manifest: str
    chunks: Sequence[str]


@dataclass
class _Download:
    """A chunk that is being pulled: the first `n_bytes` of `into` are here, sent by `senders`.

    `lacking` are the sources that do not have it now, each with its number of tries and the time of the next one.
    `index` is the chunk's position among the wanted ones; None for a delta.
    """

    chunk: Chunk
    into: memoryview
    index: int | None = None
    n_bytes: int = 0
    senders: set[Source] = field(default_factory=set)
    lacking: dict[Source, tuple[int, float]] = field(default_factory=dict)
    is_mixed: bool = True  # whether several sources may send parts of it
    may_be_postponed: bool = False


class ChunkPuller:
    """Args: chunks: folder of the chunks; connect: opens a client of a source's address; own: this server's address."""

    def __init__(self, chunks: ChunkFolder, connect: Callable[[str], WeightSource], own: str) -> None:
        self.chunks, self._connect, self._own = chunks, connect, own
        self._avoided: dict[str, tuple[float, str]] = {}
        self._holdings: dict[str, tuple[Sequence[str], Holding]] = {}

    def holding(self, manifest: str) -> Holding:
        """Return the chunks of a version that this server has. Raises NotFound if it was not pulled lately."""
        if (found := self._holdings.get(manifest)) is None:
            raise NotFound(f"this server has not pulled the version with manifest {manifest} lately")
        return found[1]

    async def retain(self, digests: Collection[str]) -> None:
        """Remove all other chunks, and stop reporting them to other servers."""
        await asyncio.to_thread(self.chunks.retain, digests)
        for names, holding in self._holdings.values():
            holding.has[:] &= np.fromiter((name in digests for name in names), np.bool_, len(names))

    async def pull(
        self,
        wanted: Iterable[Chunk],
        sources: Sequence[str],
        deltas_of: DeltasOf = _whole,
        of: WantedVersion | None = None,
    ) -> int:
        """Pull the wanted chunks into the folder, some as deltas from `deltas_of`. Returns the bytes pulled.

        If `of` names their version, servers report to each other which of its chunks they have.

        Raises Unavailable, naming each source's failure, if no source sends anything for `PATIENCE_S`
        (`PATIENCE_FIRST_S` at first, `PATIENCE_BUSY_S` while one is busy), or none is left; and StorageFull. Chunks
        that were pulled until then stay.
        """
        chunks = list(wanted)
        missing = await asyncio.to_thread(lambda: np.array([c.blake3 not in self.chunks for c in chunks], np.bool_))
        positions = {name: i for i, name in enumerate(of.chunks if of is not None else [c.blake3 for c in chunks])}
        order = np.array([positions[chunk.blake3] for chunk in chunks], np.int64)
        own = Holding.nothing(len(positions))
        own.has[order] = ~missing
        if of is not None:
            others = [(name, held) for name, held in self._holdings.items() if name != of.manifest]
            self._holdings = dict([*others, (of.manifest, (of.chunks, own))][-_N_HOLDINGS:])
        async with AsyncExitStack() as stack:
            opened = [await self._opened(stack, i, url) for i, url in self._other_sources(sources)]
            pull = _Pull(
                self.chunks, chunks, missing, deltas_of, opened, _Progress(own, order), have_reports=of is not None
            )
            try:
                await self._done(pull, of)
            finally:
                self._avoided |= {one.url: (one.avoided, one.reason) for one in pull.sources}
        if pull.failure is not None:
            raise pull.failure
        return pull.n_bytes

    async def _done(self, pull: _Pull, of: WantedVersion | None) -> None:
        async with asyncio.TaskGroup() as polling:
            others = [source for source in pull.sources if not source.is_trainer]
            polls = [] if of is None else [polling.create_task(pull.poll_holding(source, of)) for source in others]
            async with asyncio.TaskGroup() as group:
                for _ in range(min(N_AT_ONCE, pull.n_missing)):
                    group.create_task(pull.work())
            for poll in polls:
                poll.cancel()

    @asynccontextmanager
    async def pull_in_background(
        self,
        wanted: Iterable[Chunk],
        sources: Sequence[str],
        deltas_of: DeltasOf = _whole,
        of: WantedVersion | None = None,
    ) -> AsyncIterator[asyncio.Future[dict[str, float]]]:
        """Pull in the background while the block runs; leaving the block cancels the pull.

        Yields a future of the seconds and bytes, done when all chunks are in the folder; it raises as `pull`.
        """

        async def timed() -> dict[str, float]:
            start = time.perf_counter()
            n_bytes = await self.pull(wanted, sources, deltas_of, of)
            metrics.PULLED.inc(n_bytes)
            return {"pull_s": time.perf_counter() - start, "pulled_bytes": n_bytes}

        pulling = asyncio.ensure_future(timed())
        try:
            yield pulling
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)

    def _other_sources(self, sources: Sequence[str]) -> list[tuple[int, str]]:
        return [(i, url.rstrip("/")) for i, url in enumerate(sources) if url.rstrip("/") != self._own]

    async def _opened(self, stack: AsyncExitStack, i: int, url: str) -> Source:
        client = await stack.enter_async_context(self._connect(url))
        avoided, reason = self._avoided.get(url, (0.0, ""))
        return Source(url, client, i == 0, avoided=avoided, reason=reason)


@dataclass(frozen=True, slots=True)
class _Progress:
    """Chunks that other servers are shown, in the manifest's order; `order` is each wanted chunk's position."""

    own: Holding
    order: np.ndarray

    def pending(self, index: int | None, *, is_pending: bool) -> None:
        if index is not None:
            self.own.pending[self.order[index]] = is_pending

    def has(self, index: int | None) -> None:
        if index is not None:
            self.own.has[self.order[index]], self.own.pending[self.order[index]] = True, False


class _Pull:
    """Pull of one update's chunks."""

    def __init__(
        self,
        folder: ChunkFolder,
        chunks: Sequence[Chunk],
        missing: np.ndarray,
        deltas_of: DeltasOf,
        sources: Sequence[Source],
        progress: _Progress,
        *,
        have_reports: bool,
    ) -> None:
        self._deltas_of, self.sources, self.n_bytes = deltas_of, sources, 0
        self.failure: VolleyError | None = None
        self._chunks, self._wanted, self._progress = folder, chunks, progress
        self._picker = ChunkPicker(missing, have_reports=have_reports)
        self._buffer_size = max((chunk.size for chunk, lacks in zip(chunks, missing, strict=True) if lacks), default=0)
        self._last_byte, self._n_blocks, self._fresh = time.monotonic(), 0, 0

    @property
    def n_missing(self) -> int:
        return self._picker.n_missing

    async def poll_holding(self, source: Source, of: WantedVersion) -> None:
        """Poll another server for the chunks it has, until cancelled."""
        pause_s = _POLL_S
        while True:
            try:
                async with asyncio.timeout(_POLL_TIMEOUT_S):
                    found = await source.client.holding(of.manifest, len(of.chunks))
                source.holding, pause_s = found.in_order(self._progress.order), _POLL_S
            except NotFound:
                source.holding, pause_s = Holding.nothing(len(self._wanted)), _POLL_S
            except (VolleyError, TimeoutError):
                source.holding, pause_s = None, min(_POLL_TIMEOUT_S, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def work(self) -> None:
        """Worker, one of several, that fetches missing chunks. An error becomes `failure` and is not raised.

        If it were raised, Python 3.12.1 would count the cancellation of the task that waits for the workers as one that
        is still under way.
        """
        buffer = memoryview(bytearray(self._buffer_size))
        try:
            while (picked := self._picker.pick(self.sources, time.monotonic())) is not None:
                index, source = picked
                try:
                    with source.transfer() if source else nullcontext():  # counts as load of the source from now on
                        is_made = await self._make_from_deltas(self._wanted[index], buffer)
                    if not is_made:
                        await self._fetch(self._wanted[index], buffer, index, source)
                    self._progress.has(index)
                except ChunkPostponed:
                    if self.failure is None:
                        self._picker.put_back(index)
        except VolleyError as error:
            self.failure = self.failure or error
            self._picker.clear()

    async def _make_from_deltas(self, chunk: Chunk, buffer: memoryview) -> bool:
        """Make the chunk from one in the folder by its deltas. Returns True on success."""
        if not (deltas := await asyncio.to_thread(self._deltas_of, chunk)):
            return False
        try:
            for delta in deltas:
                if delta.chunk.blake3 not in self._chunks:
                    await self._fetch(delta.chunk, buffer)
        except Unavailable as error:
            _log.info("delta not available", chunk=chunk.blake3, reason=str(error))
            return False
        if not await asyncio.to_thread(self._apply_deltas, chunk, deltas, buffer):
            _log.warning("delta produced a wrong chunk", chunk=chunk.blake3, base=deltas[0].base)
            return False
        return True

    def _apply_deltas(self, chunk: Chunk, deltas: Sequence[Delta], buffer: memoryview) -> bool:
        """Apply the deltas and store the chunk; False if base or delta is wrong or missing. Blocks."""
        try:
            data = buffer[: self._chunks.read_into(deltas[0].base, buffer)]
            for delta in deltas:
                apply(data, self._chunks.read(delta.chunk.blake3))
        except (ValueError, NotFound):
            return False
        return self._chunks.add(chunk, data)

    async def _fetch(
        self, chunk: Chunk, buffer: memoryview, index: int | None = None, picked: Source | None = None
    ) -> None:
        """Pull one chunk. Raises Unavailable, StorageFull, and ChunkPostponed if a source was picked."""
        download = _Download(chunk, buffer[: chunk.size], index, may_be_postponed=picked is not None)
        try:
            while not await self._store_if_complete(download):
                source, picked = picked or await self._choose_source(download), None
                await self._receive(download, source)
                download.may_be_postponed = False
        finally:
            self._progress.pending(index, is_pending=False)
        self.n_bytes += chunk.size

    async def _store_if_complete(self, download: _Download) -> bool:
        """Store a complete chunk and return True; False if it is incomplete, or dropped for a wrong digest."""
        chunk = download.chunk
        if download.n_bytes < chunk.size:
            return False
        if await asyncio.to_thread(self._chunks.add, chunk, download.into):
            return True
        if len(download.senders) == 1:
            self._avoid(download.senders.pop(), "wrong", f"chunk {chunk.blake3} has another digest")
        download.n_bytes, download.senders, download.is_mixed = 0, set(), False
        return False

    async def _choose_source(self, download: _Download) -> Source:
        """Wait for a source of the chunk, and return the best one. Raises Unavailable."""
        while True:
            now = time.monotonic()
            deadline = self._deadline()
            free = [s for s in self.sources if s.avoided <= now and download.lacking.get(s, (0, 0.0))[1] <= now]
            is_unasked = any(s not in download.lacking for s in free)
            if free and (now <= deadline or (is_unasked and now <= deadline + PATIENCE_S)):
                index = download.index
                return min(free, key=lambda s: (s.lacks(index), s.n_rests, s.n_transfers, s.is_trainer, random()))
            if now > deadline or all(s.avoided > deadline for s in self.sources):
                reasons = [f"{s.url}: {s.reason or 'does not have it'}" for s in self.sources] or ["none is known"]
                raise Unavailable(f"no source has chunk {download.chunk.blake3}: {'; '.join(reasons)}")
            await asyncio.sleep(_LACKS_S)

    def _deadline(self) -> float:
        """Return the time at which to give up waiting for any source."""
        if any(s.is_busy for s in self.sources):
            return self._last_byte + PATIENCE_BUSY_S
        return self._last_byte + (PATIENCE_S if self._n_blocks else PATIENCE_FIRST_S)

    async def _receive(self, download: _Download, source: Source) -> None:
        """Receive as much of the chunk as the source sends."""
        chunk = download.chunk
        if not download.is_mixed:
            download.n_bytes = 0
        start = download.n_bytes

        def take(block: bytes) -> None:
            if (end := download.n_bytes + len(block)) > chunk.size:
                raise ChunkTooLong
            download.into[download.n_bytes : end] = block
            download.n_bytes = end
            self._progress.pending(download.index, is_pending=True)
            self._fresh += len(block)
            if self._fresh >= _PROGRESS_BYTES or end == chunk.size:  # single bytes are no progress
                self._last_byte, self._n_blocks, self._fresh = time.monotonic(), self._n_blocks + 1, 0

        if source.is_trainer:  # also before it sends
            self._progress.pending(download.index, is_pending=True)
        started_at = time.monotonic()
        try:
            with source.transfer():
                async with asyncio.timeout(SLOW_S + (chunk.size - start) / SLOWEST_BYTES_PER_S):
                    await source.client.chunk(chunk.blake3, take, start)
            if (n := download.n_bytes) < chunk.size:
                self._avoid(source, "short", f"chunk {chunk.blake3} ends after {n} of {chunk.size} bytes")
            source.n_failures, source.n_rests, source.is_busy = 0, 0, False
        except ChunkTooLong:
            download.n_bytes, download.senders = 0, set()
            self._avoid(source, "long", f"chunk {chunk.blake3} is longer than {chunk.size} bytes")
        except TimeoutError:
            self._avoid(source, "slow", f"chunk {chunk.blake3}: {download.n_bytes - start} bytes in time")
        except VolleyError as error:
            self._failed(download, source, error, time.monotonic() - started_at)
        finally:
            if download.n_bytes > start:
                download.senders.add(source)
            if not download.n_bytes:
                self._progress.pending(download.index, is_pending=False)

    def _failed(self, download: _Download, source: Source, error: VolleyError, asked_s: float) -> None:
        """Schedule the next request to a source that lacks the chunk or is busy; avoid it for other errors.

        Repeated failures lengthen the wait. Raises ChunkPostponed if another chunk should be picked.
        """
        source.is_busy = isinstance(error, Unavailable) and error.retry_after_s < 1
        if not (isinstance(error, NotFound) or source.is_busy):
            self._avoid(source, "broken" if isinstance(error, Unavailable) else "refused", str(error))
            return
        source.reason = str(error) if source.is_busy else ""
        if download.may_be_postponed and (source.is_busy or source.holding is not None):
            wait_s = _wait_s(source.n_rests) if source.is_busy else _POLL_S * 2 ** min(source.n_rests, 7)
            least_s = asked_s * min(source.n_rests, 8)  # else one of many slow sources would always be free
            source.rests, source.n_rests = time.monotonic() + max(wait_s, least_s), source.n_rests + 1
            if not source.is_busy:
                source.holding = Holding.nothing(len(self._wanted))
            if time.monotonic() <= self._deadline():
                raise ChunkPostponed
        n, _ = download.lacking.get(source, (0, 0.0))
        download.lacking[source] = n + 1, time.monotonic() + _wait_s(n)

    def _avoid(self, source: Source, kind: str, reason: str) -> None:
        source.n_failures += 1
        seconds = _AVOID_S[kind] * (2 ** min(source.n_failures - 1, 5) if kind == "broken" else 1)
        source.avoided, source.reason, source.is_busy = time.monotonic() + seconds, reason, False
        metrics.AVOIDED.labels(kind).inc()
        _log.warning("source avoided", url=source.url, kind=kind, reason=reason, seconds=seconds)


def _wait_s(n: int) -> float:
    """Return a jittered wait after `n` tries. While other sources send, `n` has no bound."""
    return min(_LACKS_MOST_S, _LACKS_S * 2 ** min(n, 10)) * uniform(0.5, 1.0)
