"""Measures on this machine what the simulation takes from us, with the code that does it in the services: a few
seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import blake3
import numpy as np
import uvloop
from fastapi import Request
from fastapi.responses import Response

from shared.clients.weights import WeightSource
from shared.services_schema import Limits, ServicesSection
from shared.web.http import create_app
from shared.web.serving import make_server
from shared.weights import delta
from shared.weights.chunks import ChunkFolder
from shared.weights.manifest import CHUNK_BYTES
from shared.weights.serving import ChunkDigest, Uplink
from tools.simulate.assumptions import Assumptions, Constant

_SOURCE = "measured here just now"
_LEAST_S = 0.5
_CHANGED = 0.02  # of the numbers: what a small step moves to another bfloat16
_CHUNKS, _AT_ONCE = 128, 4


def measured(given: Assumptions) -> Assumptions:
    """With the rates of this machine in the place of those that were recorded."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(CHUNK_BYTES // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = np.where(rng.random(old.size) < _CHANGED, old ^ 1, old)
    base, data = old.tobytes(), memoryview(new.tobytes())
    packed = delta.encode(base, data, 2)
    assert packed is not None
    room = memoryview(bytearray(base))
    rates = {
        "hash": _rate(lambda: blake3.blake3(data).digest()),
        "encode": _rate(lambda: delta.encode(base, data, 2)),
        "decode": _rate(lambda: delta.apply(room, packed)),
    }
    rates["send"] = rates["receive"] = uvloop.run(_transferred())
    units = {"send": "B/s", "receive": "B/s"}
    return given._replace(**{k: Constant(v, units.get(k, "B/s a core"), _SOURCE) for k, v in rates.items()})


def _rate(work: Callable[[], object]) -> float:
    """Bytes of a chunk a second, the best of what fits into half a second."""
    best, until = float("inf"), time.perf_counter() + _LEAST_S
    while time.perf_counter() < until:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return CHUNK_BYTES / best


async def _transferred() -> float:
    """Bytes a second of chunks from a process of its own to this one, by the uplink and the client of the services."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        url, digest = await asyncio.to_thread(ours.recv)
        async with WeightSource(url) as source:
            start, left = time.perf_counter(), iter(range(_CHUNKS))
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(_pull(source, digest, left))
            return _CHUNKS * CHUNK_BYTES / (time.perf_counter() - start)
    finally:
        process.terminate()
        process.join()


async def _pull(source: WeightSource, digest: str, left: Iterator[int]) -> None:
    room = memoryview(bytearray(CHUNK_BYTES))
    for _ in left:
        n_bytes = 0

        def take(block: bytes) -> None:
            nonlocal n_bytes
            room[n_bytes : n_bytes + len(block)] = block
            n_bytes += len(block)

        await source.chunk(digest, take)


def _serve(told: Connection) -> None:
    """Sends its address and a chunk's digest, then the chunk to whoever asks."""
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_served(told, ChunkFolder(Path(folder) / "chunks")))


async def _served(told: Connection, chunks: ChunkFolder) -> None:
    digest = chunks.put(np.random.default_rng(0).bytes(CHUNK_BYTES))
    app, uplink = create_app("source", limits=Limits(), tokens=None, ready=lambda: None), Uplink(chunks.read)

    @app.get("/weights/chunks/{digest}")
    async def chunk(request: Request, digest: ChunkDigest) -> Response:
        return await uplink.answer(request, digest)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        told.send((f"http://127.0.0.1:{listener.getsockname()[1]}", digest))
        await make_server(app, ServicesSection()).serve(sockets=[listener])
