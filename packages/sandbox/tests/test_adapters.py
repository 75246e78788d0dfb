"""Environments of other packages, played by their adapters in sandboxes: beside the package itself, from PyPI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.support.submitted import decided, opened
from volley_python.installing.uv import find_uv
from volley_sandbox.sandbox.packages.dependencies import PYPI

_UPSTREAM = """
import json, random, sys
import textarena
game, players, seed, moves = json.loads(sys.stdin.read())
random.seed(seed)
env = textarena.make(game)
env.reset(num_players=players, seed=seed)
for move in moves:
    done, _ = env.step(action=move)
print(json.dumps([done, env.close()[0] if done else None]))
"""


async def test_an_adapter_that_is_not_there_is_named(open_client: OpenClient) -> None:
    async with open_client() as client:
        answer = await client.post("/environments", json={"name": "a", "adapter": "../sums"})
        assert (answer.status_code, "there is no adapter" in answer.json()["detail"]) == (404, True)
        assert "textarena" in answer.json()["hint"]
        answer = await client.post("/environments", json={"name": "a", "adapter": "textarena", "source": "x"})
        assert (answer.status_code, answer.json()["detail"]) == (422, "unknown field source")


@pytest.mark.long
async def test_games_of_textarena_score_as_the_package_does(open_client: OpenClient, tmp_path: Path) -> None:
    """The rewards of a Tower of Hanoi and of forfeits are the package's own for these moves; a number that is to be
    guessed is the same whenever its task is played; an opponent's moves are legal.
    """
    games = {"hanoi": "TowerOfHanoi-v0", "number": "GuessTheNumber-v0", "tac": "TicTacToe-v0"}
    async with open_client(limits=Limits(), package_index=PYPI, deadline_s=30.0, unsandboxed=[*games]) as client:
        for name, game in games.items():
            await _submitted(client, name, game=game)
        upstream = _installed(tmp_path / "upstream", "textarena==0.7.4")
        solved = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
        for moves in (solved, [*solved[:3], "[A B]", "[A B]"], ["nonsense", "nonsense"]):
            rewards = await _rewards(client, "hanoi", moves)
            done, theirs = _scored(upstream, "TowerOfHanoi-v0", 1, moves)
            assert (rewards[-1], done) == ((theirs or {"0": 0.0})["0"], theirs is not None), moves
        halves = [await _rewards(client, "number", [f"[{n}]" for n in half]) for half in (range(1, 11), range(11, 21))]
        assert sorted(rewards[-1] == 1.0 for rewards in halves) == [False, True]
        assert await _rewards(client, "tac", ["[4]"]) == [0.0]
        lost = await _rewards(client, "tac", ["nonsense", "nonsense"])
        assert lost[-1] == _scored(upstream, "TicTacToe-v0", 2, ["nonsense", "nonsense"])[1]["0"] == -1


@pytest.mark.long
async def test_the_model_plays_all_seats_of_a_game_of_textarena(open_client: OpenClient, tmp_path: Path) -> None:
    """Rewards of both seats are the package's own for these moves. In an evaluation another player has one seat."""
    async with open_client(
        limits=Limits(), package_index=PYPI, deadline_s=30.0, unsandboxed=["tac", "fixed"]
    ) as client:
        await _submitted(client, "tac", game="TicTacToe-v0", seat="all", instruction="Win.")
        await _submitted(client, "fixed", game="TicTacToe-v0", opponent=["[6]", "[7]", "[8]"])
        upstream = _installed(tmp_path / "upstream", "textarena==0.7.4")
        for moves in (["[0]", "[3]", "[1]", "[4]", "[2]"], ["[0]", "no", "no"], ["no", "[4]", "[0]", "no", "no"]):
            found = await _played(client, opened("tac", "/".join(moves)), moves)
            rewards = {
                f"player {player}": won for player, won in _scored(upstream, "TicTacToe-v0", 2, moves)[1].items()
            }
            assert found[-1]["info"]["rewards"] == rewards, moves
            assert {one["info"].get("seat") for one in found} <= {"player 0", "player 1", None}
            first = next(one for one in found if one["info"].get("seat") == "player 1")
            assert first["messages"][0] == {"role": "system", "content": "Win."}
            assert "You are Player 1" in first["messages"][1]["content"]
        evaluation = {**opened("tac", "e", 1), "split": "eval"}
        assert (await client.post("/episodes", json=evaluation)).json()["info"]["seats"] == ["player 1"]
        assert await _rewards(client, "fixed", ["[0]", "[1]", "[2]"]) == [0.0, 0.0, 1.0]


async def _submitted(client: httpx.AsyncClient, name: str, **config: Any) -> None:
    """Submit a game, and wait until it is active."""
    body = {"name": name, "adapter": "textarena", "config": {"train_tasks": 50, "eval_tasks": 20, **config}}
    assert (await client.post("/environments", json=body)).status_code == 202
    row = await decided(client, name)
    assert row["state"] == "active", row["report"]


async def _played(
    client: httpx.AsyncClient, request: Mapping[str, Any], moves: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Answers of one episode, a step a move until it is over."""
    made = await client.post("/episodes", json=request)
    assert made.status_code == 201, made.text
    found: list[Mapping[str, Any]] = []
    for number, move in enumerate(moves):
        body = {"request_id": str(number), "message": {"role": "assistant", "content": move}}
        found.append((await client.post(f"/episodes/{made.json()['episode_id']}/step", json=body)).json())
        if found[-1]["terminated"]:
            break
    return found


async def _rewards(client: httpx.AsyncClient, env: str, moves: Sequence[str]) -> list[float]:
    """Of one episode, a step a move until it is over."""
    return [one["reward"] for one in await _played(client, opened(env, "/".join([env, *moves])), moves)]


def _installed(folder: Path, *packages: str) -> Path:
    command = [str(find_uv()), "pip", "install", "--quiet", "--only-binary", ":all:", "--python", sys.executable]
    subprocess.run([*command, "--target", str(folder), *packages], check=True, timeout=300)
    return folder


def _scored(packages: Path, game: str, players: int, moves: Sequence[str]) -> tuple[bool, Mapping[str, Any] | None]:
    """What the package itself says of these moves: whether the game is over, and the rewards."""
    said = subprocess.run(
        [sys.executable, "-c", _UPSTREAM],
        input=json.dumps([game, players, 7, list(moves)]),
        env={"PYTHONPATH": str(packages), "HOME": str(packages)},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    done, rewards = json.loads(said.stdout.splitlines()[-1])
    return done, rewards
