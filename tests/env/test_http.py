from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.env.environments.kinds import kinds
from shared import codec
from shared.services_schema import Limits
from shared.web.access import Role, token_for
from tests.env.conftest import OpenClient
from tests.support.tokens import write_tokens

LAKE: dict[str, Any] = {"env": "frozen_lake", "split": "eval", "index": 0}


async def test_an_episode_from_listing_to_deletion(open_client: OpenClient) -> None:
    """Plays a demonstration through HTTP and gets the reward it promises."""
    async with open_client() as client:
        names = [e["name"] for e in (await client.get("/environments")).json()["environments"]]
        assert names == list(kinds())
        assert (await client.get("/frozen_lake/splits")).json() == ["train", "eval"]
        task = (await client.post("/frozen_lake/task", json={"split": "eval", "index": 0})).json()["task"]
        shown = (await client.post("/frozen_lake/demonstration", json={"split": "eval", "index": 0})).json()["messages"]
        made = await client.post("/episodes", json={**LAKE, "request_id": "r", "seed": 3})
        assert made.status_code == 201
        episode = made.json()
        assert episode["task"] == task
        assert episode["messages"] == shown[:1]
        assert episode["tools"] == []
        assert episode["info"] == {**LAKE, "seed": 3}
        assert episode["ttl_s"] == 60
        answer: dict[str, Any] = {}
        for n, message in enumerate(m for m in shown if m["role"] == "assistant"):
            answer = (
                await client.post(
                    f"/episodes/{episode['episode_id']}/step", json={"request_id": f"{n}", "message": message}
                )
            ).json()
        assert (answer["reward"], answer["terminated"], answer["truncated"]) == (1.0, True, False)
        assert answer["info"]["success"] is answer["closed"] is True
        assert answer["info"]["reward_components"] == {"success": 1.0}
        for _ in range(2):
            assert (await client.delete(f"/episodes/{episode['episode_id']}")).status_code == 204


async def test_demonstrations_come_together_as_they_come_alone(open_client: OpenClient) -> None:
    async with open_client() as client:

        async def shown(indices: list[int]) -> Any:
            return await client.post("/frozen_lake/demonstrations", json={"split": "train", "indices": indices})

        alone = [
            (await client.post("/frozen_lake/demonstration", json={"split": "train", "index": index})).json()
            for index in (4, 1)
        ]
        assert (await shown([4, 1])).json() == {"demonstrations": alone}
        assert [(await shown(indices)).status_code for indices in ([], [0] * 33, [0, -1])] == [422, 422, 404]


async def test_tasks_are_listed_by_get_and_by_post(open_client: OpenClient) -> None:
    async with open_client() as client:
        for name, body in (("num_tasks", {"split": "eval"}), ("task", {"split": "train", "index": 5})):
            got, posted = (
                await client.get(f"/sokoban/{name}", params=body),
                await client.post(f"/sokoban/{name}", json=body),
            )
            assert got.status_code == posted.status_code == 200
            assert got.json() == posted.json()


async def test_msgpack_gives_the_same_answers(open_client: OpenClient) -> None:
    async with open_client() as client:
        body = {**LAKE, "request_id": "r"}
        packed = await client.post("/episodes", content=codec.pack(body), headers={"Content-Type": codec.MEDIA_TYPE})
        assert packed.headers["content-type"] == codec.MEDIA_TYPE
        assert codec.unpack(packed.content) == (await client.post("/episodes", json=body)).json()


async def test_tool_calls_of_the_openai_sdk_are_played(open_client: OpenClient, gsm8k_files: dict[str, Path]) -> None:
    async with open_client(env="gsm8k", configs={"gsm8k": {**gsm8k_files, "tool": "calculator"}}) as client:
        episode = (
            await client.post("/episodes", json={"request_id": "r", "env": "gsm8k", "split": "eval", "index": 0})
        ).json()
        assert episode["tools"][0]["function"]["name"] == "calculator"
        call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2-5"}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
        step = await client.post(
            f"/episodes/{episode['episode_id']}/step", json={"request_id": "1", "message": message}
        )
        assert step.json()["messages"] == [{"role": "tool", "content": "-3"}]
        many = {"request_id": "2", "message": {**message, "tool_calls": [call] * 65}}
        step = await client.post(f"/episodes/{episode['episode_id']}/step", json=many)
        assert (step.status_code, {message["role"] for message in step.json()["messages"]}) == (200, {"tool"})


async def test_a_variant_is_registered_and_played(open_client: OpenClient) -> None:
    async with open_client() as client:
        body = {"name": "lake6", "base": "frozen_lake", "config": {"size": 6, "talk": "bare", "max_actions": 20}}
        assert [(await client.post("/environments", json=body)).status_code for _ in range(2)] == [201, 200]
        episode = (await client.post("/episodes", json={**LAKE, "env": "lake6", "request_id": "r"})).json()
        assert len(episode["messages"][0]["content"].split("\n")) == 6


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("GET", "/maze/splits", None, 404, "'maze'"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "env": "maze"}, 404, "'maze'"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "split": "test"}, 404, "'test'"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "index": 256}, 404, "256"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "index": -1}, 404, "-1"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "index": 10**30}, 422, "index"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "index": "one"}, 422, "index"),
        ("POST", "/episodes", {**LAKE}, 422, "request_id is missing"),
        ("POST", "/episodes", {**LAKE, "request_id": ""}, 422, "request_id"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "sed": 1}, 422, "unknown field sed"),
        ("POST", "/episodes", {**LAKE, "request_id": "r", "seed": -1}, 422, "seed"),
        ("POST", "/episodes", b"{", 400, "not valid JSON"),
        ("POST", "/episodes", b"[]", 400, "object"),
        ("POST", "/episodes", b'{"request_id": "' + b"x" * 20_000 + b'"}', 413, "10000 bytes"),
        ("POST", "/episodes/none/step", {"request_id": "1", "message": {"content": "Up"}}, 404, "none"),
        ("POST", "/environments", {"name": "a", "base": "maze"}, 404, "'maze'"),
        ("POST", "/environments", {"name": "a", "base": "gsm8k", "config": {"train": "/etc/passwd"}}, 403, "train"),
        ("GET", "/frozen_lake/num_tasks", None, 422, "split is missing"),
        ("GET", "/frozen_lake/nothing", None, 404, "there is no '/frozen_lake/nothing' here"),
        ("POST", "/gsm8k/task", {"split": "train", "index": 0}, 422, "gsm8k has no data"),
    ],
)
async def test_bad_requests_get_a_problem_body(
    open_client: OpenClient, method: str, path: str, body: Any, status: int, detail: str
) -> None:
    async with open_client() as client:
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await client.request(method, path, **({} if body is None else content))
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json().keys() >= {"type", "title", "status", "detail"}
        assert detail in answer.json()["detail"]


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ({"role": "assistant"}, "no content"),
        ({"role": "assistant", "content": None}, "no content"),
        ({"role": "assistant", "content": 5}, "message.content"),
        ({"role": "user", "content": "Up"}, "message.role"),
        ({"content": "Up", "tool_calls": "x"}, "message.tool_calls"),
        ({"content": "Up", "tool_calls": [b"x"]}, "message.tool_calls"),
        ({"content": "Up", "tool_calls": [np.zeros(2, np.int32)]}, "message.tool_calls"),
        ({"content": "Up", "tool_calls": [{"a": {b"b": 1}}]}, "message.tool_calls"),
        ("Up", "message"),
        (None, "message"),
    ],
)
async def test_bad_messages_are_refused_and_cost_nothing(open_client: OpenClient, message: Any, detail: str) -> None:
    async with open_client() as client:
        path = (
            f"/episodes/{(await client.post('/episodes', json={**LAKE, 'request_id': 'r'})).json()['episode_id']}/step"
        )
        packed = codec.pack({"request_id": "1", "message": message})
        refused = await client.post(path, content=packed, headers={"Content-Type": codec.MEDIA_TYPE})
        assert refused.status_code == 422
        assert detail in refused.json()["detail"]
        fine = await client.post(path, json={"request_id": "1", "message": {"content": ""}})
        assert fine.json()["info"]["reward_components"] == {"format": -0.1}


async def test_a_message_of_a_megabyte_is_too_long(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        path = (
            f"/episodes/{(await client.post('/episodes', json={**LAKE, 'request_id': 'r'})).json()['episode_id']}/step"
        )
        answer = await client.post(path, json={"request_id": "1", "message": {"content": "x" * (2**20 + 1)}})
        assert answer.status_code == 422
        assert "message.content" in answer.json()["detail"]


async def test_a_step_after_the_end_is_a_conflict(open_client: OpenClient) -> None:
    async with open_client(configs={"frozen_lake": {"max_turns": 1, "max_actions_per_turn": 10}}) as client:
        path = (
            f"/episodes/{(await client.post('/episodes', json={**LAKE, 'request_id': 'r'})).json()['episode_id']}/step"
        )
        assert (await client.post(path, json={"request_id": "1", "message": {"content": "?"}})).json()["truncated"]
        late = await client.post(path, json={"request_id": "2", "message": {"content": "?"}})
        assert late.status_code == 409
        assert "is over" in late.json()["detail"]


async def test_a_full_service_says_when_to_come_back(open_client: OpenClient) -> None:
    async with open_client(max_episodes=1) as client:
        await client.post("/episodes", json={**LAKE, "request_id": "a"})
        full = await client.post("/episodes", json={**LAKE, "request_id": "b"})
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1


async def test_tokens_guard_all_but_health(open_client: OpenClient, tmp_path: Path) -> None:
    token_files = write_tokens(tmp_path)
    async with open_client(token_files=token_files) as client:
        assert [
            (await client.get(path)).status_code for path in ("/environments", "/metrics", "/health", "/ready")
        ] == [401, 401, 200, 200]
        viewer = {"Authorization": f"Bearer {token_for(token_files, Role.VIEWER)}"}
        assert (await client.get("/environments", headers=viewer)).status_code == 200
        assert (await client.post("/episodes", json={**LAKE, "request_id": "r"}, headers=viewer)).status_code == 403


async def test_metrics_and_openapi_describe_the_service(open_client: OpenClient) -> None:
    async with open_client() as client:
        await client.post("/episodes", json={**LAKE, "request_id": "r"})
        metrics = (await client.get("/metrics")).text
        assert "volley_env_episodes 1.0" in metrics
        assert 'volley_env_call_seconds_count{call="reset",env="frozen_lake"}' in metrics
        paths = (await client.get("/openapi.json")).json()["paths"]
        step = paths["/episodes/{episode_id}/step"]["post"]
        assert step["requestBody"]["content"]["application/json"]["schema"]["required"] == ["request_id", "message"]
        assert {
            "/environments",
            "/{env}/splits",
            "/{env}/num_tasks",
            "/{env}/task",
            "/{env}/demonstration",
            "/episodes",
        } <= set(paths)
