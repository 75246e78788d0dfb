"""Tetris with GRL's rules: pieces in a small box, moved Left, Right and Down; the first full line wins.

Nothing falls by itself. A piece with something below it after an action stays there; if no line is full and it reaches
the top row, the game is lost, otherwise the next piece comes. Rewards are GRL's: -0.1 for an action, +10 for a line;
`reward_scale` multiplies both. A level is identified by the pieces of its solution: levels with equal or mirrored
pieces belong to the same split.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from pydantic import Field, model_validator

from services.env.environments.games.layouts import MAX_DISTINCT, Effort, Layouts, Rows
from services.env.environments.games.text_game import (
    GameConfig,
    GameEnvironment,
    GameEpisode,
    MoveOutcome,
    demonstrate,
    protocol_of,
)
from services.env.episode_types import MAX_REWARD, Demonstration
from shared.errors import InputError

ACTIONS = ("Left", "Right", "Down")
RULES = (
    "You play a small Tetris: blocks X come one at a time from the top, and you move them Left, Right or Down; they do"
    " not fall by themselves. A block stays (#) when it has the floor or another block below it. Fill a whole line to"
    " win; you lose when blocks reach the top. _ is empty."
)

type Cell = tuple[int, int]
"""(row, column); row 0 is the top, rows above the box are negative."""

SHAPES: dict[str, tuple[Cell, ...]] = {
    ".": ((0, 0),),
    "I": ((0, 0), (-1, 0)),
    "-": ((0, 0), (0, 1)),
    "O": ((0, 0), (0, 1), (-1, 0), (-1, 1)),
}
"""Cells of a piece relative to its lowest left cell."""

BOX_TYPES = {1: (".",), 2: ("I", "-"), 3: ("I", "-", "O")}
"""GRL's numbers for the sets of pieces."""

_MAX_STEPS = 20_000
_MOVES: dict[str, Cell] = {"Left": (0, -1), "Right": (0, 1), "Down": (1, 0)}


class TetrisConfig(GameConfig):
    """Settings of Tetris.

    `dim_x` and `dim_y` are width and height; `box_type` chooses the pieces: 1 single cells, 2 pairs of cells, 3 pairs
    and squares of four. After `n_pieces` the sequence repeats.
    """

    dim_x: int = Field(default=4, ge=3, le=5)
    dim_y: int = Field(default=4, ge=3, le=8)
    box_type: int = Field(default=2, ge=1, le=3)
    n_pieces: int = Field(default=8, ge=2, le=20)
    max_turns: int = Field(default=11, ge=1, le=100)
    max_actions: int = Field(default=40, ge=1, le=1000)
    eval_tasks: int = Field(default=32, ge=1, le=MAX_DISTINCT)
    reward_scale: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    action_reward: float = Field(default=-0.1, ge=-MAX_REWARD, le=0)
    line_reward: float = Field(default=10.0, ge=0, le=MAX_REWARD)

    @model_validator(mode="after")
    def _winnable(self) -> TetrisConfig:
        if self.budget < self.dim_x:
            raise ValueError(f"dim_x={self.dim_x} needs more than the {self.budget} actions an episode allows")
        return self


@dataclass(frozen=True, slots=True)
class TetrisPiece:
    """A shape and the initial column of its lowest left cell."""

    shape: str
    column: int


@dataclass(frozen=True, slots=True)
class Box:
    """State of play: resting cells, and the position of the n-th piece's lowest left cell."""

    filled: frozenset[Cell]
    n: int
    at: Cell
    lines: int = 0
    lost: bool = False

    @property
    def over(self) -> bool:
        return self.lines > 0 or self.lost


@dataclass(frozen=True, slots=True)
class TetrisLevel:
    """A sequence of pieces, which repeats after the last one. A solution uses the first `n_used`."""

    width: int
    height: int
    pieces: tuple[TetrisPiece, ...]
    n_used: int = 0

    def first(self) -> Box:
        return Box(frozenset(), 0, (0, self.pieces[0].column))

    def piece(self, box: Box) -> TetrisPiece:
        return self.pieces[box.n % len(self.pieces)]

    def cells(self, box: Box, at: Cell) -> list[Cell]:
        return [(at[0] + row, at[1] + column) for row, column in SHAPES[self.piece(box).shape]]

    def fits(self, box: Box, at: Cell) -> bool:
        return all(
            0 <= column < self.width and row < self.height and (row, column) not in box.filled
            for row, column in self.cells(box, at)
        )

    def after(self, box: Box, action: str) -> Box:
        """The box after one action. A piece that cannot move stays."""
        down, right = _MOVES[action]
        at = box.at[0] + down, box.at[1] + right
        at = at if self.fits(box, at) else box.at
        if self.fits(box, (at[0] + 1, at[1])):
            return Box(box.filled, box.n, at)
        filled = box.filled | {cell for cell in self.cells(box, at) if cell[0] >= 0}
        full = [row for row in range(self.height) if all((row, column) in filled for column in range(self.width))]
        if full:
            return Box(filled, box.n, at, lines=len(full))
        if any(row == 0 for row, _ in filled):
            return Box(filled, box.n, at, lost=True)
        following = Box(filled, box.n + 1, (0, 0))
        return Box(filled, box.n + 1, (0, self.piece(following).column))


@dataclass(slots=True)
class TetrisGame:
    """One level in play."""

    level: TetrisLevel
    box: Box
    config: TetrisConfig

    def render(self) -> str:
        """The box as text. A full line stays visible; after the end of the game the last piece counts as resting."""
        falling = set() if self.box.over else set(self.level.cells(self.box, self.box.at))
        return "\n".join(
            "".join(
                "X" if (row, column) in falling else "#" if (row, column) in self.box.filled else "_"
                for column in range(self.level.width)
            )
            for row in range(self.level.height)
        )

    def act(self, action: str) -> MoveOutcome:
        self.box = self.level.after(self.box, action)
        rewards = {"action": self.config.reward_scale * self.config.action_reward}
        if self.box.lines:
            rewards["lines"] = self.config.reward_scale * self.config.line_reward * self.box.lines
        return MoveOutcome(rewards, self.box.over, self.box.lines > 0)

    def plan(self) -> Sequence[str] | None:
        return solve(self.level, self.box)


@dataclass(frozen=True, slots=True)
class Tetris(GameEnvironment[TetrisConfig, TetrisLevel]):
    """Environment of Tetris; built by `tetris`."""

    def reset(self, split: str, index: int, seed: int) -> GameEpisode:
        """Start an episode. `seed` has no effect, because the game is not random."""
        level = self.layouts.get(split, index).layout
        return self.make_episode(TetrisGame(level, level.first(), self.config), RULES)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """A demonstration. Raises InputError if the plan does not fit the turns."""
        shown = demonstrate(self.reset(split, index, 0))
        if not shown.success:
            raise InputError(f"tetris/{split}/{index}: no plan fits the turns", "raise max_turns or max_actions")
        return shown


def tetris(config: TetrisConfig) -> Tetris:
    """Build the environment. Levels are made on demand, and can be won within the budget."""

    def make(seed: int, effort: Effort) -> TetrisLevel | None:
        dice = random.Random(seed)
        pieces = tuple(_drawn(config, dice) for _ in range(config.n_pieces))
        level = TetrisLevel(config.dim_x, config.dim_y, pieces)
        plan = solve(level, level.first(), effort)
        if plan is None or len(plan) > config.budget:
            return None
        box = level.first()
        for action in plan:
            box = level.after(box, action)
        return replace(level, n_used=box.n + 1)

    layouts = Layouts(
        "tetris",
        make,
        _rows,
        config.counts,
        distinct_train=config.distinct_train,
        advice="change box_type, raise dim_x, dim_y, max_actions or max_turns",
        form=mirrored,
    )
    return Tetris(config, layouts, protocol_of(ACTIONS, config))


def solve(level: TetrisLevel, start: Box, effort: Effort | None = None) -> list[str] | None:
    """Actions that fill a line, each piece moved sideways first and then down.

    None if _MAX_STEPS of search find none. A* over resting positions, guided by the actions that the bottom row still
    needs: optimal for single cells, nearly optimal for larger pieces.
    """
    widest = max(len({column for _, column in SHAPES[piece.shape]}) for piece in level.pieces)
    bottom = level.height - 1
    order, n_steps, plan = count(), 0, None
    best = {(start.filled, start.n): 0}
    heap: list[tuple[int, int, int, Box, tuple[str, ...]]] = [(0, 0, next(order), start, ())]
    while heap and n_steps < _MAX_STEPS:
        _, cost, _, box, path = heappop(heap)
        if box.lines:
            plan = list(path)
            break
        if best[box.filled, box.n] < cost:
            continue
        for actions, there in _drops(level, box):
            n_steps += len(actions)
            key, total = (there.filled, there.n), cost + len(actions)
            if there.lost or total >= best.get(key, total + 1):
                continue
            best[key] = total
            empty = sum((bottom, column) not in there.filled for column in range(level.width))
            guess = 0 if there.lines else -(-empty // widest) * bottom
            heappush(heap, (total + guess, total, next(order), there, path + actions))
    if effort is not None:
        effort.spend(n_steps)
    return plan


def _drops(level: TetrisLevel, box: Box) -> list[tuple[tuple[str, ...], Box]]:
    """Possible resting positions of the falling piece, and the actions that lead to them."""
    found: list[tuple[tuple[str, ...], Box]] = []
    for sideways in ("Left", "Right"):
        here, moves = box, ()
        while here.n == box.n and not here.over:
            found.append(_dropped(level, here, moves))
            there = level.after(here, sideways)
            if there == here:
                break
            here, moves = there, (*moves, sideways)
        else:
            found.append((moves, here))
    return found


def _dropped(level: TetrisLevel, box: Box, moves: tuple[str, ...]) -> tuple[tuple[str, ...], Box]:
    n = box.n
    while box.n == n and not box.over:
        box, moves = level.after(box, "Down"), (*moves, "Down")
    return moves, box


def mirrored(rows: Rows) -> Rows:
    """Smaller of a level and its mirror image."""
    width = int(rows[0].split("x")[0])
    other = [rows[0]]
    for row in rows[1:]:
        shape, left = row[0], int(row[1:])
        other.append(f"{shape}{width - left - 1 - max(column for _, column in SHAPES[shape])}")
    return min(rows, tuple(other))


def _rows(level: TetrisLevel) -> Rows:
    used = level.pieces[: level.n_used]
    return (f"{level.width}x{level.height}", *(f"{piece.shape}{piece.column}" for piece in used))


def _drawn(config: TetrisConfig, dice: random.Random) -> TetrisPiece:
    shape = dice.choice(BOX_TYPES[config.box_type])
    widest = max(column for _, column in SHAPES[shape])
    return TetrisPiece(shape, dice.randrange(config.dim_x - widest))
