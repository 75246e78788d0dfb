"""No legal configuration makes a call into a game long: the slowest of a seeded search takes a bounded number of
function calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from cProfile import Profile
from typing import Any

import pytest
from pydantic import ValidationError

from services.env.environments.games import layouts
from services.env.environments.games.frozen_lake import (
    FrozenLakeConfig,
    distances,
    frozen_lake,
    shortest_path,
    way,
)
from services.env.environments.kinds import kinds
from services.env.episode_types import Environment
from shared.errors import InputError, RateLimited
from volley_environments.games.sokoban import SokobanConfig

N_CONFIGS = 15
MAX_CALLS = 1_500_000
"""Python and C functions: under a second when nobody counts them. The most that was found is 954,213, of 64 slippery
lakes of 16 by 16.
"""

WORST: list[tuple[str, dict[str, Any]]] = [
    (
        "sokoban",
        {"dim_room": (12, 12), "num_boxes": 4, "max_turns": 100, "max_actions": 1000, "demo_actions_per_turn": 1},
    ),
    (
        "frozen_lake",
        {"size": 16, "frozen_probability": 0.65, "is_slippery": True, "max_turns": 100, "max_actions": 1000},
    ),
    ("blocksworld", {"num_blocks": 5, "min_solution": 8, "eval_tasks": 10_000, "max_turns": 100, "max_actions": 1000}),
    ("tetris", {"dim_x": 5, "dim_y": 8, "box_type": 1, "max_turns": 100, "max_actions": 1000}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("sokoban", {"dim_room": (12, 12), "num_boxes": 4, "min_solution": 100, "max_turns": 100, "max_actions": 1000}),
    ("sokoban", {"dim_room": (5, 5), "eval_tasks": 10_000, "distinct_train": True, "train_tasks": 10_000}),
    ("frozen_lake", {"size": 16, "frozen_probability": 0.65, "max_actions": 30}),
    ("frozen_lake", {"size": 3, "frozen_probability": 1, "eval_tasks": 10_000}),
    ("frozen_lake", {"size": 4, "eval_tasks": 10_000, "distinct_train": True, "train_tasks": 10_000}),
    ("blocksworld", {"num_blocks": 6, "min_solution": 10, "eval_tasks": 10_000}),
    ("blocksworld", {"num_blocks": 2, "min_solution": 2, "eval_tasks": 10_000}),
    ("tetris", {"dim_x": 5, "dim_y": 8, "box_type": 3, "n_pieces": 20, "max_actions": 12}),
    ("tetris", {"dim_x": 3, "dim_y": 3, "n_pieces": 2, "eval_tasks": 10_000}),
]


def n_calls(work: Callable[[], object]) -> int:
    """Functions that `work` calls, whether it answers or refuses."""
    profile = Profile()
    with suppress(InputError, RateLimited):
        profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def legal(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """The extremes of every setting are drawn as often as all that lies between them."""

    def between(low: int, high: int) -> int:
        return dice.choice((low, high, dice.randint(low, high)))

    while True:
        shared = {
            "max_turns": between(1, 100),
            "max_actions_per_turn": between(1, 100),
            "max_actions": between(1, 1000),
            "demo_actions_per_turn": between(1, 100),
            "train_tasks": between(1, 10_000),
            "eval_tasks": between(1, 10_000),
            "distinct_train": dice.random() < 0.5,
        }
        lake = {"size": between(3, 16), "frozen_probability": dice.choice((0.65, 1.0, dice.uniform(0.65, 1)))}
        lake |= {"is_slippery": dice.random() < 0.5, "demo_blind": dice.choice((0.0, 1.0, 0.5))}
        room = {
            "dim_room": (between(4, 12), between(4, 12)),
            "num_boxes": between(1, 4),
            "min_solution": between(1, 100),
            "demo_blind": dice.choice((0.0, 1.0, 0.5)),
        }
        kind, config = dice.choice((("frozen_lake", shared | lake), ("sokoban", shared | room)))
        try:
            (FrozenLakeConfig if kind == "frozen_lake" else SokobanConfig).model_validate(config)
        except ValidationError:
            continue
        return kind, config


def built(kind: str, config: dict[str, Any]) -> Environment:
    return kinds()[kind].build(kinds()[kind].config.model_validate(config))


def slowest(kind: str, config: dict[str, Any]) -> int:
    """The most function calls of any call into the environment: of first tasks with all that is done with them, and of
    last ones.
    """
    environment = built(kind, config)

    def most(split: str) -> int:
        last = environment.num_tasks(split) - 1
        calls = (
            lambda: environment.demonstration(split, 0),
            lambda: environment.reset(split, 0, 1),
            lambda: environment.task(split, last),
        )
        return max(map(n_calls, calls))

    return max(map(most, environment.splits))


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth: what a call takes beside its budget is then what shows."""
    monkeypatch.setattr(layouts, "MAX_EFFORT", layouts.MAX_EFFORT // 20)


@pytest.mark.parametrize(("kind", "config"), [*WORST, *(pytest.param(*one, marks=pytest.mark.long) for one in OTHERS)])
def test_the_worst_configurations_known_are_bounded(kind: str, config: dict[str, Any]) -> None:
    assert slowest(kind, config) < MAX_CALLS


@pytest.mark.long
def test_legal_configurations_are_bounded() -> None:
    dice = random.Random(7)
    taken = {}
    for _ in range(N_CONFIGS):
        kind, config = legal(dice)
        taken[slowest(kind, config)] = (kind, config)
    assert max(taken) < MAX_CALLS, taken[max(taken)]


def test_the_way_is_the_shortest_path() -> None:
    """From every cell of many maps, action by action."""
    for seed in range(40):
        environment = frozen_lake(
            FrozenLakeConfig(size=3 + seed % 6, max_actions=40, max_turns=40, frozen_probability=0.7)
        )
        rows = environment.layouts.get("train", seed).layout
        away = distances(rows)
        for r in range(len(rows)):
            for c in range(len(rows)):
                if rows[r][c] != "H":
                    assert way(away, (r, c)) == shortest_path(rows, (r, c))
