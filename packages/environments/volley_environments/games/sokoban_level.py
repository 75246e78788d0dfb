"""Sokoban's rules, level generator and solver, without text protocol or rewards.

A cell is (row, column). A level is walls, targets, boxes and the player; the outermost rows and columns are walls.
Levels are made in reverse: from every solved position of a carved room, moves are undone breadth-first. The depth at
which a position is reached is the length of its shortest solution, so a level comes with a proof of solvability and a
difficulty.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.env.environments.games.layouts import Effort

type Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}

_TILES = {(False, False): "_", (True, False): "O", (False, True): "X", (True, True): "√"}
"""(is a target, holds a box) → symbol."""

_MAX_POSITIONS = 20_000


@dataclass(frozen=True, slots=True)
class Room:
    """Constant part of a level. `floor` includes the target cells."""

    height: int
    width: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]


@dataclass(frozen=True, slots=True)
class Position:
    """Variable part of a level."""

    player: Cell
    boxes: frozenset[Cell]


@dataclass(frozen=True, slots=True)
class Level:
    """A room with its start position; `moves` is the length of its shortest solution."""

    room: Room
    start: Position
    moves: int


def solved(room: Room, position: Position) -> bool:
    return position.boxes == room.targets


def move(room: Room, position: Position, direction: Cell) -> Position:
    """Position after a step in `direction`; unchanged if a wall or a stuck box is in the way."""
    there = _add(position.player, direction)
    if there not in room.floor:
        return position
    if there not in position.boxes:
        return Position(there, position.boxes)
    beyond = _add(there, direction)
    if beyond not in room.floor or beyond in position.boxes:
        return position
    return Position(there, position.boxes - {there} | {beyond})


def draw(room: Room, position: Position) -> tuple[str, ...]:
    """The level as rows of `# _ O √ X P S`."""

    def tile(cell: Cell) -> str:
        if cell not in room.floor:
            return "#"
        if cell == position.player:
            return "S" if cell in room.targets else "P"
        return _TILES[cell in room.targets, cell in position.boxes]

    return tuple("".join(tile((r, c)) for c in range(room.width)) for r in range(room.height))


def solve(room: Room, position: Position, max_positions: int = _MAX_POSITIONS) -> tuple[str, ...] | None:
    """A shortest solution by breadth-first search; None if there is none within `max_positions`."""
    came: dict[Position, tuple[Position, str] | None] = {position: None}
    queue = deque([position])
    while queue and len(came) < max_positions:
        here = queue.popleft()
        if solved(room, here):
            return _trace(came, here)
        for name, direction in MOVES.items():
            there = move(room, here, direction)
            if there not in came:
                came[there] = (here, name)
                queue.append(there)
    return None


def generate(
    seed: int, height: int, width: int, n_boxes: int, min_moves: int, max_moves: int, effort: Effort | None = None
) -> Level | None:
    """A level solved in min_moves..max_moves moves with all boxes off target.

    None if this seed has none. `effort` counts the positions examined and the cells of the room.
    """
    effort = effort or Effort()
    effort.spend(height * width)
    rng = random.Random(seed)
    floor = sorted(_carve(rng, height, width))
    if len(floor) < n_boxes + 2:
        return None
    room = Room(height, width, frozenset(floor), frozenset(rng.sample(floor, n_boxes)))
    by_depth: dict[int, list[Position]] = {}
    for position, depth in _undo(room, max_moves):
        effort.spend(1)
        if depth >= min_moves and not position.boxes & room.targets:
            by_depth.setdefault(depth, []).append(position)
    if not by_depth:
        return None
    moves = rng.choice(sorted(by_depth))
    return Level(room, rng.choice(by_depth[moves]), moves)


def _carve(rng: random.Random, height: int, width: int) -> set[Cell]:
    """A connected floor inside the border: a random walk with random turns, until a random share is open."""
    cell = rng.randrange(1, height - 1), rng.randrange(1, width - 1)
    floor, steps = {cell}, list(MOVES.values())
    direction = rng.choice(steps)
    goal = rng.uniform(0.5, 0.9) * (height - 2) * (width - 2)
    while len(floor) < goal:
        if rng.random() < 0.35:
            direction = rng.choice(steps)
        ahead = _add(cell, direction)
        if 0 < ahead[0] < height - 1 and 0 < ahead[1] < width - 1:
            cell = ahead
            floor.add(cell)
        else:
            direction = rng.choice(steps)
    return floor


def _undo(room: Room, max_moves: int) -> Iterator[tuple[Position, int]]:
    """Positions within `max_moves` undone moves of a solved one, with depths, nearest first."""
    starts = [Position(cell, room.targets) for cell in sorted(room.floor - room.targets)]
    depths = dict.fromkeys(starts, 0)
    queue = deque(starts)
    while queue and len(depths) < _MAX_POSITIONS:
        here = queue.popleft()
        yield here, depths[here]
        if depths[here] == max_moves:
            continue
        for before in _predecessors(room, here):
            if before not in depths:
                depths[before] = depths[here] + 1
                queue.append(before)


def _predecessors(room: Room, position: Position) -> Iterator[Position]:
    """Positions from which one move leads to `position`: the player steps back, alone or pulling the box in front."""
    for direction in MOVES.values():
        back = position.player[0] - direction[0], position.player[1] - direction[1]
        if back not in room.floor or back in position.boxes:
            continue
        yield Position(back, position.boxes)
        front = _add(position.player, direction)
        if front in position.boxes:
            yield Position(back, position.boxes - {front} | {position.player})


def _trace(came: dict[Position, tuple[Position, str] | None], end: Position) -> tuple[str, ...]:
    names: list[str] = []
    while (step := came[end]) is not None:
        end, name = step
        names.append(name)
    return tuple(reversed(names))


def _add(cell: Cell, direction: Cell) -> Cell:
    return cell[0] + direction[0], cell[1] + direction[1]
