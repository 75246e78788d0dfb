"""Snapshots of submitted environments: episodes that go on from them in another process, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import ADDER, decided, opened, submit

COUNTER = """
class Counter:
    splits = {"train": 40, "eval": 20}

    def reset(self, split, index, seed):
        self.said = []
        return f"{split} {index}"

    def step(self, text):
        self.said.append(text)
        return " ".join(self.said) or "-", 0.5, len(self.said) >= 6, False, {}

    def snapshot(self):
        return {"said": self.said}

    def restore(self, snapshot):
        self.said = snapshot["said"]
"""


async def created(client: httpx.AsyncClient, env: str, number: int, **more: Any) -> httpx.Response:
    return await client.post("/episodes", json={**opened(env, str(number)), **more})


async def said(client: httpx.AsyncClient, episode: httpx.Response, text: str) -> dict[str, Any]:
    body = {"request_id": text, "message": {"role": "assistant", "content": text}}
    answer = await client.post(f"/episodes/{episode.json()['episode_id']}/step", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_episode_goes_on_from_the_snapshot_of_another(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        await submit(client, COUNTER, name="counter")
        row = await decided(client, "counter")
        assert "the second time from snapshots" in next(
            one["detail"] for one in row["report"]["checks"] if one["name"] == "determinism"
        )
        first = await created(client, "counter", 1)
        assert first.json()["info"]["restorable"]
        snapshots = [(await said(client, first, text))["info"]["snapshot"] for text in "ab"]
        assert snapshots == [{"said": ["a"]}, {"said": ["a", "b"]}]
        for number, snapshot in enumerate(snapshots, start=2):
            again = await created(client, "counter", number, snapshot=snapshot)
            assert (await said(client, again, "c"))["messages"][0]["content"] == " ".join([*snapshot["said"], "c"])
        other = await created(client, "counter", 2, snapshot=snapshots[1])
        assert other.status_code == 409, "another snapshot is another request"
        assert (await created(client, "counter", 9, snapshot={"said": 7})).status_code == 201
        assert (await created(client, "counter", 10, snapshot={})).status_code == 500


async def test_an_environment_without_snapshots_refuses_them(open_client: OpenClient) -> None:
    async with open_client(limits=Limits()) as client:
        await submit(client, ADDER, name="adder")
        await decided(client, "adder")
        assert "restorable" not in (await created(client, "adder", 1)).json()["info"]
        for env in ("adder", "frozen_lake"):
            refused = await created(client, env, 2, snapshot={"a": 1})
            assert refused.status_code == 422, refused.text
            assert "cannot be restored" in refused.json()["detail"]
        assert (await created(client, "adder", 2)).status_code == 201


@pytest.mark.parametrize(
    ("source", "check", "detail"),
    [
        (COUNTER.replace('snapshot["said"]', "[]"), "determinism", "answered step 1 differently"),
        (COUNTER.replace('{"said": self.said}', "object()"), "episodes", "what snapshot returned"),
        (COUNTER.replace('["said"]', '["else"]'), "episodes", "KeyError"),
    ],
)
async def test_snapshots_that_do_not_work_are_rejected(
    open_client: OpenClient, source: str, check: str, detail: str
) -> None:
    async with open_client(limits=Limits()) as client:
        await submit(client, source, name="bad")
        row = await decided(client, "bad")
        failed = [one for one in row["report"]["checks"] if not one["ok"]]
        assert (row["state"], [one["name"] for one in failed]) == ("rejected", [check])
        assert detail in failed[0]["detail"], failed
