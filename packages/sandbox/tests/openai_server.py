"""A server that speaks OpenAI's chat completions and our reward services' JSON, and says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from shared.process.ports import free_port


@dataclass(slots=True)
class ScoringServer:
    """`say` makes the judge's text of a request's body; `score` the answer of the reward service. `status` other than
    200 is answered instead, for the next `failures` requests, with `why` and the Retry-After `wait`; each of `contents`
    is the whole body of an answer that is no completion. Requests wait while `go` is not set.
    """

    url: str = ""
    say: Callable[[dict[str, Any]], str] = lambda body: "Fine.\nScore: 7"
    score: Callable[[dict[str, Any]], Any] = lambda body: {"score": 0.5}
    failures: list[int] = field(default_factory=list[int])
    why: str = "out of order"
    wait: str | None = None
    contents: list[str] = field(default_factory=list[str])
    go: asyncio.Event = field(default_factory=asyncio.Event)
    usage: bool = True
    tokens_told: int = 100
    ended: str = "stop"
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: list[str | None] = field(default_factory=list[str | None])
    at_once: int = 0
    most_at_once: int = 0

    async def take(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.asked.append(body)
        self.tokens.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await self.go.wait()
        self.at_once -= 1
        if self.failures:
            raise HTTPException(self.failures.pop(0), self.why, {"Retry-After": self.wait} if self.wait else None)
        return body


@asynccontextmanager
async def scoring_server() -> AsyncIterator[ScoringServer]:
    """The server, on a port of this machine."""
    app, port = FastAPI(), free_port()
    state = ScoringServer(f"http://127.0.0.1:{port}")
    state.go.set()

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        body = await state.take(request)
        if state.contents:
            content = state.contents.pop(0)
            return Response(content, media_type="application/json" if content.startswith("{") else "text/html")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": state.say(body)},
            "finish_reason": state.ended,
        }
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": state.tokens_told}
        return {"id": "c", "object": "chat.completion", "choices": [choice]} | ({"usage": usage} if state.usage else {})

    @app.post("/score")
    async def score(request: Request) -> Any:
        return state.score(await state.take(request))

    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield state
    finally:
        state.go.set()
        server.should_exit = True
        await serving
