"""The HTTP edge: problem bodies, limits, token, msgpack, and the client that reads them back."""

import asyncio
import socket
import time
from email.utils import formatdate

import httpx
import numpy as np
import orjson
import pytest
import uvicorn
from fastapi import HTTPException, Request, Response

from shared import codec, errors
from shared.clients import connections
from shared.clients.base import HttpClient
from shared.process import telemetry
from shared.process.ports import free_port
from shared.services_schema import Limits
from shared.web import edge, serving
from shared.web.access import AccessTokens, Role
from shared.web.edge import DirectRoute
from shared.web.http import create_app, read_body, respond
from shared.web.problems import problem_response

TOKEN = "s3cret-s3cret-s3"
TOKENS = AccessTokens({Role.VIEWER: TOKEN})
LIMITS = Limits(max_body_bytes=1000)


def make_app(tokens=None, reason=None, limits=LIMITS, roles=None):
    declared = {"GET /number/{n}": Role.VIEWER, **(roles or {})}
    app = create_app("demo", limits=limits, tokens=tokens, ready=lambda: reason, roles=declared)

    @app.post("/echo")
    async def echo(request: Request):
        return respond(request, await read_body(request))

    @app.get("/fail/{name}")
    async def fail(name: str):
        raise getattr(errors, name)("the detail", "the hint")

    @app.get("/bug")
    async def bug():
        raise KeyError("secret of the inside")

    @app.get("/number/{n}")
    async def number(n: int):
        return n

    return app


def client(app, token=None):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return HttpClient("http://demo", token=token, transport=transport)


async def test_msgpack_echo_keeps_arrays():
    async with client(make_app()) as c:
        answer = await c.post("/echo", {"ids": np.arange(3, dtype=np.int32)})
    assert answer["ids"].dtype == np.int32
    assert answer["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "NotFound",
        "Conflict",
        "TooLarge",
        "Forbidden",
        "OutOfMemory",
        "WeightsError",
        "Fenced",
        "EngineDied",
        "DecodeError",
    ],
)
async def test_an_error_crosses_the_wire_as_itself(name):
    async with client(make_app()) as c:
        with pytest.raises(getattr(errors, name), match=r"the detail \(the hint\)"):
            await c.get(f"/fail/{name}", attempts=1)


@pytest.mark.parametrize(
    ("path", "token", "status", "message"),
    [
        ("/v1/fail", TOKEN, 409, "the detail (the hint)"),
        ("/v1/bug", TOKEN, 500, "internal error (see the service's log)"),
        ("/v1/foreign", TOKEN, 418, "short and stout"),
        ("/v1/number/x", TOKEN, 422, "path.n: "),
        ("/v1/large", TOKEN, 413, "the body exceeds 1000 bytes (services.limits.max_body_bytes sets the limit)"),
        ("/v1/fail", "wrong", 401, "missing or wrong bearer token (send Authorization: Bearer <token>)"),
        ("/v1/nothing", TOKEN, 404, "there is no '/v1/nothing' here (GET /openapi.json lists all paths)"),
    ],
)
async def test_openais_clients_are_told_what_is_wrong(path, token, status, message):
    app = make_app(
        TOKENS, roles={f"{method} {path}": Role.VIEWER for method in ("GET", "POST")} if path != "/v1/nothing" else {}
    )

    @app.get("/v1/fail")
    async def fail():
        raise errors.Conflict("the detail", "the hint")

    @app.get("/v1/bug")
    async def bug():
        raise KeyError("secret of the inside")

    @app.get("/v1/foreign")
    async def foreign():
        raise HTTPException(418, "short and stout")

    @app.get("/v1/number/{n}")
    async def number(n: int): ...

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://demo"
    ) as c:
        c.headers["Authorization"] = f"Bearer {token}"
        answer = await c.post(path, content=b"x" * 1001) if status == 413 else await c.get(path)
        plain = await c.get("/nothing")
    body = answer.json()
    assert (answer.status_code, body["status"]) == (status, status)
    assert body["error"].pop("message").startswith(message)
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    code = "invalid_api_key" if status == 401 else None
    assert body["error"] == {"type": kinds.get(status, "invalid_request_error"), "param": None, "code": code}
    assert "error" not in plain.json()


async def test_when_to_ask_again_crosses_the_wire():
    app = make_app()

    @app.get("/full")
    async def full():
        raise errors.RateLimited("full", retry_after_s=9.5)

    async with client(app) as c:
        with pytest.raises(errors.RateLimited) as caught:
            await c.get("/full", attempts=1)
    assert caught.value.retry_after_s == 9.5
    assert problem_response(caught.value).headers["retry-after"] == "10"


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), ("%d", 25, 31), ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0), ("soon", 1, 1), ("", 1, 1)]
    + [(f"Mon, 01 Jan {'9' * 14} 00:00:00 GMT", 1, 1), ("Sun, 06 Nov 1994 08:49:37 +99999999999999999999", 1, 1)]
    + [("9" * 400, 1, 10**12)],
)
async def test_a_servers_retry_after_is_seconds_or_a_date(header: str, low: float, high: float):
    app = make_app()
    told = formatdate(time.time() + 30, usegmt=True) if header == "%d" else header

    @app.get("/busy")
    async def busy():
        return Response(status_code=503, headers={"Retry-After": told})

    async with client(app) as c:
        with pytest.raises(errors.Unavailable) as caught:
            await c.get("/busy", attempts=1)
    assert low <= caught.value.retry_after_s <= high


@pytest.mark.parametrize(
    ("said", "heard"),
    [(0, 0), (1e300, 60), (float("inf"), 60), (float("nan"), 1), (-1, 1), ("9", 1), (None, 1), ([9], 1)],
)
def test_a_service_cannot_make_a_client_wait_for_ever(said: object, heard: float):
    error = errors.from_problem(429, {"type": "urn:volley:RateLimited", "retry_after_s": said})
    assert isinstance(error, errors.RateLimited)
    assert error.retry_after_s == heard


async def test_a_bug_says_nothing_of_the_inside():
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(), raise_app_exceptions=False), base_url="http://x"
    ) as c:
        answer = await c.get("/bug")
    assert answer.status_code == 500
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("send", "status"),
    [
        (lambda c: c.post("/echo", content=b"{", headers={"content-type": "application/json"}), 400),
        (lambda c: c.post("/echo", content=b"\xc1", headers={"content-type": codec.MEDIA_TYPE}), 400),
        (lambda c: c.post("/echo", content=b"[1]", headers={"content-type": "application/json"}), 400),
        (lambda c: c.post("/echo", content=b"x" * 1001), 413),
        (lambda c: c.get("/number/many"), 422),
        (lambda c: c.get("/nowhere"), 404),
        (lambda c: c.get("/echo"), 405),
    ],
)
async def test_bad_requests_get_a_problem_body(send, status):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://x") as c:
        answer = await send(c)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]


async def test_a_chunked_body_over_the_limit_is_cut_off():
    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://x") as c:
        assert (await c.post("/echo", content=chunks())).status_code == 413


async def test_large_bodies_together_are_bounded_and_small_ones_pass(monkeypatch):
    monkeypatch.setattr(edge, "_SMALL_BODY", 10)
    monkeypatch.setattr(edge, "_LARGE_BODIES", 1)
    first_read, held = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b"[" * 900
        first_read.set()
        await held.wait()

    transport = httpx.ASGITransport(make_app(limits=Limits(max_body_bytes=1000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as c, asyncio.TaskGroup() as group:
        first = group.create_task(c.post("/echo", content=slowly()))
        await first_read.wait()
        assert (await c.post("/echo", content=b"x" * 200)).status_code == 503
        assert (await c.post("/echo", content=b"{}")).status_code == 200
        held.set()
        assert (await first).status_code == 400
        assert (await c.post("/echo", content=b"x" * 200)).status_code == 400


async def test_admin_requests_have_a_pace_for_each_address():
    app = create_app(
        "demo", limits=Limits(admin_per_s=0.2), tokens=None, ready=lambda: None, roles={"GET /free": Role.SERVICE}
    )
    app.post("/admin")(lambda: 1)
    app.get("/free")(lambda: 1)
    answers = {}
    for address in ("10.0.0.1", "10.0.0.2"):
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as c:
            answers[address] = [await c.post("/admin") for _ in range(3)]
            assert (await c.get("/free")).status_code == 200
    for one in answers.values():
        assert [answer.status_code for answer in one] == [200, 200, 429]
        assert 1 <= int(one[2].headers["retry-after"]) <= 5
    assert errors.from_problem(429, answers["10.0.0.1"][2].json()).status == 429


async def test_token():
    async with client(make_app(TOKENS)) as c:
        assert await c.get("/health")
        with pytest.raises(errors.Unauthorized):
            await c.get("/number/1")
    async with client(make_app(TOKENS), token="s3cret-s3cret-s3") as c:
        assert await c.get("/number/1") == 1


async def test_ready_names_the_reason():
    async with client(make_app(reason="no weights yet")) as c:
        with pytest.raises(errors.Unavailable, match="no weights yet"):
            await c.get("/ready", attempts=1)


async def test_metrics_count_requests_by_route():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://x") as c:
        await c.get("/number/1")
        text = (await c.get("/metrics")).text
    assert 'route="/number/{n}",status="200"' in text


async def test_a_body_that_stalls_is_given_up_and_may_be_sent_again():
    port = free_port()
    app = make_app(limits=LIMITS.model_copy(update={"body_timeout_s": 0.3}))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(2000), 30)
        writer.close()
    finally:
        server.should_exit = True
        await task
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"did not arrive within" in body
    error = errors.from_problem(int(head.split()[1]), orjson.loads(body))
    assert error.transient


async def test_an_unreachable_service_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with HttpClient(url) as c:
            with pytest.raises(errors.ServiceUnreachable, match=url):
                await c.post("/x", {})


async def test_requests_of_a_closed_client_fail_as_those_to_a_dead_service():
    """Its owner closes it when the service leaves, which others may notice later."""
    async with HttpClient("http://127.0.0.1:1") as c:
        pass
    for call in (
        c.get("/x"),
        c.post("/x", {}),
        c.upload("PUT", "/x", b"", "text/plain", {}),
        c.exchange("GET", "/x"),
        c.exchange_stream("/x", {}, print),
        c.download("/x", print),
    ):
        with pytest.raises(errors.ServiceUnreachable, match="this client is closed"):
            await call


async def test_a_request_during_which_its_client_is_closed_fails_as_one_to_a_dead_service():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}") as c:
            asking = asyncio.create_task(c.get("/x"))
            await asyncio.sleep(0.05)
        with pytest.raises(errors.ServiceUnreachable):
            await asking


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1", "nothing listens there"),
        ("http://nope.invalid:1", "cannot be resolved .check the address"),
        ("ftp://127.0.0.1", "not an http address"),
        ("http://127.0.0.1:99999", "not an http address"),
    ],
)
async def test_why_a_service_is_unreachable_is_in_plain_words(url, reason):
    async with HttpClient(url) as c:
        with pytest.raises(errors.ServiceUnreachable, match=reason):
            await c.post("/x", {})


def test_a_client_lets_go_of_a_connection_long_before_the_server_does():
    assert 2 * connections.KEEPALIVE_S < serving._KEEP_ALIVE_S


async def test_a_direct_route_answers_like_any_other() -> None:
    """Role, problem bodies, other methods, defects and metrics are those of a route of FastAPI."""

    async def fail(request: Request, name: str) -> Response:
        if name == "bug":
            raise KeyError("secret of the inside")
        raise errors.NotFound(f"no {name}")

    path, roles = "/fail/{name}/now", {"POST /fail/{name}/now": Role.SERVICE}
    tokens = AccessTokens({Role.VIEWER: TOKEN, Role.SERVICE: "t" * 16})
    direct, plain = (
        create_app("demo", limits=LIMITS, tokens=tokens, ready=lambda: None, roles=roles, direct=routes)
        for routes in ([DirectRoute("POST", path, fail)], ())
    )
    for app in (direct, plain):
        app.post(path)(fail)
    told: list[list[object]] = []
    for app in (direct, plain):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(base_url="http://demo", transport=transport) as c:
            service, viewer = ({"Authorization": f"Bearer {token}"} for token in ("t" * 16, TOKEN))
            answers = [
                await c.post("/fail/one/now", headers=service),
                await c.post("/fail/a%2Fb/now", headers=service),
                await c.post("/fail/bug/now", headers=service),
                await c.post("/fail/one/now", headers=viewer),
                await c.post("/fail/one/now"),
                await c.get("/fail/one/now", headers=service),
                await c.options("/fail/one/now"),
                await c.post("/fail/one/now", headers=service, content=b"x" * 1001),
            ]
        told.append([(answer.status_code, answer.text, answer.headers.get("allow")) for answer in answers])
    assert told[0] == told[1]
    assert [status for status, *_ in told[0]] == [404, 404, 500, 403, 401, 405, 204, 413]
    assert 'route="/fail/{name}/now",status="404"' in telemetry.exposition("")[0].decode()
