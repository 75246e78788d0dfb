"""What every environment on offer promises, whatever it is: one table of settings, one set of tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from services.env.api import answers
from services.env.environments.kinds import kinds
from services.env.episode_types import Environment, Message, StepResult, assistant
from shared.errors import NotFound, Unavailable
from volley_environments.games.tetris import Tetris

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen_lake": ("frozen_lake", {}),
    "sokoban": ("sokoban", {}),
    "blocksworld": ("blocksworld", {"eval_tasks": 200}),
    "blocksworld, plain": ("blocksworld", {"protocol": "plain", "talk": "bare", "render": "2d", "num_blocks": 5}),
    "blocksworld, as GRL": ("blocksworld", {"protocol": "grl", "think": False, "eval_tasks": 100}),
    "tetris": ("tetris", {}),
    "tetris, squares": (
        "tetris",
        {"box_type": 3, "dim_y": 6, "demo_actions_per_turn": 1, "max_turns": 40, "eval_tasks": 100},
    ),
    "gymnasium": ("gymnasium", {}),
    "gymnasium, named": (
        "gymnasium",
        {
            "make": {"is_rainy": False},
            "actions": ("South", "North", "East", "West", "PickUp", "DropOff"),
            "observation": "space",
            "rules": "You drive a taxi.",
        },
    ),
    "reasoning_gym": ("reasoning_gym", {}),
    "reasoning_gym, harder": (
        "reasoning_gym",
        {"dataset": "simple_equations", "dataset_config": {"min_terms": 3, "max_terms": 5}, "talk": "bare"},
    ),
    "text_to_sql": ("text_to_sql", {}),
    "text_to_sql, three turns": ("text_to_sql", {"max_turns": 3, "format_penalty": -0.1}),
}
"""Each kind at least once; those that need files have tests of their own."""

FROM_FILES = {"code", "gsm8k", "math"}

SAID = ("", "hello", "<answer>1</answer>", "<answer>Right || Down</answer>", "\\boxed{3}", "```sql\nSELECT 1\n```")
N_DEMONSTRATIONS = 8


@pytest.fixture(params=CASES, ids=lambda name: name)
def build(request: pytest.FixtureRequest) -> Callable[[], Environment]:
    kind, config = CASES[request.param]
    built = lambda: kinds()[kind].build(kinds()[kind].config.model_validate(config))  # noqa: E731
    _wait_for_its_library(built())
    return built


def _wait_for_its_library(env: Environment) -> None:
    """Some import a library in a process of its own, which takes a busy machine longer than a call waits."""
    for _ in range(10):
        try:
            env.reset(next(iter(env.splits)), 0, 0)
        except Unavailable:
            continue
        return


def test_every_kind_is_in_the_table() -> None:
    assert {kind for kind, _ in CASES.values()} | FROM_FILES == kinds().keys()


def played(env: Environment, split: str, index: int, seed: int, said: list[Message]) -> list[Any]:
    """All that a client sees of an episode, as it goes on the wire."""
    episode = env.reset(split, index, seed)
    seen: list[Any] = [list(episode.opening), list(episode.tools)]
    for message in said:
        result = episode.step(message)
        check(result)
        seen.append(orjson.loads(orjson.dumps(answers.stepped(result))))
        if result.over:
            break
    return seen


def check(result: StepResult) -> None:
    assert math.isfinite(result.reward)
    assert result.reward == pytest.approx(math.fsum(result.info.reward_components.values()))
    assert not (result.terminated and result.truncated)


def test_the_same_task_and_seed_give_the_same_episode(build: Callable[[], Environment]) -> None:
    """In another instance, in another order, and whatever the model says."""
    first, second = build(), build()
    said = [assistant(text) for text in SAID]
    tasks = [(split, index) for split in first.splits for index in (0, 3)]
    seen = {task: played(first, *task, 7, said) for task in tasks}
    assert {task: played(second, *task, 7, said) for task in reversed(tasks)} == seen
    assert [first.task(*task) for task in tasks] == [second.task(*task) for task in tasks]


def shown(env: Environment, split: str, index: int) -> tuple[Message, ...]:
    """What tells a task: its opening, or, where that hides what comes, the whole of a demonstration."""
    return env.demonstration(split, index).messages if isinstance(env, Tetris) else env.reset(split, index, 0).opening


@pytest.mark.parametrize("n_tasks", [40, pytest.param(200, marks=pytest.mark.long)])
def test_no_task_is_in_two_splits(build: Callable[[], Environment], n_tasks: int) -> None:
    env = build()
    told = {
        split: {orjson.dumps(list(shown(env, split, index))) for index in range(min(n_tasks, env.num_tasks(split)))}
        for split in env.splits
    }
    assert len(told["eval"]) == min(n_tasks, env.num_tasks("eval")), "an evaluation task is there twice"
    assert len(told["train"]) > 1
    assert not told["train"] & told["eval"]


def test_demonstrations_play_to_what_they_promise(build: Callable[[], Environment]) -> None:
    env = build()
    promised = 0
    for split in env.splits:
        for index in range(N_DEMONSTRATIONS):
            demonstration = env.demonstration(split, index)
            promised += demonstration.success
            episode = env.reset(split, index, 0)
            replayed, result = list(episode.opening), None
            for message in demonstration.messages:
                if message["role"] == "assistant":
                    assert result is None or not result.over
                    result = episode.step(message)
                    check(result)
                    replayed += [message, *(() if result.over else result.messages)]
            assert tuple(replayed) == demonstration.messages
            assert result is not None
            assert result.info.success == demonstration.success
    assert promised == N_DEMONSTRATIONS * len(env.splits)


def test_tasks_have_bounds_and_names_of_their_own(build: Callable[[], Environment]) -> None:
    env = build()
    names = [env.task(split, index) for split in env.splits for index in range(5)]
    assert len(set(names)) == len(names)
    for split, index in (("nowhere", 0), ("train", -1), ("eval", env.num_tasks("eval"))):
        for call in (env.task, env.demonstration, lambda s, i: env.reset(s, i, 0)):
            with pytest.raises(NotFound):
                call(split, index)
    with pytest.raises(NotFound):
        env.num_tasks("nowhere")


def test_two_threads_at_once_see_what_one_sees(build: Callable[[], Environment]) -> None:
    alone, shared = build(), build()
    said = [assistant(text) for text in SAID]
    tasks = [("train", index) for index in range(12)] + [("eval", index) for index in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda task: played(shared, *task, 1, said), tasks))
    assert together == [played(alone, *task, 1, said) for task in tasks]
