"""Clients of env and rollout: what the wire may carry, and what is refused before it becomes data."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from shared import codec
from shared.bounds import MAX_OBJECTS
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.errors import Conflict, DecodeError, NotFound, ServiceUnreachable, Unavailable, problem
from shared.process.ports import free_port
from shared.routing import RoutingShape, to_wire
from shared.services_schema import Limits
from shared.web.http import create_app
from tests.support.asgi import served
from tests.support.engine import RolloutDouble

IDS = np.arange(5, dtype=np.int32)
PARAMS = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 1}
GOOD = {
    "output_ids": [7, 8, 2],
    "meta_info": {
        "prompt_tokens": 5,
        "output_token_logprobs": [-0.5, -1.0, -2.0],
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"version": "e000001-s000000", "start": 0, "end": 3}],
    },
}


def changed(**meta):
    return {**GOOD, "meta_info": {**GOOD["meta_info"], **meta}}


def answering(body, status=200):
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def answer(request: Request) -> Response:
        return Response(codec.pack(body), status, media_type=codec.MEDIA_TYPE)

    return app


def rollout(app):
    return RolloutClient("http://rollout", transport=httpx.ASGITransport(app))


async def test_a_generation_as_msgpack_arrays_or_as_lists():
    async with served(RolloutDouble().app()) as url, RolloutClient(url) as client:
        over_http = await client.generate(IDS, PARAMS, "a")
    assert over_http.output_ids.dtype == np.int32
    assert over_http.logprobs.dtype == np.float32
    rows = [[-0.5, 7, None], [-1.0, 8, None], [-2.0, 2, None]]
    for body in (GOOD, changed(output_token_logprobs=rows)):
        async with rollout(answering(body)) as client:
            generation = await client.generate(IDS, PARAMS, "a")
        assert generation.output_ids.tolist() == [7, 8, 2]
        assert generation.logprobs.tolist() == [-0.5, -1.0, -2.0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (changed(prompt_tokens=4), "received 4 of 5 prompt tokens"),
        (changed(output_token_logprobs=[-0.5]), "1 log-probabilities for 3 tokens"),
        (changed(output_token_logprobs=[-0.5, float("nan"), -1.0]), "not finite"),
        (changed(output_token_logprobs=[-0.5, 0.5, -1.0]), "not negative"),
        (changed(weight_versions=[]), "cover 0 of 3"),
        (changed(weight_versions=[{"version": "e000001-s000000", "start": 1, "end": 3}]), "gap"),
        (changed(weight_versions=[{"version": "seven", "start": 0, "end": 3}]), "not a weight version"),
        (changed(finish_reason={"type": "tired"}), "tired"),
        (GOOD | {"output_ids": [7, 8, -2]}, "negative"),
        (GOOD | {"output_ids": [7] * 9}, "9 tokens, but at most 4"),
        (changed(output_token_logprobs=[], weight_versions=[]) | {"output_ids": []}, "nothing was sampled"),
        ({"text": "hello"}, "lacks or mistypes"),
        ([1], "lacks or mistypes"),
    ],
)
async def test_a_broken_generation_makes_the_server_unavailable_and_is_never_data(body, reason):
    async with rollout(answering(body)) as client:
        with pytest.raises(Unavailable, match=reason):
            await client.generate(IDS, PARAMS, "a")


ROUTED = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)


async def test_experts_come_from_the_position_that_was_asked_for():
    seen = []
    app = answering(changed(routed_experts=to_wire(ROUTED)))

    @app.middleware("http")
    async def note(request: Request, call_next):
        seen.append(codec.unpack(await request.body()))
        return await call_next(request)

    async with rollout(app) as client:
        found = await client.generate(IDS, PARAMS, "a", routed_from=2)
    np.testing.assert_array_equal(found.routed_experts, ROUTED)
    assert (seen[0]["return_routed_experts"], seen[0]["routed_experts_start_len"]) == (True, 2)
    async with rollout(answering(GOOD)) as client:
        assert (await client.generate(IDS, PARAMS, "a", routed_from=2)).routed_experts is None


@pytest.mark.parametrize(
    ("routed", "first", "reason"),
    [
        (to_wire(ROUTED), None, "experts of 5 positions, but 0 were requested"),
        (to_wire(ROUTED), 1, "experts of 5 positions, but 6 were requested"),
        (to_wire(ROUTED), 3, "experts of 5 positions, but 4 were requested"),
        ({"shape": [5, 2, 4], "ids": ROUTED.reshape(-1)}, 2, "lacks or mistypes"),
        ("AAAA", 2, "lacks or mistypes"),
    ],
)
async def test_experts_of_other_positions_make_the_server_unavailable(routed, first, reason):
    async with rollout(answering(changed(routed_experts=routed))) as client:
        with pytest.raises(Unavailable, match=reason):
            await client.generate(IDS, PARAMS, "a", routed_from=first)


@pytest.mark.parametrize(
    ("shape", "reason"), [((2, 30, 2), "2 layers, 3 a token"), ((1, 30, 3), "2 layers"), ((2, 29, 3), "expert 29")]
)
async def test_experts_of_another_model_make_the_server_unavailable(shape, reason):
    app = answering(changed(routed_experts=to_wire(ROUTED)))
    transport = httpx.ASGITransport(app)
    async with RolloutClient("http://rollout", transport=transport, routing=RoutingShape(2, 30, 3)) as client:
        assert (await client.generate(IDS, PARAMS, "a", routed_from=2)).routed_experts is not None
    async with RolloutClient("http://rollout", transport=transport, routing=RoutingShape(*shape)) as client:
        with pytest.raises(Unavailable, match=reason):
            await client.generate(IDS, PARAMS, "a", routed_from=2)


@asynccontextmanager
async def failing(error):
    app = create_app("failing", limits=Limits(), tokens=None, ready=lambda: None)

    @app.post("/episodes/{episode_id}/step")
    async def step(episode_id: str) -> None:
        raise error

    async with served(app) as url, EnvClient(url) as client:
        yield client


@pytest.mark.parametrize("error", [NotFound("no episode e1", "it expired"), Conflict("over")])
async def test_problem_bodies_come_back_as_themselves(error):
    async with failing(error) as client:
        with pytest.raises(type(error)) as caught:
            await client.step("e1", "r1", "hi")
    assert problem(caught.value) == problem(error)


async def test_nobody_there_and_no_answer_in_time():
    async with RolloutClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ServiceUnreachable, match="is the service running"):
            await client.generate(IDS, PARAMS, "a")
    async with served(RolloutDouble(delay_s=60).app()) as url, RolloutClient(url) as client:
        with pytest.raises(ServiceUnreachable, match="in time"):
            await client.generate(IDS, PARAMS, "a", timeout_s=0.05)


async def test_an_answer_that_is_no_record_is_refused():
    async with served(answering({"episode_id": "e1"})) as url, EnvClient(url) as client:
        with pytest.raises(DecodeError, match="task"):
            await client.create("r", "frozen_lake", "train", 0, seed=0)


async def test_hundreds_of_requests_at_once_on_one_client():
    fake = RolloutDouble(delay_s=0.02)
    async with served(fake.app()) as url, RolloutClient(url) as client, asyncio.TaskGroup() as group:
        for i in range(200):
            group.create_task(client.generate(IDS, PARAMS, f"r{i:03d}"))
    assert fake.engine.n_requests == 200


async def test_each_of_several_demonstrations_may_have_as_many_values_as_one_alone():
    one = {"messages": [], "success": True, "tools": [{}] * (MAX_OBJECTS - 100)}
    async with EnvClient(
        "http://env", transport=httpx.ASGITransport(answering({"demonstrations": [one] * 3}))
    ) as client:
        found = await client.demonstrations("lake", "train", [3, 1, 2])
    assert [len(shown.tools) for shown in found] == [MAX_OBJECTS - 100] * 3


async def test_a_service_without_the_route_has_no_demonstrations_together():
    async with EnvClient("http://env", transport=httpx.ASGITransport(FastAPI())) as client:
        with pytest.raises(NotFound):
            await client.demonstrations("lake", "train", [0])


async def test_a_number_of_demonstrations_that_was_not_asked_for_is_refused():
    async with EnvClient("http://env", transport=httpx.ASGITransport(answering({"demonstrations": []}))) as client:
        with pytest.raises(DecodeError, match="0 demonstrations of 1"):
            await client.demonstrations("lake", "train", [0])


@pytest.mark.parametrize(("said", "closed"), [({}, False), ({"closed": True}, True), ({"closed": "yes"}, False)])
async def test_only_a_service_that_says_so_forgets_an_episode_by_itself(said, closed):
    body = {"messages": [], "reward": 1.0, "terminated": True, "truncated": False, "info": {}, **said}
    async with EnvClient("http://env", transport=httpx.ASGITransport(answering(body))) as client:
        assert (await client.step("e", "1", "Up")).closed is closed
