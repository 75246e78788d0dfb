"""Every error of the OpenAI endpoints reaches OpenAI's client over a socket: its class, its status and its message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
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
    "long answer": (lambda s: s.chat(max_tokens=999), openai.BadRequestError, 400, "context"),
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


async def long_prompt(client: openai.AsyncOpenAI, api: str) -> Any:
    if api == "responses":
        return await client.responses.create(model="m", input=LONG)
    if api == "completions":
        return await client.completions.create(model="m", prompt=LONG)
    return await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": LONG}], stream=api == "stream"
    )


LONG = "word " * 400
TOO_LONG = r"prompt is too long: \d+ tokens > 255 maximum"


@pytest.mark.parametrize("api", ["chat", "stream", "completions", "responses"])
async def test_agents_of_openai_learn_that_the_prompt_is_too_long(api: str, tmp_path: Path) -> None:
    """The code is what the SDK's users ask for, the text what LiteLLM searches for."""
    async with rollout(tmp_path) as server, server.client("service") as client:
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 255 tokens") as caught:
            await long_prompt(client, api)
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")


async def test_agents_of_anthropic_and_sglang_learn_it_in_their_words(tmp_path: Path) -> None:
    async with rollout(tmp_path) as server:
        messages: Any = [{"role": "user", "content": LONG}]
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=secret("service"), max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match=TOO_LONG) as caught:
                await client.messages.create(model="m", max_tokens=9, messages=messages)
            assert caught.value.body["error"]["type"] == "invalid_request_error"
            messages[0]["content"] = "hi"
            with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens` exceed context limit: \d+ \+ 300 > 255"):
                await client.messages.create(model="m", max_tokens=300, messages=messages)
        async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": secret("service")}) as http:
            for fields, told in (
                ({"text": LONG}, "is longer than the model's context length (255 tokens)."),
                ({"text": "hi", "sampling_params": {"max_new_tokens": 300}}, "model's maximum context length of 255"),
            ):
                answer = await http.post("/generate", json=fields)
                assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("case", "code"),
    [("wrong token", "invalid_api_key"), ("no room", "rate_limit_exceeded"), ("stopping", "unavailable")]
    + [("other route", None), ("wrong field", None), ("large head", None)],
)
async def test_an_error_has_the_code_of_openai_if_there_is_one(case: str, code: str | None, tmp_path: Path) -> None:
    async with rollout(tmp_path) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            await CASES[case][0](server)
        assert (caught.value.code, "urn:" in str(caught.value.type)) == (code, False)
        async with server.client("service") as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


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
