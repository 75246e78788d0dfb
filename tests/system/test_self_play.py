"""A real run of a game that the policy plays against itself: killed in mid-game, proven, replayed bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.run import archive
from shared.run.folder import RunFolder
from shared.seats import by_seat
from shared.types import Group, Trajectory
from tests.support.stack import training
from volley.layout import PROJECT
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 4
SETTINGS = (
    f"trainer.max_steps={STEPS}",
    "algorithm.name=rae",
    "orchestrator.max_turns=20",
    "orchestrator.lease_s=5",
    "orchestrator.generation.partial_rollouts=true",
)


DUEL = """
class Duel:
    splits = {"train": 400, "eval": 50}
    seats = ["first", "second"]

    def __init__(self, **unused):  # small.yaml has the keys of another environment
        self.said = []

    def reset(self, split, index, seed):
        return f"{split} {index}"

    def step(self, text):
        self.said.append(text)
        if len(self.said) < 4:
            return f"answer {len(self.said)}", 0.0, False, False, {"seat": self.seats[len(self.said) % 2]}
        won = 1.0 if len(self.said[0] + self.said[2]) > len(self.said[1] + self.said[3]) else -1.0
        return "", 0.0, True, False, {"rewards": {"first": won, "second": -won}}

    def demonstration(self, split, index):
        return [{"role": "user", "content": self.reset(split, index, 0)}, {"role": "assistant", "content": "a"}], False
"""


def test_a_game_is_trained_proven_and_replayed_though_its_orchestrator_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "duel.py"
    file.write_text(DUEL, encoding="utf-8")
    unconfined = f"services.env.unsandboxed=[{file.stem}]"
    with training(tmp_path, f"data.env={file}", unconfined, *SETTINGS) as run:
        run.wait_for(rf"^step +1/{STEPS}", 400)
        run.kill("orchestrator")
        assert run.wait(600) == 0, run.text()
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    games = [one for group in _trained(run.folder) for one in group.trajectories]
    assert len(games) == STEPS * 2 * 4
    for one in games:
        _check(one)
    lines = [orjson.loads(line) for line in run.folder.metrics.read_bytes().splitlines()]
    assert all(line["reward/first"] == -line["reward/second"] for line in lines if "reward/second" in line)
    replayed = _volley("replay", run.folder.path, "--trust", "--from-step", "2", "--json")
    assert replayed["ok"], replayed
    assert replayed["steps"] >= 2


def _check(one: Trajectory) -> None:
    """The winner has 1 and the loser -1, and each has moved twice."""
    seats = by_seat(one)
    assert one.seats == ("first", "second")
    assert sorted(seat.reward for seat in seats.values()) == [-1.0, 1.0]
    assert one.reward_components == {"reward": 0.0, **{name: seat.reward for name, seat in seats.items()}}
    assert [turn.role for turn in seats["second"].turns].count("assistant") == 2


def _trained(folder: RunFolder) -> list[Group]:
    versions = archive.versions(folder.archive)
    return [Group.decode(data) for version in versions for data in archive.read(folder.archive, folder.name, version)]


def _volley(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "volley", *map(str, arguments)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, timeout=300, check=False)
    assert done.stdout, done.stderr.decode()
    return orjson.loads(done.stdout)
