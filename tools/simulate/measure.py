"""Measures on this machine what the simulation takes from us, on one core each: a few seconds."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import aiohttp
import blake3
import numpy as np
import uvloop
import zstandard
from aiohttp import web

from tools.simulate.assumptions import Assumptions, Constant

_CHUNK = 8 * 2**20
_SOURCE = "measured here just now, one core"
_LEAST_S = 0.5
_CHANGED = 0.02  # of the numbers, in the last bits: what a small step leaves in bfloat16
_CHUNKS = 64


def measured(given: Assumptions) -> Assumptions:
    """With the rates of this machine in the place of those that were recorded."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(_CHUNK // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = np.where(rng.random(old.size) < _CHANGED, old ^ 1, old)
    packed = _encoded(old, new)
    rates = {
        "hash": _rate(lambda: blake3.blake3(old.tobytes()).digest()),
        "encode": _rate(lambda: _encoded(old, new)),
        "decode": _rate(lambda: _decoded(old, packed)),
    }
    rates["send"] = rates["receive"] = uvloop.run(_transferred())
    units = {"send": "B/s", "receive": "B/s"}
    return given._replace(**{k: Constant(v, units.get(k, "B/s a core"), _SOURCE) for k, v in rates.items()})


def _encoded(old: np.ndarray, new: np.ndarray) -> bytes:
    """XOR, low bytes before high ones, zstd."""
    planes = (old ^ new).view(np.uint8).reshape(-1, 2).T
    return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(planes).tobytes())


def _decoded(old: np.ndarray, packed: bytes) -> bytes:
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8).reshape(2, -1)
    return (np.ascontiguousarray(planes.T).view(np.uint16).ravel() ^ old).tobytes()


def _rate(work: Callable[[], object]) -> float:
    """Bytes of a chunk a second, the best of what fits into half a second."""
    best, until = float("inf"), time.perf_counter() + _LEAST_S
    while time.perf_counter() < until:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return _CHUNK / best


async def _transferred() -> float:
    """Chunks a second from a process of its own to this one, by HTTP on the loopback."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        port = await asyncio.to_thread(ours.recv)
        async with aiohttp.ClientSession() as session:
            start = time.perf_counter()
            for _ in range(_CHUNKS):
                async with session.get(f"http://127.0.0.1:{port}/") as answer:
                    async for _block in answer.content.iter_any():
                        pass
            return _CHUNKS * _CHUNK / (time.perf_counter() - start)
    finally:
        process.terminate()
        process.join()


def _serve(told: Connection) -> None:
    """Sends its port, then a chunk to whoever asks."""
    chunk = bytes(_CHUNK)

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=chunk)

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(main())
