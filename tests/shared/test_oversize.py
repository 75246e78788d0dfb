"""A body over the limit is answered with 413, which every client reads, also one that reads after it has sent all."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import httpx
import pytest
import requests

from shared.services_schema import Limits, ServicesSection
from shared.web.access import Role
from shared.web.http import create_app
from tests.support.asgi import served

LIMIT = 2**16
LIMITS = Limits(max_body_bytes=LIMIT, body_timeout_s=20, grace_s=1)
PIECE = b"x" * 2**15

type Ask = Callable[[str, int, bool], Awaitable[tuple[int, bytes]]]


def pieces(n_bytes: int) -> Iterator[bytes]:
    for _ in range(n_bytes // len(PIECE)):
        yield PIECE


async def pieces_later(n_bytes: int) -> AsyncIterator[bytes]:
    for piece in pieces(n_bytes):
        yield piece


async def by_httpx(url: str, n_bytes: int, chunked: bool) -> tuple[int, bytes]:
    async with httpx.AsyncClient() as client:
        answer = await client.post(url, content=pieces_later(n_bytes) if chunked else b"x" * n_bytes)
        return answer.status_code, answer.content


async def by_aiohttp(url: str, n_bytes: int, chunked: bool) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=pieces_later(n_bytes) if chunked else b"x" * n_bytes) as answer,
    ):
        return answer.status, await answer.read()


async def by_requests(url: str, n_bytes: int, chunked: bool) -> tuple[int, bytes]:
    """Reads after it has sent everything."""
    answer = await asyncio.to_thread(requests.post, url, data=pieces(n_bytes) if chunked else b"x" * n_bytes)
    return answer.status_code, answer.content


async def by_curl(url: str, n_bytes: int, chunked: bool) -> tuple[int, bytes]:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    head = ["-H", "Transfer-Encoding: chunked"] if chunked else []
    process = await asyncio.create_subprocess_exec(
        *(curl, "-sS", "-w", "\n%{http_code}", "-H", "Expect:", *head, "--data-binary", "@-", url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate(b"x" * n_bytes)
    assert process.returncode == 0
    body, _, status = said.rpartition(b"\n")
    return int(status), body


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = create_app("demo", limits=LIMITS, tokens=None, ready=lambda: None, roles={"POST /size": Role.SERVICE})

    @app.post("/size")
    async def size() -> None: ...

    async with served(app, ServicesSection(limits=LIMITS)) as root:
        yield f"{root}/size"


@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp, by_requests, by_curl])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("n_bytes", [2 * LIMIT, 2**25], ids=["little", "much"])
async def test_the_answer_is_read(url: str, ask: Ask, n_bytes: int, chunked: bool) -> None:
    status, body = await ask(url, n_bytes, chunked)
    problem = json.loads(body)
    assert (status, problem["status"]) == (413, 413)
    assert "services.limits.max_body_bytes" in json.dumps(problem)
