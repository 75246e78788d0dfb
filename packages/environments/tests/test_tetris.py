import random
from typing import Any

import pytest
from pydantic import ValidationError

from services.env.episode_types import assistant
from volley_environments.games.tetris import TetrisConfig, TetrisGame, TetrisLevel, TetrisPiece, mirrored, solve, tetris

LOOSE: dict[str, Any] = {"max_turns": 100, "max_actions": 1000, "talk": "bare"}
WIDE = {".": 1, "I": 1, "-": 2, "O": 2}
HIGH = {".": 1, "I": 2, "-": 1, "O": 2}


class Simulator:
    """GRL's Tetris on a list of columns with its rewards, written apart from the code under test."""

    def __init__(self, level: TetrisLevel) -> None:
        self.level, self.n = level, 0
        self.grid = [[False] * level.width for _ in range(level.height)]
        self.come()

    def come(self) -> None:
        piece = self.level.pieces[self.n % len(self.level.pieces)]
        self.shape, self.x, self.y = piece.shape, piece.column, 0

    def body(self, x: int, y: int) -> list[tuple[int, int]]:
        return [(x + i, y - j) for i in range(WIDE[self.shape]) for j in range(HIGH[self.shape])]

    def blocked(self, x: int, y: int) -> bool:
        return any(
            cx < 0 or cx >= self.level.width or cy >= self.level.height or (cy >= 0 and self.grid[cy][cx])
            for cx, cy in self.body(x, y)
        )

    def step(self, action: str) -> tuple[float, bool, bool]:
        """Reward, whether the game is over, whether it is won."""
        x, y = {"Left": (self.x - 1, self.y), "Right": (self.x + 1, self.y), "Down": (self.x, self.y + 1)}[action]
        if not self.blocked(x, y):
            self.x, self.y = x, y
        if not self.blocked(self.x, self.y + 1):
            return -0.1, False, False
        for cx, cy in self.body(self.x, self.y):
            if cy >= 0:
                self.grid[cy][cx] = True
        lines = sum(all(row) for row in self.grid)
        if lines:
            return -0.1 + 10 * lines, True, True
        if any(self.grid[0]):
            return -0.1, True, False
        self.n += 1
        self.come()
        return -0.1, False, False

    def text(self) -> str:
        falling = self.body(self.x, self.y)
        return "\n".join(
            "".join("X" if (x, y) in falling else "#" if cell else "_" for x, cell in enumerate(row))
            for y, row in enumerate(self.grid)
        )


@pytest.mark.parametrize(
    "config", [{"box_type": 1}, {"dim_x": 3, "dim_y": 3, "eval_tasks": 4}, {"box_type": 3, "dim_y": 6}]
)
def test_rules_and_rewards_against_an_independent_simulator(config: dict[str, Any]) -> None:
    env, dice, ends = tetris(TetrisConfig(**config, **LOOSE)), random.Random(1), set()
    for index in range(40):
        episode = env.reset("train", index, 0)
        game = episode.game
        assert isinstance(game, TetrisGame)
        theirs = Simulator(game.level)
        seen = episode.opening[0]["content"]
        for _ in range(100):
            assert seen == theirs.text()
            action = dice.choice(["Left", "Right", "Down", "Down"])
            reward, over, won = theirs.step(action)
            result = episode.step(assistant(f"<answer>{action}</answer>"))
            seen = result.messages[0]["content"]
            assert (result.reward, result.terminated, result.info.success) == (pytest.approx(reward), over, won)
            if over:
                ends.add(won)
                break
    assert ends == {True, False}


def test_a_plan_fills_a_line_and_single_cells_take_the_fewest_actions() -> None:
    """Of a box of three by three in which single cells come in the middle: two of them go aside, all go down."""
    level = TetrisLevel(3, 3, (TetrisPiece(".", 1),))
    plan = solve(level, level.first())
    assert plan is not None
    assert len(plan) == 3 * 2 + 2
    game = TetrisGame(level, level.first(), TetrisConfig())
    outcomes = [game.act(action) for action in plan]
    assert outcomes[-1].won
    assert not any(outcome.over for outcome in outcomes[:-1])
    assert game.render() == "___\n___\n###"


def test_a_mirror_image_is_the_same_level() -> None:
    rows = ("4x4", ".0", "-1", "I3", "O0")
    assert mirrored(rows) == mirrored(("4x4", ".3", "-1", "I0", "O2"))
    assert mirrored(rows) != mirrored(("4x4", ".3", "-2", "I0", "O2"))


@pytest.mark.parametrize(
    "config", [{"dim_x": 6}, {"dim_y": 2}, {"box_type": 4}, {"dim_x": 5, "max_actions": 4}, {"pieces": 3}]
)
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TetrisConfig(**config)
