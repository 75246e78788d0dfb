"""Routes: bodies of the wrong kind are refused by a client error, and each answer is one of the interface's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from packages.tinker.tests.trainer.support import base, service
from shared.services_schema import Limits
from shared.web.http import create_app
from volley_tinker.server import records, routes
from volley_tinker.server.learner import Base
from volley_tinker.server.messages import PROTOBUF

HOSTILE: list[Any] = [None, 0, -1, 2**70, 1.5, True, "", "x" * 2000, "\ud83d", [], [[]], {}, {"a": {"b": [None]}}]
NAMES = (
    *("session_id", "model_seq_id", "base_model", "lora_config", "optimizer_config", "user_metadata", "model_id"),
    *("seq_id", "path", "optimizer", "forward_backward_input", "adam_params", "ttl_seconds", "overwrite", "prompt"),
    *("sampling_session_seq_id", "sampling_session_id", "num_samples", "sampling_params", "prompt_logprobs"),
    *("prompt_logprobs_last_n", "request_id", "reason", "tinker_path"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return base(tmp_path_factory.mktemp("tinker"))


async def test_no_body_breaks_a_route(tmp_path: Path, tiny: Base):
    app = create_app("tinker", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES | records.ROLES)
    app.include_router(routes.router)
    app.include_router(records.router)
    async with (
        service(tmp_path, tiny) as tinker,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tinker") as client,
    ):
        app.state.tinker = tinker
        session = (await client.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
        whole = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        model = (await client.post("/api/v1/create_model", json=whole)).json()["model_id"]
        known = {**whole, "model_id": model, "seq_id": 1, "path": "a", "optimizer": False, "prompt": {"chunks": []}}
        known |= {
            "request_id": f"{model}:0",
            "forward_backward_input": {"data": [], "loss_fn": "ppo"},
            "adam_params": {},
        }
        link = {"signature": "0" * 64, "expires": 9, "folder": "..", "file": "a"}
        for key, role in (routes.ROLES | records.ROLES).items():
            method, _, path = key.partition(" ")
            url = path.format(session=session, model=model, sampler="s", kind="weights", name="a", **link)
            for i, value in enumerate(HOSTILE):
                name = NAMES[(i * 7 + len(path)) % len(NAMES)]
                body = {**known, name: value} if i % 3 else value
                content = json.dumps(body) if method != "GET" else None
                headers = {"content-type": "application/json"}
                answer = await client.request(method, url, content=content, headers=headers)
                assert answer.status_code < 500, (key, role, name, value, answer.text)
        for path in ({}, 5, "x" * 2000):
            body = {"prompt": {"chunks": [{"tokens": [1]}]}, "model_path": path}
            assert (await client.post("/api/v1/asample", json=body)).status_code == 422
        signed = await client.get("/api/v1/external_weights/%C3%A9/9/a/b")
        assert signed.status_code == 403
        for data in (b"", b"\xff" * 9, b"\x0a\x01m", b"\x22\x03ppo"):
            answer = await client.post("/api/v1/forward_backward", content=data, headers={"content-type": PROTOBUF})
            assert 400 <= answer.status_code < 500


async def test_refused_routes_say_why(tmp_path: Path, tiny: Base):
    app = create_app("tinker", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)
    app.include_router(routes.router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tinker") as client:
        for path in routes.REFUSED:
            answer = await client.post(f"/api/v1/{path}", json={})
            assert answer.status_code == 422
            assert path in answer.json()["detail"]
