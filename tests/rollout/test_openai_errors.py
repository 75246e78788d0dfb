"""Every error of the OpenAI endpoints reaches OpenAI's client over a socket: its class, its status and its message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from services.rollout.api.generation import GenerationRunner
from services.rollout.app import build_app
from services.rollout.weights.serving import Serving
from services.rollout.weights.updater import WeightUpdater
from shared.errors import EngineDied
from shared.models.config import ModelConfig
from shared.services_schema import Limits, ServicesSection, TokenFiles
from shared.web import connection
from shared.web.access import Role, read_tokens
from tests.support import models
from tests.support.asgi import served
from tests.support.engine import SETTINGS, FakeEngine

VERSION = "e000001-s000000"
LIMITS = Limits(grace_s=1, body_timeout_s=60, header_timeout_s=60)
CHAT = "/chat/completions"
JSON = {"headers": {"Content-Type": "application/json"}}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client is too slow to get its answer."""
    monkeypatch.setattr(connection, "_REST_S", 60.0)


@dataclass
class Server:
    url: str
    engine: FakeEngine
    generation: GenerationRunner

    def client(self, role: str, base: str = "/v1") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + base, api_key=secret(role), max_retries=0)

    async def chat(self, role: str = "service", base: str = "/v1", **fields: Any) -> Any:
        async with self.client(role, base) as client:
            asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
            return await client.chat.completions.create(model="m", **asked)

    async def post(self, content: Any, path: str = CHAT) -> Any:
        async with self.client("service") as client:
            return await client.post(path, cast_to=object, content=content, options=JSON)


def secret(role: str) -> str:
    return f"{role}-token-0123456789abcdefghijklmnop"


@asynccontextmanager
async def rollout(folder: Path) -> AsyncIterator[Server]:
    for role in ("viewer", "service", "admin"):
        (folder / role).write_text(secret(role), encoding="utf-8")
        (folder / role).chmod(0o600)
    tokens = read_tokens(TokenFiles(**{role: str(folder / role) for role in ("viewer", "service", "admin")}))
    assert tokens.of(Role.SERVICE) == secret("service")
    engine = FakeEngine(version=VERSION)
    model = ModelConfig.parse(models.tiny_config())
    updates = WeightUpdater(engine, folder, model, "test", state=Serving(VERSION))
    generation = GenerationRunner(engine, 0.2, updates)
    app = build_app(replace(SETTINGS, limits=LIMITS), engine, updates, generation, tokens)
    async with served(app, ServicesSection(limits=LIMITS)) as url:
        yield Server(url, engine, generation)


async def pieces(n: int) -> AsyncIterator[bytes]:
    for _ in range(n):
        yield b"x" * 2**15


async def without_room(server: Server) -> Any:
    server.generation.n_requests = 256
    return await server.chat()


async def silent(server: Server) -> Any:
    server.engine.silent_s = 100.0
    return await server.chat()


async def draining(server: Server) -> Any:
    server.generation.draining = True
    return await server.chat()


async def dying(server: Server) -> Any:
    def die(_: Any) -> Any:
        raise EngineDied("out of memory")

    server.engine.draw = die
    return await server.chat()


async def delete(server: Server) -> Any:
    async with server.client("service") as client:
        return await client.delete(CHAT, cast_to=object)


async def embed(server: Server) -> Any:
    async with server.client("service") as client:
        return await client.embeddings.create(model="m", input="x")


type Ask = Callable[[Server], Awaitable[Any]]
CASES: dict[str, tuple[Ask, type[openai.APIStatusError], int, str]] = {
    "no JSON": (lambda s: s.post(b"{"), openai.BadRequestError, 400, "not valid JSON"),
    "no text": (lambda s: s.post(b"\xff"), openai.BadRequestError, 400, "not valid JSON"),
    "no body": (lambda s: s.post(b""), openai.BadRequestError, 400, "not valid JSON"),
    "no object": (lambda s: s.post(b"[1]"), openai.BadRequestError, 400, "must be an object"),
    "infinity": (lambda s: s.post(b'{"temperature": 1e400}'), openai.BadRequestError, 400, "infinity"),
    "wrong token": (lambda s: s.chat("nobody"), openai.AuthenticationError, 401, "bearer token"),
    "lesser token": (lambda s: s.chat("viewer"), openai.PermissionDeniedError, 403, "role service"),
    "other route": (embed, openai.NotFoundError, 404, "/v1/embeddings"),
    "base URL without /v1": (lambda s: s.chat(base=""), openai.NotFoundError, 404, "/chat/completions"),
    "other method": (delete, openai.APIStatusError, 405, "does not take DELETE"),
    "large body": (lambda s: s.post(b"x" * 2**20), openai.APIStatusError, 413, "max_body_bytes"),
    "large chunks": (lambda s: s.post(pieces(32)), openai.APIStatusError, 413, "max_body_bytes"),
    "larger chunks": (lambda s: s.post(pieces(2**10), "/completions"), openai.APIStatusError, 413, "max_body_bytes"),
    "wrong field": (lambda s: s.chat(temperature=-1), openai.UnprocessableEntityError, 422, "temperature"),
    "long answer": (lambda s: s.chat(max_tokens=999), openai.UnprocessableEntityError, 422, "context"),
    "no room": (without_room, openai.RateLimitError, 429, "256 requests"),
    "large head": (
        lambda s: s.chat(extra_headers={"x": "y" * 2**17}),
        openai.APIStatusError,
        431,
        "head of the request",
    ),
    "dying engine": (dying, openai.InternalServerError, 500, "out of memory"),
    "silent engine": (silent, openai.InternalServerError, 503, "silent"),
    "stopping": (draining, openai.InternalServerError, 503, "stopping"),
}


@pytest.mark.parametrize("case", CASES)
async def test_openais_client_tells_what_was_wrong(case: str, tmp_path: Path) -> None:
    ask, error, status, told = CASES[case]
    async with rollout(tmp_path) as server:
        assert (await server.chat()).choices
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(server)
    assert (type(caught.value), caught.value.status_code) == (error, status)
    assert told in caught.value.message
    assert isinstance(caught.value.body, dict)
    assert caught.value.type is not None
    if status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_anthropics_client_sends_its_token_in_its_own_header(tmp_path: Path) -> None:
    async with rollout(tmp_path) as server:
        for role, error in (
            ("service", None),
            ("viewer", anthropic.PermissionDeniedError),
            ("nobody", anthropic.AuthenticationError),
        ):
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=secret(role), max_retries=0) as client:
                asking = client.messages.create(model="m", max_tokens=2, messages=[{"role": "user", "content": "hi"}])
                with pytest.raises(error) if error else nullcontext():
                    await asking
