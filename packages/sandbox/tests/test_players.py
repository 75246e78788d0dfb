"""Others who play a seat: what they are asked, what the policy sees, and what is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import orjson
import pytest

from shared import config
from shared.errors import ConfigError
from shared.process.ports import free_port
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import decided, opened, submit
from volley_sandbox.submissions import templates

NIM = templates.files()["self_play"].read_text(encoding="utf-8")


class Mover(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers `moves` in their order, then "1". `asked` are its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.moves, self.asked = list[str](), list[Mapping[str, Any]]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Mover

    def do_POST(self) -> None:
        self.server.asked.append(orjson.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": self.server.moves.pop(0) if self.server.moves else "1"}
        body = orjson.dumps({"choices": [{"message": message, "finish_reason": "length"}]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def mover() -> Iterator[Mover]:
    with Mover() as server:
        yield server
        server.shutdown()


def players(mover: Mover, seat: str, **more: Any) -> dict[str, Any]:
    return {"servers": {"old": {"url": mover.url}}, "games": {"nim": {seat: {"server": "old", **more}}}}


async def began(client: httpx.AsyncClient, request_id: str, **more: Any) -> Mapping[str, Any]:
    answer = await client.post("/episodes", json={**opened("nim", request_id), **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def moved(client: httpx.AsyncClient, episode: Mapping[str, Any], number: int, text: str) -> Mapping[str, Any]:
    body = {"request_id": str(number), "message": {"role": "assistant", "content": text}}
    answer = await client.post(f"/episodes/{episode['episode_id']}/step", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ready(client: httpx.AsyncClient) -> None:
    await submit(client, NIM, name="nim", weight=0)
    assert (await decided(client, "nim"))["state"] == "active"


async def test_a_player_answers_for_its_seat_and_only_the_policy_is_rewarded(
    open_client: OpenClient, mover: Mover
) -> None:
    section = players(mover, "second", model="m", request={"temperature": 0.5, "max_tokens": None})
    async with open_client(limits=Limits(), unsandboxed=["nim"], players=section) as client:
        await ready(client)
        assert not mover.asked, "the validation asked a player"
        mover.moves = ["1", "2"]
        episode = await began(client, "1", seed=7)
        assert (episode["info"]["seats"], episode["info"]["seat"]) == (["first"], "first")
        found = [await moved(client, episode, n, text) for n, text in enumerate(["3", "2", "1"])]
    assert [one["info"].get("seat") for one in found] == ["first", "first", None]
    assert [message["content"] for one in found for message in one["messages"]] == ["5 of 9 left", "1 of 9 left"]
    assert (found[-1]["info"]["rewards"], found[-1]["reward"]) == ({"first": 1.0}, 0.0)
    first, second = mover.asked
    assert first == {
        "model": "m",
        "messages": [{"role": "user", "content": "6 of 9 left"}],
        "temperature": 0.5,
        "seed": first["seed"],
    }
    assert [message["content"] for message in second["messages"]] == ["6 of 9 left", "1", "3 of 9 left"]


async def test_an_episode_that_is_played_again_meets_the_same_moves(open_client: OpenClient, mover: Mover) -> None:
    """An episode of the same seed plays the stored answers; one of another seed asks the player again."""
    async with open_client(limits=Limits(), unsandboxed=["nim"], players=players(mover, "first")) as client:
        await ready(client)
        mover.moves = ["3", "2"]
        seen = [await began(client, str(n), seed=seed) for n, seed in enumerate([5, 5, 6])]
        assert [one["messages"][0]["content"] for one in seen] == ["6 of 9 left", "6 of 9 left", "7 of 9 left"]
        assert {one["info"]["seat"] for one in seen} == {"second"}
        mover.moves = ["nothing"]
        assert (await moved(client, seen[0], 0, "1"))["info"]["rewards"] == {"second": 1.0}
    assert len({one["seed"] for one in mover.asked[:2]}) == 2


async def test_a_game_that_its_player_ends_at_once_begins_again_a_few_times(
    open_client: OpenClient, mover: Mover
) -> None:
    async with open_client(limits=Limits(), unsandboxed=["nim"], players=players(mover, "first")) as client:
        await ready(client)
        mover.moves = ["x", "y", "2"]
        assert (await began(client, "1"))["messages"][0]["content"] == "7 of 9 left"
        mover.moves = ["x"] * 8
        failed = await client.post("/episodes", json=opened("nim", "2", 1))
        assert (failed.status_code, "with its first move" in failed.json()["detail"]) == (500, True)


async def test_a_player_that_does_not_answer_is_named(open_client: OpenClient) -> None:
    nobody = {"servers": {"old": {"url": f"http://127.0.0.1:{free_port()}/v1", "timeout_s": 2}}}
    games = {"nim": {"first": {"server": "old"}}}
    async with open_client(limits=Limits(), unsandboxed=["nim"], players={**nobody, "games": games}) as client:
        await ready(client)
        failed = await client.post("/episodes", json=opened("nim", "1"))
    assert failed.status_code == 503
    assert re.match("the player's server old .*: nothing listens there", failed.json()["detail"])


async def test_a_share_of_the_tasks_is_played_by_others(open_client: OpenClient, mover: Mover) -> None:
    section = players(mover, "first", share=0.25)
    section["games"]["nim"]["second"] = {"server": "old", "share": 0.25}
    async with open_client(limits=Limits(), unsandboxed=["nim"], players=section) as client:
        await ready(client)

        async def seats(index: int, seed: int) -> list[str]:
            episode = await began(client, f"{index} {seed}", index=index, seed=seed)
            await client.delete(f"/episodes/{episode['episode_id']}")
            return episode["info"]["seats"]

        found = [await seats(index, 1) for index in range(40)]
        assert [await seats(index, 2) for index in range(10)] == found[:10], "of one group"
    counts = [sum(one == wanted for one in found) for wanted in (["first"], ["second"], ["first", "second"])]
    assert all(low <= n <= low + 17 for n, low in zip(counts, (3, 3, 12), strict=True)), counts


def test_players_are_checked_and_findings_name_games_that_are_not_played() -> None:
    def loaded(**section: Any) -> Any:
        given = {"model": {"path": "m"}, "data": {"env": "frozen_lake"}, "services": {"env": {"players": section}}}
        return config.validate(given).config

    servers = {"old": {"url": "http://127.0.0.1:1/v1"}}
    for games, detail in (
        ({"nim": {"first": {"server": "new"}}}, "is none of"),
        ({"nim": {seat: {"server": "old", "share": 0.6} for seat in ("a", "b")}}, "add up to 1.2"),
        ({"nim": {"a": {"server": "old", "request": {"seed": 1}}}}, "cannot set seed"),
    ):
        with pytest.raises(ConfigError, match=detail):
            loaded(servers=servers, games=games)
    made = loaded(servers=servers, games={"nim": {"first": {"server": "old"}}})
    assert [*made.services.env.players.findings(made)] == [
        "services.env.players.games.nim has no effect: the run plays frozen_lake"
    ]
