import itertools
import random
from typing import Any

import pytest
from pydantic import ValidationError

from services.env.episode_types import assistant
from volley_environments.games.sokoban import SokobanConfig, SokobanGame, sokoban
from volley_environments.games.sokoban_level import MOVES, draw, generate, solve

LOOSE: dict[str, Any] = {"max_turns": 100, "max_actions": 1000, "max_actions_per_turn": 100}


class Simulator:
    """Sokoban on a character grid with GRL's rewards, written apart from the code under test."""

    def __init__(self, text: str) -> None:
        self.grid = [list(line) for line in text.split("\n")]
        self.player = next((r, c) for r, row in enumerate(self.grid) for c, x in enumerate(row) if x in "PS")

    def step(self, name: str) -> tuple[float, bool]:
        dr, dc = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}[name]
        r, c = self.player
        ahead, beyond, reward = self.grid[r + dr][c + dc], None, -0.1
        if ahead in "X√":
            beyond = self.grid[r + 2 * dr][c + 2 * dc]
            if beyond in "#X√":
                return reward, False
            self.grid[r + 2 * dr][c + 2 * dc] = {"_": "X", "O": "√"}[beyond]
            reward += (beyond == "O") - (ahead == "√")
        elif ahead == "#":
            return reward, False
        self.grid[r][c] = {"P": "_", "S": "O"}[self.grid[r][c]]
        self.grid[r + dr][c + dc] = "S" if ahead in "O√" else "P"
        self.player = r + dr, c + dc
        won = not any("X" in row for row in self.grid)
        return reward + 10 * won, won

    def text(self) -> str:
        return "\n".join("".join(row) for row in self.grid)


@pytest.mark.parametrize("config", [{}, {"dim_room": (8, 7), "num_boxes": 2}])
def test_rules_and_rewards_against_an_independent_simulator(config: dict[str, Any]) -> None:
    env, rng = sokoban(SokobanConfig(talk="bare", **config, **LOOSE)), random.Random(1)
    for index in range(40):
        episode = env.reset("train", index, 0)
        theirs = Simulator(episode.opening[0]["content"])
        for _ in range(60):
            action = rng.choice(list(MOVES))
            reward, won = theirs.step(action)
            result = episode.step(assistant(f"<answer>{action}</answer>"))
            assert result.messages[0]["content"] == theirs.text()
            assert result.reward == pytest.approx(reward)
            assert result.terminated == result.info.success == won
            if won:
                break


def brute_force(text: str, limit: int) -> int | None:
    """Length of the shortest solution up to `limit`, by breadth-first search over the simulator's texts."""
    frontier, seen = [text], {text}
    for depth in range(1, limit + 1):
        following = []
        for here in frontier:
            for name in MOVES:
                simulator = Simulator(here)
                if simulator.step(name)[1]:
                    return depth
                if (there := simulator.text()) not in seen:
                    seen.add(there)
                    following.append(there)
        frontier = following
    return None


@pytest.mark.parametrize(("shape", "n_boxes"), [((5, 5), 1), ((6, 6), 1), ((6, 6), 2), ((5, 8), 2)])
def test_levels_are_solvable_in_exactly_the_moves_they_state(shape: tuple[int, int], n_boxes: int) -> None:
    """The generator's proof and the solver against brute force on an independent simulator."""
    levels = [level for seed in range(30) if (level := generate(seed, *shape, n_boxes, 2, 10)) is not None]
    assert len(levels) > 8
    for level in levels:
        text = "\n".join(draw(level.room, level.start))
        plan = solve(level.room, level.start)
        assert plan is not None
        assert brute_force(text, 10) == level.moves == len(plan)


def test_levels_have_a_border_and_their_boxes_off_target() -> None:
    for index in range(50):
        rows = (
            sokoban(SokobanConfig(num_boxes=2, dim_room=(7, 6), max_actions=20))
            .reset("train", index, 0)
            .game.render()
            .split("\n")
        )
        text = "".join(rows)
        assert (len(rows), len(rows[0])) == (7, 6)
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        assert text.count("X") == 2
        assert "√" not in text
        assert text.count("O") + text.count("S") == 2
        assert text.count("P") + text.count("S") == 1


@pytest.mark.parametrize(
    "config",
    [{}, {"num_boxes": 2, "dim_room": (7, 7), "max_actions": 20}, {"demo_actions_per_turn": 1, "max_turns": 10}],
)
def test_demonstrations_win_within_the_budget(config: dict[str, Any]) -> None:
    env = sokoban(SokobanConfig(**config))
    for index in range(30):
        episode = env.reset("eval", index, 0)
        results = [episode.step(m) for m in env.demonstration("eval", index).messages if m["role"] == "assistant"]
        assert results[-1].info.success
        assert not any(result.over for result in results[:-1])


def test_rewards_scale_and_the_penalty_does_not() -> None:
    env = sokoban(SokobanConfig(reward_scale=0.1))
    episode = env.reset("train", 0, 0)
    malformed = episode.step(assistant("no idea"))
    assert malformed.info.reward_components == {"format": -0.1}
    total = sum(episode.step(m).reward for m in env.demonstration("train", 0).messages if m["role"] == "assistant")
    game = episode.game
    assert isinstance(game, SokobanGame)
    assert total == pytest.approx(0.1 * (10 + 1 - 0.1 * game.level.moves))


@pytest.mark.parametrize(
    "config", [{"dim_room": (3, 6)}, {"dim_room": (4, 4), "num_boxes": 1}, {"min_solution": 11}, {"boxes": 1}]
)
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SokobanConfig(**config)


def test_a_blind_demonstration_walks_straight_into_the_box_and_on():
    environment = sokoban(SokobanConfig(demo_blind=1.0, demo_actions_per_turn=1, max_turns=8, max_actions=8))
    won = 0
    for index in range(40):
        shown = environment.demonstration("train", index)
        said = [str(m["content"]) for m in shown.messages if m["role"] == "assistant"]
        moves = [said[0], *(b for a, b in itertools.pairwise(said) if a != b)]
        assert len(moves) <= 3  # up or down, then along the row, and once the other way where a wall was met
        won += shown.success
        assert environment.demonstration("train", index) == shown
    assert 0 < won < 20


def test_a_share_of_the_demonstrations_is_blind():
    def successes(share: float) -> int:
        environment = sokoban(SokobanConfig(demo_blind=share))
        return sum(environment.demonstration("train", index).success for index in range(60))

    assert successes(0.0) == 60
    assert successes(1.0) < successes(0.5) < 60
