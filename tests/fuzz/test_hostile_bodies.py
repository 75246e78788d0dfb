"""Every route of every service gets every hostile body: many values in few bytes, and such values in the fields it
declares.

The routes are those the services themselves list, so a new one is covered by being there.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from shared import codec
from tests.fuzz.driver import REFUSALS, in_a_thread
from tests.fuzz.stack import OPENERS, RUN, TOKEN, open_stack, run_config
from tests.shared.test_bounds import array_of
from tools.embedded_redis import embedded_server

SIZE = 200_000
"""Bytes of a body: within every service's limit, and more values than any of them takes."""
NOT_TAKEN = (400, 401, 413, 422)
"""401 is of a route that wants the key of an agent's session, and looks at that first."""
MAX_GROWTH = 100 * 2**20
PATHS = {"env": "frozen_lake", "name": RUN, "episode_id": "none", "digest": "0" * 64, "record": "evals", "id": "none"}
JSON_TYPE = "application/json"

WHOLE: dict[str, tuple[str, bytes]] = {
    "maps": (codec.MEDIA_TYPE, array_of(SIZE, b"\x80")),
    "lists": (codec.MEDIA_TYPE, array_of(SIZE, b"\x90")),
    "ints": (codec.MEDIA_TYPE, array_of(SIZE, b"\x01")),
    "texts": (codec.MEDIA_TYPE, array_of(SIZE // 2, b"\xa1a")),
    "a map of maps": (
        codec.MEDIA_TYPE,
        b"\xdf" + (SIZE // 5).to_bytes(4, "big") + b"".join(b"\xa3%03x\x80" % i for i in range(SIZE // 5)),
    ),
    "deep": (codec.MEDIA_TYPE, b"\x81\xa1k" * (SIZE // 3) + b"\xc0"),
    "keys of bytes": (codec.MEDIA_TYPE, codec.pack({b"x": 1, b"rid": 2})),
    "no msgpack": (codec.MEDIA_TYPE, b"\xc1" * SIZE),
    "JSON maps": (JSON_TYPE, b"[" + b"{}," * (SIZE // 3) + b"0]"),
    "JSON members": (JSON_TYPE, b"{" + b",".join(b'"%x":{}' % i for i in range(SIZE // 9)) + b"}"),
    "JSON ints": (JSON_TYPE, b"[" + b"1," * (SIZE // 2) + b"1]"),
    "JSON deep": (JSON_TYPE, b'{"a":' * (SIZE // 5)),
    "JSON, not closed": (JSON_TYPE, b'{"a":"' + b'\\"[' * (SIZE // 3)),
}
VALUES: dict[str, Any] = {
    "many maps": [{}] * 16_000,
    "many ints": [1] * 16_000,
    "many texts": ["x"] * 16_000,
    "many members": {str(i): i for i in range(8_000)},
    "deep": json.loads("[" * 60 + "]" * 60),
    "long": "x" * (SIZE // 2),
    "huge": 2**63,
    "infinite": float("inf"),
    "null bytes": "\0" * 1000,
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("hostile")
    with (
        embedded_server(folder / "redis") as redis,
        in_a_thread(lambda: open_stack(run_config(folder, redis.url, 2**20))) as urls,
    ):
        yield urls


def operations(client: httpx.Client) -> Iterator[tuple[str, str, Mapping[str, Any] | None]]:
    """(method, path, properties of the body it declares, if it does)"""
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            schema = body and body["content"][JSON_TYPE]["schema"]
            yield method.upper(), path.format_map(PATHS), schema and _properties(schema)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(schema.get("properties", {}))
    for option in schema.get("anyOf", ()):
        found |= _properties(option)
    return found


def refused(client: httpx.Client, method: str, path: str, media: str, body: bytes, what: str) -> int:
    """Sends it; the status of the answer, which is a problem body if it is an error, and never a server error."""
    answer = client.request(method, path, content=body, headers={"Content-Type": media})
    case = f"{method} {path} with {what}: {answer.status_code} {answer.content[:200]!r}"
    assert answer.status_code < 500 or answer.status_code in REFUSALS, case
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", case
        assert len(answer.content) < 10_000, case
        assert answer.json().keys() >= {"type", "title", "status", "detail"}, case
    return answer.status_code


def rss() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("name", OPENERS)
def test_every_route_refuses_every_hostile_body(urls: dict[str, str], name: str) -> None:
    with httpx.Client(
        base_url=urls[name], headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60
    ) as client:
        found, before = list(operations(client)), rss()
        assert len(found) >= 5
        for method, path, properties in found:
            for what, (media, body) in WHOLE.items():
                status = refused(client, method, path, media, body, what)
                assert properties is None or len(body) < 1000 or status in NOT_TAKEN, f"{method} {path} took {what}"
            for field in properties or ():
                for what, value in VALUES.items():
                    refused(client, method, path, JSON_TYPE, orjson.dumps({field: value}), what)
            assert client.get("/health").status_code == 200
        gc.collect()
        assert rss() - before < MAX_GROWTH
