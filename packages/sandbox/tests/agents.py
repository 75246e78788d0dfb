"""Agents that tests submit, as their authors would write them, and a recorder that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tests.support.submitted import opened

HEADER = """
import json, os, subprocess, sys, time, urllib.request

def ask(base_url, key, text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    return json.loads(urllib.request.urlopen(request, timeout=20).read())["choices"][0]["message"]["content"]
"""

RUNS = (
    HEADER
    + """
class Adder:
    splits = {"train": 100, "eval": 10}
    timeout_s = 20

    def reset(self, split, index, seed):
        number = 2 * index + (split == "eval")
        self.a, self.b = number, 7
        open("numbers.txt", "w").write(f"{self.a} {self.b}")
        return f"{self.a}+{self.b}="

    def run(self, base_url, api_key, model):
        if api_key == "sess-1":
            %s
        return ask(base_url, api_key, os.environ["VOLLEY_TASK"])

    def judge(self, output):
        right = str(output).strip() == str(self.a + self.b)
        return float(right), {"success": right, "files": sorted(os.listdir("."))}

    def demonstration(self, split, index):
        prompt = self.reset(split, index, 0)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(self.a + self.b)}]
"""
)
"""A class that passes its validation, and does in a session what has to be filled in."""
ASKS = RUNS % "pass"


class Recorder:
    """A service that answers chat requests by `answer`, and keeps the requests."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.app = FastAPI()
        self.app.add_api_route("/v1/{path:path}", self._chat, methods=["GET", "POST"])

    async def _chat(self, request: Request, path: str) -> JSONResponse:
        body = await request.json() if request.method == "POST" else None
        self.requests.append((path, dict(request.headers), body))
        if body is None:
            return JSONResponse({"data": []})
        message = {"role": "assistant", "content": self._answer(str(body["messages"][-1]["content"]))}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Listen on a port; the address of the model."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=port, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await serving


def adds(text: str) -> str:
    """The answer of a model that can add."""
    return str(sum(int(part) for part in text.strip("= ").split("+")))


async def begin(client: httpx.AsyncClient, env: str = "adder", index: int = 3) -> dict[str, Any]:
    """A new episode."""
    made = await client.post("/episodes", json=opened(env, f"{env}-{index}", index))
    assert made.status_code == 201, made.text
    return made.json()


async def start(client: httpx.AsyncClient, episode: str, base_url: str) -> httpx.Response:
    body = {"request_id": "run", "base_url": base_url, "api_key": "sess-1", "model": "policy"}
    return await client.post(f"/episodes/{episode}/run", json=body)


async def ended(client: httpx.AsyncClient, episode: str) -> dict[str, Any]:
    """The state of the program, after its end."""
    async with asyncio.timeout(60):
        while (row := (await client.get(f"/episodes/{episode}/run?wait_s=5")).json())["state"] == "running":
            pass
    return row


async def finish(client: httpx.AsyncClient, episode: str, **more: Any) -> httpx.Response:
    return await client.post(f"/episodes/{episode}/finish", json={"request_id": "finish", **more})
