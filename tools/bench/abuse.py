"""What rude clients cost polite ones: latency of a cheap route while others hold connections open and send bodies
without end.

25 clients drip the heads of requests, a byte every half second, and come back when they are cut; one sends a body of 1
GB whose length it declares, one a body in chunks that never ends, both as fast as they can, again and again. They run
with the lowest priority, as if on another machine. Rounds with and without them alternate, so that both see the same
machine; memory is what the service has grown by since the first of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

from shared.process.ports import free_port
from tools.bench.result import BenchResult, emit

_DRIPPERS, _BODY_BYTES = 25, 10**9
_ROUNDS, _REQUESTS, _PACE_S = 8, 400, 0.004
_REQUEST = b"GET /environments HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = b"POST /episodes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def main() -> None:
    if sys.argv[1:2] == ["attack"]:
        os.nice(19)
        asyncio.run(_attack(int(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as (process, port):
        emit(asyncio.run(_measure(process.pid, port)))


@contextmanager
def running_service(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An env service of frozen_lake, and its port, at which it may not listen yet."""
    port = free_port()
    (folder / "run.yaml").write_text(
        f"model: {{path: none}}\ndata: {{env: frozen_lake}}\nrun: {{dir: {folder}}}\n"
        f"services: {{env: {{port: {port}}}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "services.env", "--config", str(folder / "run.yaml")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process, port
        finally:
            process.terminate()


async def _measure(pid: int, port: int) -> dict[str, BenchResult]:
    quiet, abused = [], []
    async with _under_attack(port):
        await _latencies(port)
    before = _resident_bytes(pid)
    for _ in range(_ROUNDS):
        quiet += await _latencies(port)
        async with _under_attack(port):
            abused += await _latencies(port)
    grown = _resident_bytes(pid) - before
    results = {
        f"abuse_p{q}": BenchResult(1e3 * quantiles(abused, n=100)[q - 1], "ms", 1e3 * quantiles(quiet, n=100)[q - 1])
        for q in (50, 99)
    }
    return {**results, "abuse_memory": BenchResult(grown / 1e6, "MB")}


@asynccontextmanager
async def _under_attack(port: int) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tools.bench.abuse", "attack", str(port))
    try:
        await asyncio.sleep(1.5)
        yield
    finally:
        process.kill()
        await process.wait()


async def _latencies(port: int) -> list[float]:
    """Of requests one after the other, at an even pace, in seconds; waits until the service listens."""
    reader, writer = await _connected(port)
    taken: list[float] = []
    for _ in range(_REQUESTS):
        started = time.perf_counter()
        writer.write(_REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        taken.append(time.perf_counter() - started)
        await asyncio.sleep(_PACE_S)
    writer.close()
    return taken


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.05)


async def _attack(port: int) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(_DRIPPERS):
            group.create_task(_again(port, _drip))
        group.create_task(_again(port, _declared))
        group.create_task(_again(port, _chunked))


async def _again(port: int, abuse: Any) -> None:
    """As often as the service lets it."""
    while True:
        with contextlib.suppress(ConnectionError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            step: Coroutine[Any, Any, None] = abuse(writer)
            await step
            writer.close()
        await asyncio.sleep(0.1)


async def _drip(writer: asyncio.StreamWriter) -> None:
    for byte in b"GET /environments HTTP/1.1\r\nX: " + b"y" * 10_000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.5)


async def _declared(writer: asyncio.StreamWriter) -> None:
    writer.write(_POST + b"Content-Length: %d\r\n\r\n" % _BODY_BYTES)
    await _pour(writer, b"x" * 2**16)


async def _chunked(writer: asyncio.StreamWriter) -> None:
    writer.write(_POST + b"Transfer-Encoding: chunked\r\n\r\n")
    await _pour(writer, b"10000\r\n" + b"x" * 2**16 + b"\r\n")


async def _pour(writer: asyncio.StreamWriter, chunk: bytes) -> None:
    for _ in range(_BODY_BYTES // len(chunk)):
        writer.write(chunk)
        await writer.drain()


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
