"""What endless loops cost others: latency of the env service while submitted code loops for ever, against without it.

Sessions play a built-in and a submitted environment at the pace of a model that answers quickly; each begins a new
episode of the submitted one now and then. Meanwhile episodes of another submitted environment, N_LOOPS of them, are in
a step that never ends. Rounds with and without loops alternate, so that both see the same machine.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import orjson

from tools.bench.abuse import running_service
from tools.bench.result import BenchResult, emit

N_LOOPS, N_SESSIONS = 16, 4
_ROUNDS, _EPISODES, _STEPS, _THINK_S = 6, 8, 15, 0.02
_SOURCE = """
class Echo:
    splits = {"train": 1000, "eval": 50}

    def reset(self, split, index, seed):
        return f"{split} {index}"

    def step(self, text):
        while text == "loop":
            pass
        return f"you said {text}", 0.0, False, False, {}
"""
_LAKE = "<answer>Right</answer>"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as (_, port):
        emit(asyncio.run(_measure(port)))


async def _measure(port: int) -> dict[str, BenchResult]:
    taken: dict[str, dict[str, list[float]]] = {"quiet": {}, "beside": {}}
    async with HttpSession(port) as session:
        for name in ("quiet", "loop"):
            await _submit(session, name)
        await _play(port, {})
        for _ in range(_ROUNDS):
            await _play(port, taken["quiet"])
            async with _loops(port):
                await _play(port, taken["beside"])
    return {
        f"fairness_{what}_p{q}": BenchResult(
            1e3 * quantiles(beside, n=100)[q - 1], "ms", 1e3 * quantiles(taken["quiet"][what], n=100)[q - 1]
        )
        for what, beside in taken["beside"].items()
        for q in (50, 99)
    }


class HttpSession:
    """One kept connection. An async context manager that waits until the service listens."""

    _numbers = itertools.count()

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> HttpSession:
        async with asyncio.timeout(60):
            while True:
                try:
                    self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
                    return self
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)

    async def __aexit__(self, *exception: object) -> None:
        self._writer.close()

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON. Raises RuntimeError for a refusal."""
        content = orjson.dumps(body) if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        told = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, _, rest = told.partition(b"content-length: ")
        answer = await self._reader.readexactly(int(rest.partition(b"\r")[0])) if rest else b""
        if not told.startswith(b"http/1.1 2"):
            raise RuntimeError(f"{method} {path}: {answer.decode()}")
        return orjson.loads(answer) if answer else None

    async def begin(self, env: str) -> str:
        body = {"request_id": f"r{next(self._numbers)}", "env": env, "split": "train", "index": 0, "seed": 1}
        return (await self.ask("POST", "/episodes", body))["episode_id"]

    async def step(self, episode: str, text: str) -> Any:
        body = {"request_id": f"r{next(self._numbers)}", "message": {"role": "assistant", "content": text}}
        return await self.ask("POST", f"/episodes/{episode}/step", body)


async def _submit(session: HttpSession, name: str) -> None:
    """Returns when it is active."""
    await session.ask("POST", "/environments", {"name": name, "source": _SOURCE, "weight": 0})
    async with asyncio.timeout(60):
        while (version := (await session.ask("GET", f"/environments/{name}@1"))["versions"][0])["state"] != "active":
            if version["state"] == "rejected":
                raise RuntimeError(f"{name} is rejected: {version['why']}")
            await asyncio.sleep(0.1)


@asynccontextmanager
async def _loops(port: int) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group, HttpSession(port) as session:
        episodes = [await session.begin("loop") for _ in range(N_LOOPS)]
        looping = [group.create_task(_loop(port, episode)) for episode in episodes]
        await asyncio.sleep(1.0)
        yield
        for task in looping:
            task.cancel()
        for episode in episodes:
            await session.ask("DELETE", f"/episodes/{episode}")


async def _loop(port: int, episode: str) -> None:
    async with HttpSession(port) as session:
        await session.step(episode, "loop")


async def _play(port: int, taken: dict[str, list[float]]) -> None:
    """Adds seconds to `taken`, by what was asked for."""
    async with asyncio.TaskGroup() as group:
        for number in range(N_SESSIONS):
            group.create_task(_converse(port, number, taken))


async def _converse(port: int, number: int, taken: dict[str, list[float]]) -> None:
    rng = random.Random(number)
    async with HttpSession(port) as session:
        for _ in range(_EPISODES):
            with _timed(taken, "start"):
                submitted = await session.begin("quiet")
            for _ in range(_STEPS):
                await asyncio.sleep(_THINK_S * rng.random() * 2)
                with _timed(taken, "submitted"):
                    await session.step(submitted, "hello")
                built_in = await session.begin("frozen_lake")
                with _timed(taken, "built_in"):
                    await session.step(built_in, _LAKE)
                await session.ask("DELETE", f"/episodes/{built_in}")
            await session.ask("DELETE", f"/episodes/{submitted}")


@contextmanager
def _timed(taken: dict[str, list[float]], what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    taken.setdefault(what, []).append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
