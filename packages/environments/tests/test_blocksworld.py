import random
from typing import Any

import pytest
from pydantic import ValidationError

from services.env.episode_types import assistant
from volley_environments.games.blocksworld import (
    BlocksworldConfig,
    BlocksworldGame,
    blocksworld,
    renumbered,
    solve,
)

LOOSE: dict[str, Any] = {"max_turns": 100, "max_actions": 1000}


class Stacks:
    """Blocksworld as lists of stacks, with GRL's rewards, written apart from the code under test."""

    def __init__(self, state: tuple[int, ...]) -> None:
        self.stacks = [[block] for block, below in enumerate(state, 1) if below == 0]
        while sum(map(len, self.stacks)) < len(state):
            for block, below in enumerate(state, 1):
                for stack in self.stacks:
                    if stack[-1] == below and below and block not in stack:
                        stack.append(block)

    def move(self, block: int, onto: int) -> bool:
        here = next((stack for stack in self.stacks if stack[-1] == block), None)
        there = [] if onto == 0 else next((stack for stack in self.stacks if stack[-1] == onto), None)
        if here is None or there is None or here is there:
            return False
        here.pop()
        there.append(block)
        self.stacks = [stack for stack in [*self.stacks, *([there] if onto == 0 else [])] if stack]
        return True

    def state(self) -> tuple[int, ...]:
        below = {block: (0, *stack)[i] for stack in self.stacks for i, block in enumerate(stack)}
        return tuple(below[block] for block in sorted(below))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_rules_and_rewards_against_stacks(n: int) -> None:
    env = blocksworld(BlocksworldConfig(num_blocks=n, eval_tasks=4, min_solution=1, **LOOSE))
    dice = random.Random(n)
    for index in range(30):
        episode = env.reset("train", index, 0)
        game = episode.game
        assert isinstance(game, BlocksworldGame)
        theirs = Stacks(game.state)
        for _ in range(40):
            block, onto = dice.randint(1, n), dice.randint(0, n)
            if block == onto:
                continue
            theirs.move(block, onto)
            result = episode.step(assistant(f"<answer>(move {block} to {onto})</answer>"))
            assert game.state == theirs.state()
            won = game.state == game.goal
            assert (result.reward, result.terminated) == (10.0 if won else -1.0, won)
            if won:
                break


def test_plans_are_shortest() -> None:
    """Against a search that deepens step by step, over stacks."""

    def reaches(stacks: tuple[int, ...], goal: tuple[int, ...], left: int) -> bool:
        if stacks == goal:
            return True
        if not left:
            return False
        for block in range(1, len(goal) + 1):
            for onto in range(len(goal) + 1):
                after = Stacks(stacks)
                if block != onto and after.move(block, onto) and reaches(after.state(), goal, left - 1):
                    return True
        return False

    env = blocksworld(BlocksworldConfig(num_blocks=3, eval_tasks=8, min_solution=1))
    for index in range(8):
        task = env.layouts.get("eval", index).layout
        plan = solve(task.start, task.goal)
        assert plan is not None
        assert len(plan) == task.moves
        assert reaches(task.start, task.goal, task.moves)
        assert not reaches(task.start, task.goal, task.moves - 1)


def test_other_numbers_are_the_same_task() -> None:
    assert renumbered(("[0, 1, 0]", "[0, 0, 1]")) == renumbered(("[0, 0, 1]", "[0, 1, 0]"))
    assert renumbered(("[0, 1, 2]", "[0, 0, 0]")) == renumbered(("[2, 3, 0]", "[0, 0, 0]"))
    assert renumbered(("[0, 1, 2]", "[0, 0, 0]")) != renumbered(("[0, 0, 0]", "[0, 1, 2]"))


def test_no_evaluation_task_is_a_renumbered_training_task() -> None:
    env = blocksworld(BlocksworldConfig())
    rows = {
        split: {
            renumbered((str(list(task.start)), str(list(task.goal))))
            for task in (env.layouts.get(split, index).layout for index in range(64))
        }
        for split in env.splits
    }
    assert not rows["train"] & rows["eval"]


@pytest.mark.parametrize(
    ("render", "text"),
    [
        ("text", "Current state: Block 1 is on the table. Block 2 is on top of Block 1. Block 3 is on the table."),
        ("1d", "Current state: [0, 1, 0]"),
        ("2d", "Current state:\n2_\n13"),
    ],
)
def test_renderings(render: Any, text: str) -> None:
    game = BlocksworldGame((0, 1, 0), (0, 0, 0), BlocksworldConfig(render=render))
    assert game.render().startswith(text + "\nGoal state:")


@pytest.mark.parametrize("config", [{"num_blocks": 7}, {"num_blocks": 2, "min_solution": 3}, {"blocks": 3}])
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BlocksworldConfig(**config)
