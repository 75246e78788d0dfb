"""Blocksworld with GRL's rules: stacks of numbered blocks are moved, one block at a time, into the goal state.

An answer is `<answer>(move 2 to 0) || (move 1 to 2)</answer>`, where 0 is the table. Rewards are GRL's: -1 for an
action, also for one that cannot be carried out, and +10 for the action that reaches the goal; `reward_scale` multiplies
both. Tasks that differ only in the numbers of the blocks belong to the same split.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

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

type Blocks = tuple[int, ...]
"""Supports of the blocks: blocks[i] is the number of the block below block i + 1, or 0 for the table."""

type View = Literal["text", "1d", "2d"]

_FILLING = re.compile(r"[\[\]()]|move|to")

RULES = (
    "There are {n} blocks, 1 to {n}. You can move a block only if no other block is on it, onto the table (0) or onto a"
    " block that has no other block on it. Bring them from the current state to the goal state."
)


class BlocksworldConfig(GameConfig):
    """Settings of Blocksworld.

    `render`: sentences; lists of each block's support; or stacks side by side. Tasks need at least `min_solution`
    moves. `unreadable_reward` is for an action that cannot be read, with `protocol: grl`.
    """

    num_blocks: int = Field(default=4, ge=2, le=6)
    min_solution: int = Field(default=2, ge=1, le=10)
    render: View = "text"
    max_turns: int = Field(default=11, ge=1, le=100)
    max_actions: int = Field(default=20, ge=1, le=1000)
    eval_tasks: int = Field(default=64, ge=1, le=MAX_DISTINCT)
    unreadable_reward: float = Field(default=-5.0, ge=-MAX_REWARD, le=0)
    reward_scale: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    action_reward: float = Field(default=-1.0, ge=-MAX_REWARD, le=0)
    finish_reward: float = Field(default=10.0, ge=0, le=MAX_REWARD)

    @model_validator(mode="after")
    def _solvable(self) -> BlocksworldConfig:
        if self.min_solution > min(self.budget, 2 * self.num_blocks - 2):
            raise ValueError(
                f"min_solution={self.min_solution} is more than the {self.budget} actions an episode allows, or more"
                f" than any task with num_blocks={self.num_blocks} needs"
            )
        return self


@dataclass(frozen=True, slots=True)
class BlocksTask:
    """`moves` is the length of the shortest solution."""

    start: Blocks
    goal: Blocks
    moves: int


@dataclass(slots=True)
class BlocksworldGame:
    """One task in play."""

    state: Blocks
    goal: Blocks
    config: BlocksworldConfig

    def render(self) -> str:
        show = _RENDER[self.config.render]
        between = "\n" if self.config.render == "2d" else " "
        return f"Current state:{between}{show(self.state)}\nGoal state:{between}{show(self.goal)}"

    def act(self, action: str) -> MoveOutcome:
        scale, config = self.config.reward_scale, self.config
        numbers = _numbers(action)
        if numbers is None:
            return MoveOutcome({"unreadable": scale * config.unreadable_reward}, False, False, legal=False)
        legal = is_legal(self.state, *numbers)
        if legal:
            self.state = moved(self.state, *numbers)
        won = self.state == self.goal and (legal or config.protocol != "grl")
        rewards = {"finish": scale * config.finish_reward} if won else {"action": scale * config.action_reward}
        return MoveOutcome(rewards, won, won, legal)

    def plan(self) -> Sequence[str] | None:
        found = solve(self.state, self.goal)
        return None if found is None else [_name(*move, self.config) for move in found]


@dataclass(frozen=True, slots=True)
class Blocksworld(GameEnvironment[BlocksworldConfig, BlocksTask]):
    """Environment of Blocksworld; built by `blocksworld`."""

    def reset(self, split: str, index: int, seed: int) -> GameEpisode:
        """Start an episode. `seed` has no effect, because the game is not random."""
        task = self.layouts.get(split, index).layout
        game = BlocksworldGame(task.start, task.goal, self.config)
        return self.make_episode(game, RULES.format(n=self.config.num_blocks), n_named=4)

    def demonstration(self, split: str, index: int) -> Demonstration:
        return demonstrate(self.reset(split, index, 0))


def blocksworld(config: BlocksworldConfig) -> Blocksworld:
    """Build the environment. Tasks are made on demand."""

    def make(seed: int, effort: Effort) -> BlocksTask | None:
        dice = random.Random(seed)
        start, goal = (_stacked(config.num_blocks, dice) for _ in range(2))
        plan = solve(start, goal, effort)
        if plan is None or not config.min_solution <= len(plan) <= config.budget:
            return None
        return BlocksTask(start, goal, len(plan))

    blocks = range(1, config.num_blocks + 1)
    names = tuple(_name(block, onto, config) for block in blocks for onto in (0, *blocks) if block != onto)
    layouts = Layouts(
        "blocksworld",
        make,
        lambda task: (_listed(task.start), _listed(task.goal)),
        config.counts,
        distinct_train=config.distinct_train,
        advice="raise num_blocks, or lower min_solution",
        form=renumbered,
    )
    return Blocksworld(config, layouts, protocol_of(names, config, raw=config.protocol == "grl"))


def is_legal(state: Blocks, block: int, onto: int) -> bool:
    """True if block and target exist, and neither carries another block."""
    there = 1 <= block <= len(state) and 0 <= onto <= len(state)
    return there and block != onto and block not in state and (onto == 0 or onto not in state)


def moved(state: Blocks, block: int, onto: int) -> Blocks:
    return (*state[: block - 1], onto, *state[block:])


def solve(start: Blocks, goal: Blocks, effort: Effort | None = None) -> list[tuple[int, int]] | None:
    """A shortest sequence of (block, onto) from `start` to `goal`, by breadth-first search. One always exists."""
    came: dict[Blocks, tuple[Blocks, tuple[int, int]] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if effort is not None:
            effort.spend(1)
        if state == goal:
            return _back(came, goal)
        for move in _moves(state):
            if (there := moved(state, *move)) not in came:
                came[there] = state, move
                queue.append(there)
    return None


def renumbered(rows: Rows) -> Rows:
    """Smallest form of a task over all renumberings of its blocks."""
    states = [tuple(int(n) for n in row.strip("[]").split(", ")) for row in rows]
    n = len(states[0])
    forms: list[Rows] = []
    for order in permutations(range(1, n + 1)):
        new = (0, *order)
        renamed = [[0] * n for _ in states]
        for state, other in zip(states, renamed, strict=True):
            for i, below in enumerate(state, 1):
                other[new[i] - 1] = new[below]
        forms.append(tuple(_listed(tuple(state)) for state in renamed))
    return min(forms)


def _back(came: Mapping[Blocks, tuple[Blocks, tuple[int, int]] | None], at: Blocks) -> list[tuple[int, int]]:
    path: list[tuple[int, int]] = []
    while (step := came[at]) is not None:
        at, move = step
        path.append(move)
    return path[::-1]


def _moves(state: Blocks) -> Iterator[tuple[int, int]]:
    clear = [block for block in range(1, len(state) + 1) if block not in state]
    for block in clear:
        for onto in (0, *clear):
            if onto not in (block, state[block - 1]):
                yield block, onto


def _stacked(n: int, dice: random.Random) -> Blocks:
    """A random state: blocks put down one after the other, each on the table or on a stack."""
    state, tops = [0] * n, [0]
    for block in dice.sample(range(1, n + 1), n):
        below = dice.choice(tops)
        state[block - 1] = below
        tops = [top for top in tops if top != below or top == 0] + [block]
    return tuple(state)


def _name(block: int, onto: int, config: BlocksworldConfig) -> str:
    """GRL's name of an action, or 2>0 without the tag, where spaces separate names."""
    return f"{block}>{onto}" if config.protocol == "plain" else f"(move {block} to {onto})"


def _numbers(action: str) -> tuple[int, int] | None:
    """Block and target of an action; None if it cannot be read. Spellings are those of GRL, and 2>0."""
    words = _FILLING.sub("", action).replace("#", "0").replace(">", " ").split()
    try:
        return int(words[0]), int(words[1])
    except (IndexError, ValueError):
        return None


def _sentences(state: Blocks) -> str:
    return " ".join(
        f"Block {i} is {'on the table' if below == 0 else f'on top of Block {below}'}."
        for i, below in enumerate(state, 1)
    )


def _listed(state: Blocks) -> str:
    return f"[{', '.join(map(str, state))}]"


def _drawn(state: Blocks) -> str:
    """Stacks from left to right, ordered by their lowest block; the last line is on the table."""
    stacks = [[block] for block, below in enumerate(state, 1) if below == 0]
    for stack in stacks:
        while stack[-1] in state:
            stack.append(state.index(stack[-1]) + 1)
    height = max(map(len, stacks))
    levels = range(height - 1, -1, -1)
    return "\n".join("".join(str(stack[at]) if at < len(stack) else "_" for stack in stacks) for at in levels)


_RENDER: Mapping[View, Callable[[Blocks], str]] = {"text": _sentences, "1d": _listed, "2d": _drawn}
