"""Environments with seats: the template, what authors get wrong, and another service's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from shared.clients.env import EnvClient
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import decided, opened, submit
from volley_sandbox.submissions import templates

NIM = templates.files()["self_play"].read_text(encoding="utf-8")
GAME = """
class Game:
    splits = {"train": 40, "eval": 20}
    seats = ["a", "b"]

    def reset(self, split, index, seed):
        self.turn = 0
        return f"{split} {index}"

    def step(self, text):
        self.turn += 1
        if self.turn < 3:
            return "go on", 0.0, False, False, {"seat": self.seats[self.turn % 2]}
        return "", 0.0, True, False, {"rewards": {"a": 1, "b": -1}}
"""


async def step(client: httpx.AsyncClient, episode: Mapping[str, Any], number: int, text: str) -> Mapping[str, Any]:
    body = {"request_id": str(number), "message": {"role": "assistant", "content": text}}
    answer = await client.post(f"/episodes/{episode['episode_id']}/step", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_template_is_active_and_plays_both_seats(open_client: OpenClient) -> None:
    async with open_client(limits=Limits(), unsandboxed=["nim"]) as client:
        assert (await submit(client, NIM, name="nim")).status_code == 202
        row = await decided(client, "nim")
        assert row["state"] == "active", row
        episode = (await client.post("/episodes", json=opened("nim", "1"))).json()
        assert (episode["info"]["seats"], episode["info"]["seat"]) == (["first", "second"], "first")
        assert episode["messages"] == [{"role": "user", "content": "9 of 9 left"}]
        moves, found = ["3", "2", "1", "3"], list[Mapping[str, Any]]()
        for number, move in enumerate(moves):
            found.append(await step(client, episode, number, move))
        assert [one["info"].get("seat") for one in found] == ["second", "first", "second", None]
        assert [message["content"] for one in found for message in one["messages"]] == [
            f"{left} of 9 left" for left in (6, 4, 3)
        ]
        assert found[-1]["info"]["rewards"] == {"first": -1.0, "second": 1.0}
        wrong = (await client.post("/episodes", json=opened("nim", "2"))).json()
        lost = await step(client, wrong, 0, "4")
        assert (lost["info"]["rewards"], lost["info"]["error"]) == ({"first": -1.0, "second": 1.0}, "invalid_action")
        assert (await step(client, await _created(client, "3"), 0, "x"))["info"]["error"] == "format"


async def _created(client: httpx.AsyncClient, request_id: str) -> Mapping[str, Any]:
    return (await client.post("/episodes", json=opened("nim", request_id))).json()


@pytest.mark.parametrize("opponent", ["random", "perfect"])
async def test_the_templates_own_opponent_plays_the_other_seat(open_client: OpenClient, opponent: str) -> None:
    config = {"opponent": opponent}
    async with open_client(limits=Limits(), unsandboxed=["nim"]) as client:
        body = {"name": "nim", "source": NIM, "config": config}
        assert (await client.post("/environments", json=body)).status_code == 202
        assert (await decided(client, "nim"))["state"] == "active"
        for index, seat in enumerate(["first", "second"]):
            episode = (await client.post("/episodes", json=opened("nim", f"{index}", index))).json()
            assert (episode["info"]["seats"], episode["info"]["seat"]) == ([seat], seat)
            number, answer = 0, {"terminated": False}
            while not answer["terminated"]:
                answer, number = await step(client, episode, number, "1"), number + 1
                assert answer["info"].get("seat", seat) == seat
            assert answer["info"]["rewards"].keys() == {seat}
            if opponent == "perfect":  # who takes one each time loses against it from nine
                assert answer["info"]["rewards"][seat] == -1.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('{"seat": self.seats[self.turn % 2]}', "{}"), "info['seat'] that step returned is None"),
        (('{"seat": self.seats[self.turn % 2]}', '{"seat": "A"}'), "one of a, b"),
        (('{"seat": self', '{"rewards": {}, "seat": self'), "belongs to the step that ends the episode"),
        (('{"rewards": {"a": 1, "b": -1}}', "{}"), "a number for each seat: a, b"),
        (('"b": -1', '"c": -1'), "a number for each seat: a, b"),
        (('{"a": 1, "b": -1}', '{"a": 1}'), "a number for each seat: a, b"),
        (('"b": -1', '"b": 1e9'), "info['rewards']['b']"),
        (('["a", "b"]', '["a", "a"]'), "different names"),
        (('["a", "b"]', '["a", ""]'), "is not the name of a seat"),
        (('["a", "b"]', '["a", 3]'), "is not the name of a seat"),
        (('return f"{split} {index}"', 'return f"{split} {index}", {"seat": "z"}'), "that reset returned is 'z'"),
    ],
)
async def test_authors_are_told_what_is_wrong(open_client: OpenClient, change: tuple[str, str], why: str) -> None:
    source = GAME.replace(*change)
    assert source != GAME
    async with open_client(limits=Limits(), unsandboxed=["game"]) as client:
        assert (await submit(client, source, name="game")).status_code == 202
        row = await decided(client, "game")
    assert row["state"] == "rejected"
    assert why in str(row["report"])


async def test_clients_read_seats_and_rewards(open_client: OpenClient) -> None:
    async with open_client(limits=Limits(), unsandboxed=["game"]) as client:
        assert (await submit(client, GAME, name="game")).status_code == 202
        assert (await decided(client, "game"))["state"] == "active"
        reader = EnvClient("http://env", transport=client._transport)
        async with reader:
            opening = await reader.create("1", "game", "train", 0, seed=0)
            assert (opening.seats, opening.seat) == (["a", "b"], "a")
            replies = [await reader.step(opening.episode_id, str(n), "x") for n in range(3)]
    assert [one.seat for one in replies] == ["b", "a", None]
    assert [one.rewards for one in replies] == [None, None, {"a": 1.0, "b": -1.0}]
