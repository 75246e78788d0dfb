"""Sokoban with GRL's rules: generated solvable levels, and several actions per turn.

An answer is `<answer>Right || Up</answer>`. Rewards are GRL's: -0.1 for an action, +1 for a box pushed onto a target,
-1 for one pushed off, +10 when all are on; `reward_scale` multiplies all four. The penalty for a malformed answer is
not scaled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from services.env.environments.games.layouts import Effort, Layouts
from services.env.environments.games.text_game import (
    GameConfig,
    GameEnvironment,
    GameEpisode,
    MoveOutcome,
    demonstrate,
    play,
    protocol_of,
)
from services.env.episode_types import MAX_REWARD, Demonstration
from shared.errors import InputError
from volley_environments.games.sokoban_level import MOVES, Level, Position, draw, generate, move, solve, solved

RULES = (
    "You play Sokoban: push every box onto a target. You push a box by walking into it; you cannot pull, nor push two"
    " boxes or a box into a wall.\n# wall, _ floor, O target, X box, √ box on target, P you, S you on target."
)


class SokobanConfig(GameConfig):
    """Settings of Sokoban.

    `dim_room` is (height, width) including the surrounding wall. Levels need at least `min_solution` actions, at most
    the budget.

    `demo_blind` is the share of demonstrations that push straight into a box without looking at walls and targets, and
    so rarely succeed; for its purpose see FrozenLakeConfig.
    """

    dim_room: tuple[int, int] = (6, 6)
    num_boxes: int = Field(default=1, ge=1, le=4)
    min_solution: int = Field(default=2, ge=1, le=100)
    spaced: bool = False
    reward_scale: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    action_reward: float = Field(default=-0.1, ge=-MAX_REWARD, le=0)
    box_on_reward: float = Field(default=1.0, ge=0, le=MAX_REWARD)
    box_off_reward: float = Field(default=-1.0, ge=-MAX_REWARD, le=0)
    finish_reward: float = Field(default=10.0, ge=0, le=MAX_REWARD)
    demo_blind: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _playable(self) -> SokobanConfig:
        height, width = self.dim_room
        if not (4 <= height <= 12 and 4 <= width <= 12):
            raise ValueError("dim_room must be 4 to 12 in both directions")
        if self.num_boxes + 2 > (height - 2) * (width - 2) // 2:
            raise ValueError(f"dim_room={list(self.dim_room)} has no room for num_boxes={self.num_boxes}")
        if self.min_solution > self.budget:
            raise ValueError(
                f"min_solution={self.min_solution} is more than the {self.budget} actions an episode allows"
            )
        return self


@dataclass(slots=True)
class SokobanGame:
    """One level in play."""

    level: Level
    position: Position
    config: SokobanConfig

    def render(self) -> str:
        between = " " if self.config.spaced else ""
        return "\n".join(between.join(row) for row in draw(self.level.room, self.position))

    def act(self, action: str) -> MoveOutcome:
        room, before = self.level.room, self.position
        self.position = move(room, before, MOVES[action])
        gained = len(self.position.boxes & room.targets) - len(before.boxes & room.targets)
        won = solved(room, self.position)
        scale = self.config.reward_scale
        rewards = {"action": scale * self.config.action_reward}
        if gained:
            rewards["boxes"] = scale * (self.config.box_on_reward if gained > 0 else self.config.box_off_reward)
        if won:
            rewards["finish"] = scale * self.config.finish_reward
        return MoveOutcome(rewards, won, won)

    def plan(self) -> Sequence[str] | None:
        return solve(self.level.room, self.position)


@dataclass(frozen=True, slots=True)
class Sokoban(GameEnvironment[SokobanConfig, Level]):
    """Environment of Sokoban; built by `sokoban`."""

    def reset(self, split: str, index: int, seed: int) -> GameEpisode:
        """Start an episode. `seed` has no effect, because the game is not random."""
        level = self.layouts.get(split, index).layout
        return self.make_episode(SokobanGame(level, level.start, self.config), RULES)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """A demonstration; a blind one may fail, see `demo_blind`.

        Raises InputError if the level is too large for the solver.
        """
        drawn = self.layouts.get(split, index)
        if random.Random(drawn.seed).random() < self.config.demo_blind:
            game = SokobanGame(drawn.layout, drawn.layout.start, self.config)
            return play(self.make_episode(game, RULES), lambda: [blind_action(game.position)])
        shown = demonstrate(self.reset(split, index, 0))
        if not shown.success:
            raise InputError(
                f"sokoban/{split}/{index} is too large for the solver's search", "lower dim_room or num_boxes"
            )
        return shown


def blind_action(position: Position) -> str:
    """Action toward the first box: up or down to its row, then along the row, regardless of obstacles."""
    (row, column), (box_row, box_column) = position.player, min(position.boxes)
    if row != box_row:
        return "Down" if row < box_row else "Up"
    return "Right" if column < box_column else "Left"


def sokoban(config: SokobanConfig) -> Sokoban:
    """Build the environment. Levels are made on demand."""
    height, width = config.dim_room

    def make(seed: int, effort: Effort) -> Level | None:
        return generate(seed, height, width, config.num_boxes, config.min_solution, config.budget, effort)

    advice = "change dim_room, lower num_boxes or min_solution, or raise max_actions and max_turns"
    layouts = Layouts(
        "sokoban",
        make,
        lambda level: draw(level.room, level.start),
        config.counts,
        distinct_train=config.distinct_train,
        advice=advice,
    )
    return Sokoban(config, layouts, protocol_of(tuple(MOVES), config, first=1))
