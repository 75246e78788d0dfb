"""FrozenLake: gymnasium's environment on random maps, rendered as text.

Maps come from gymnasium's `generate_random_map` and are used only if their shortest path fits the budget of actions.
gymnasium is imported with the first map, in the thread that draws it, so runs of other environments do not need it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from services.env.environments.games.layouts import DrawnLayout, Effort, Layouts, Rows
from services.env.environments.games.text_game import (
    GameConfig,
    GameEnvironment,
    GameEpisode,
    MoveOutcome,
    play,
    protocol_of,
)
from services.env.episode_types import MAX_REWARD, Demonstration
from shared.errors import InputError

if TYPE_CHECKING:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

ACTIONS = ("Left", "Down", "Right", "Up")
"""Actions in gymnasium's order; the position is the action's number."""

_MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
_DEMO_SEEDS = 64
_KEPT_LAKES = 1024

RULES = (
    "You walk on a frozen lake. Reach the goal G without falling into a hole O.\n"
    "P is you, _ is ice, O a hole, G the goal, X you in a hole, * you on the goal."
)
SLIPPERY = " The ice is slippery: you may slide to the side of where you are heading."

type Cell = tuple[int, int]
type Render = Literal["grid", "spaced", "grid+around", "grid+coords", "coords"]


class FrozenLakeConfig(GameConfig):
    """Settings of FrozenLake.

    `render`: the board as lines; spaced; with the cells around the player; with coordinates of player and goal; only
    the coordinates.

    `demo_blind` is the share of demonstrations that head for the goal without looking at the ice (right until the edge,
    then down), and so often fall into a hole. A model trained on both kinds plays either way; reinforcement learning
    then selects the one that reaches the goal.
    """

    size: int = Field(default=4, ge=3, le=16)
    frozen_probability: float = Field(default=0.8, ge=0.65, le=1)
    is_slippery: bool = False
    render: Render = "grid"
    success_reward: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    hole_reward: float = Field(default=0.0, ge=-MAX_REWARD, le=0)
    step_reward: float = Field(default=0.0, ge=-MAX_REWARD, le=0)
    demo_blind: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _reachable(self) -> FrozenLakeConfig:
        if self.budget < 2 * (self.size - 1):
            raise ValueError(
                f"size={self.size} needs at least {2 * (self.size - 1)} actions, but an episode allows {self.budget}"
            )
        return self


@dataclass(slots=True)
class LakeGame:
    """One map in play. `lake` is gymnasium's environment, already reset."""

    rows: Rows
    lake: FrozenLakeEnv
    config: FrozenLakeConfig

    @property
    def position(self) -> tuple[int, int]:
        """(row, column) of the player."""
        row, column = divmod(int(self.lake.s), len(self.rows))
        return row, column

    def render(self) -> str:
        return _RENDER[self.config.render](self.rows, self.position)

    def act(self, action: str) -> MoveOutcome:
        _, reward, over, _, _ = self.lake.step(ACTIONS.index(action))
        won = reward > 0
        rewards = {"success": self.config.success_reward} if won else {"hole": self.config.hole_reward} if over else {}
        if self.config.step_reward:
            rewards["step"] = self.config.step_reward
        return MoveOutcome(rewards, over, won)

    def plan(self) -> Sequence[str] | None:
        return way(distances(self.rows), self.position)


@dataclass(frozen=True, slots=True)
class FrozenLake(GameEnvironment[FrozenLakeConfig, Rows]):
    """Environment of FrozenLake; built by `frozen_lake`."""

    def reset(self, split: str, index: int, seed: int) -> GameEpisode:
        return self._episode(self._game(self.layouts.get(split, index), seed))

    def demonstration(self, split: str, index: int) -> Demonstration:
        """A demonstration; a blind one may fail, see `demo_blind`.

        On slippery ice, the plan is tried with several seeds; raises InputError if it never works.
        """
        drawn = self.layouts.get(split, index)
        dice = random.Random(drawn.seed)
        if dice.random() < self.config.demo_blind:
            game = self._game(drawn, dice.getrandbits(31))
            return play(self._episode(game), lambda: [blind_action(len(game.rows), game.position)])
        away = distances(drawn.layout)
        for seed in range(_DEMO_SEEDS if self.config.is_slippery else 1):
            game = self._game(drawn, seed)
            shown = play(self._episode(game), lambda game=game: way(away, game.position))
            if shown.success:
                return shown
        raise InputError(
            f"frozen_lake/{split}/{index}: no plan worked on {_DEMO_SEEDS} seeds", "raise max_actions and max_turns"
        )

    def _game(self, drawn: DrawnLayout[Rows], seed: int) -> LakeGame:
        lake = copy(_lake(drawn.layout, self.config.is_slippery))
        lake.reset(seed=seed)
        return LakeGame(drawn.layout, lake, self.config)

    def _episode(self, game: LakeGame) -> GameEpisode:
        return self.make_episode(game, RULES + (SLIPPERY if self.config.is_slippery else ""))


def frozen_lake(config: FrozenLakeConfig) -> FrozenLake:
    """Build the environment. Maps are made on demand."""

    def make(seed: int, effort: Effort) -> Rows | None:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        effort.spend(config.size**2)
        rows = tuple(generate_random_map(config.size, config.frozen_probability, seed))
        path = shortest_path(rows, (0, 0))
        return rows if path is not None and len(path) <= config.budget else None

    advice = "change size, raise frozen_probability, or raise max_actions and max_turns"
    protocol = protocol_of(ACTIONS, config)
    layouts = Layouts(
        "frozen_lake", make, lambda rows: rows, config.counts, distinct_train=config.distinct_train, advice=advice
    )
    return FrozenLake(config, layouts, protocol)


@lru_cache(_KEPT_LAKES)
def _lake(rows: Rows, slippery: bool) -> FrozenLakeEnv:
    """Build gymnasium's environment of a map, whose table of moves takes most of the time of a reset.

    Play a copy: episodes share its tables, and each has its own position and, once reset, its own generator.
    """
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    return FrozenLakeEnv(desc=list(rows), is_slippery=slippery)


def shortest_path(rows: Rows, start: tuple[int, int]) -> tuple[str, ...] | None:
    """A shortest sequence of actions from `start` (row, column) to G that avoids H; None if there is none.

    Breadth-first search.
    """
    paths: dict[tuple[int, int], tuple[str, ...]] = {start: ()}
    queue = deque([start])
    while queue:
        row, column = cell = queue.popleft()
        if rows[row][column] == "G":
            return paths[cell]
        for action, (down, right) in _MOVES.items():
            there = row + down, column + right
            if there not in paths and _is_open(rows, there):
                paths[there] = (*paths[cell], action)
                queue.append(there)
    return None


def distances(rows: Rows) -> dict[Cell, int]:
    """Number of moves to G from every cell (row, column) that reaches it."""
    away = {(r, c): 0 for r, row in enumerate(rows) for c, tile in enumerate(row) if tile == "G"}
    queue = deque(away)
    while queue:
        row, column = cell = queue.popleft()
        for down, right in _MOVES.values():
            there = row + down, column + right
            if there not in away and _is_open(rows, there):
                away[there] = away[cell] + 1
                queue.append(there)
    return away


def way(away: Mapping[Cell, int], start: Cell) -> tuple[str, ...] | None:
    """The path of `shortest_path`, read from `distances`: at each cell the first action that leads nearer."""
    if start not in away:
        return None
    actions: list[str] = []
    row, column = start
    while away[row, column]:
        nearer = away[row, column] - 1
        action, (down, right) = next(
            (a, m) for a, m in _MOVES.items() if away.get((row + m[0], column + m[1])) == nearer
        )
        actions.append(action)
        row, column = row + down, column + right
    return tuple(actions)


def blind_action(size: int, player: tuple[int, int]) -> str:
    """Right until the edge, then Down, regardless of holes."""
    return "Right" if player[1] < size - 1 else "Down"


def _is_open(rows: Rows, cell: tuple[int, int]) -> bool:
    row, column = cell
    return 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != "H"


def _grid(rows: Rows, player: tuple[int, int], between: str = "") -> str:
    tiles = [[{"H": "O", "G": "G"}.get(tile, "_") for tile in row] for row in rows]
    under = rows[player[0]][player[1]]
    tiles[player[0]][player[1]] = {"H": "X", "G": "*"}.get(under, "P")
    return "\n".join(between.join(row) for row in tiles)


def _coords(rows: Rows, player: tuple[int, int]) -> str:
    def of(tile: str) -> str:
        return " ".join(f"{r} {c}" for r, row in enumerate(rows) for c, found in enumerate(row) if found == tile)

    return f"P {player[0]} {player[1]} G {of('G')} O {of('H')}".rstrip()


def _grid_around(rows: Rows, player: tuple[int, int]) -> str:
    def at(action: str) -> str:
        row, column = player[0] + _MOVES[action][0], player[1] + _MOVES[action][1]
        inside = 0 <= row < len(rows) and 0 <= column < len(rows[0])
        return {"H": "O", "G": "G"}.get(rows[row][column], "_") if inside else "#"

    return f"{_grid(rows, player)}\n{' '.join(f'{action} {at(action)}' for action in ACTIONS)}"


def _grid_coords(rows: Rows, player: tuple[int, int]) -> str:
    row, column = next((r, row.index("G")) for r, row in enumerate(rows) if "G" in row)
    return f"{_grid(rows, player)}\nP {player[0]} {player[1]} G {row} {column}"


_RENDER: Mapping[Render, Callable[[Rows, tuple[int, int]], str]] = {
    "grid": _grid,
    "spaced": lambda rows, player: _grid(rows, player, " "),
    "grid+around": _grid_around,
    "grid+coords": _grid_coords,
    "coords": _coords,
}
