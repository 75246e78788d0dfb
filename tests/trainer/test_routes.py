from collections.abc import AsyncIterator

import httpx
import pytest

from services.trainer.routes import ROLES, router
from services.trainer.status import TrainerStatus
from shared.run.waits import Wait
from shared.services_schema import Limits
from shared.web.access import AccessTokens, Role
from shared.web.http import create_app


@pytest.fixture
def status() -> TrainerStatus:
    return TrainerStatus("r", 10)


@pytest.fixture
async def client(status: TrainerStatus) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(
        "trainer", limits=Limits(), tokens=AccessTokens({Role.ADMIN: "secret"}), ready=status.not_ready, roles=ROLES
    )
    app.state.status = status
    app.include_router(router)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer", headers=headers) as one:
        yield one


async def test_wishes_reach_the_loop(client: httpx.AsyncClient, status: TrainerStatus):
    assert (await client.post("/pause")).json() == {"paused": True, "step": 0}
    assert status.paused
    assert (await client.post("/checkpoint")).status_code == 202
    assert status.checkpoint_wanted
    assert (await client.post("/resume")).json()["paused"] is False
    assert not status.paused
    assert status.changed.is_set()


async def test_ready_tells_why_not(client: httpx.AsyncClient, status: TrainerStatus):
    status.phase = "warm start"
    with status.waiting(Wait("env", "POST http://env did not answer")):
        answer = await client.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "warm start: POST http://env did not answer"
    status.phase = "waiting"
    assert (await client.get("/ready")).status_code == 200


async def test_status_metrics_and_openapi(client: httpx.AsyncClient, status: TrainerStatus):
    status.ended("stale")
    told = (await client.get("/status")).json()
    assert (told["phase"], told["tickets"], told["last"]) == ("loading", {"stale": 1}, None)
    assert 'volley_trainer_tickets_total{disposition="stale"}' in (await client.get("/metrics")).text
    assert {"/status", "/checkpoint", "/pause", "/resume"} <= (await client.get("/openapi.json")).json()["paths"].keys()


async def test_routes_need_the_token(client: httpx.AsyncClient):
    assert (await client.post("/pause", headers={"Authorization": "Bearer wrong"})).status_code == 401
