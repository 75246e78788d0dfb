"""Environments that tests submit, as their authors would write them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from typing import Any

import httpx

from tests.support.loop_clock import skip
from volley_sandbox.submissions.findings import AT_ONCE

ADDER = """
import random

class Adder:
    splits = {"train": 1000, "eval": 50}

    def reset(self, split, index, seed):
        rng = random.Random(f"{split}/{index}")
        self.a, self.b = rng.randrange(10**6), rng.randrange(10**6)
        return f"{self.a} + {self.b} = ?"

    def step(self, text):
        right = text.strip() == str(self.a + self.b)
        return "", float(right), True, False, {"success": right}

    def demonstration(self, split, index):
        prompt = self.reset(split, index, 0)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(self.a + self.b)}]
"""

FAILS_LIVE = ADDER.replace(
    "    def step(self, text):",
    '    def step(self, text):\n        if text == "live":\n            raise KeyError("lost")\n',
)
"""Whatever the validation says to it, it plays; a model that says `live` breaks it."""

PYTHON = {"Content-Type": "text/x-python"}


async def submit(client: httpx.AsyncClient, source: str, **query: Any) -> httpx.Response:
    return await client.post("/environments", params=query, content=source.encode(), headers=PYTHON)


async def decided(client: httpx.AsyncClient, name: str) -> Mapping[str, Any]:
    """The version once its validation is over."""
    async with asyncio.timeout(120):
        while True:
            row = (await client.get(f"/environments/{name}")).json()["versions"][-1]
            if row["state"] not in ("submitted", "validating"):
                return row
            await asyncio.sleep(0.05)


async def reached(client: httpx.AsyncClient, name: str, state: str) -> Mapping[str, Any]:
    """The version once it is in that state."""
    async with asyncio.timeout(60):
        while (row := (await client.get(f"/environments/{name}")).json()["versions"][-1])["state"] != state:
            await asyncio.sleep(0.05)
    return row


def opened(env: str, request_id: str, index: int = 0) -> dict[str, Any]:
    """The request for an episode."""
    return {"request_id": request_id, "env": env, "split": "train", "index": index}


async def play(client: httpx.AsyncClient, env: str, request_id: str, reply: str, index: int = 0) -> httpx.Response:
    """One episode of one step; the answer to the step."""
    made = await client.post("/episodes", json=opened(env, request_id, index))
    assert made.status_code == 201, made.text
    message = {"role": "assistant", "content": reply}
    return await client.post(
        f"/episodes/{made.json()['episode_id']}/step", json={"request_id": "1", "message": message}
    )


async def timed_out(
    client: httpx.AsyncClient, name: str, process: subprocess.Popen[str], call: str, seconds: float
) -> Mapping[str, Any]:
    """The version once its validation is over, whose calls used up their time.

    Args:
        process: the environment's server, which writes the name of a call that it never answers.
        call: that name.
        seconds: deadline of a call.
    """
    assert process.stdout is not None
    for _ in range(AT_ONCE):
        assert await asyncio.to_thread(process.stdout.readline) == f"{call}\n"
    skip(seconds)
    return await decided(client, name)
