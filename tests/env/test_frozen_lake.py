import random
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from services.env.environments.games.frozen_lake import ACTIONS, FrozenLakeConfig, LakeGame, frozen_lake, shortest_path
from services.env.environments.games.text_game import MoveOutcome
from services.env.episode_types import assistant
from shared import config
from shared.models.chat import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]

LOOSE: dict[str, Any] = {"max_turns": 100, "max_actions": 1000, "max_actions_per_turn": 100}


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("size", [4, 8])
def test_it_moves_as_gymnasium_does(slippery: bool, size: int) -> None:
    """Random walks, step by step against gymnasium.make on the same map and seed."""
    env, rng = frozen_lake(FrozenLakeConfig(size=size, is_slippery=slippery, **LOOSE)), random.Random(size)
    for index in range(20):
        drawn = env.layouts.get("train", index)
        assert list(drawn.layout) == generate_random_map(size, 0.8, drawn.seed)
        ours = env.reset("train", index, seed=index)
        game = ours.game
        assert isinstance(game, LakeGame)
        theirs = gymnasium.make("FrozenLake-v1", desc=list(drawn.layout), is_slippery=slippery, max_episode_steps=1000)
        theirs.reset(seed=index)
        for _ in range(30):
            action = rng.randrange(4)
            state, reward, terminated, _, _ = theirs.step(action)
            result = ours.step(assistant(f"<answer>{ACTIONS[action]}</answer>"))
            assert game.position == divmod(int(state), size)
            assert (result.reward, result.terminated, result.info.success) == (reward, terminated, bool(reward))
            if terminated:
                break


def test_episodes_of_one_map_are_apart() -> None:
    """Two episodes in turn move as each of them does alone."""
    env = frozen_lake(FrozenLakeConfig(size=8, is_slippery=True, **LOOSE))
    moves = [ACTIONS[n % 2 + 1] for n in range(12)]

    def places(*seeds: int) -> list[list[tuple[int, int]]]:
        episodes = [env.reset("train", 3, seed) for seed in seeds]
        games = [episode.game for episode in episodes]
        seen: list[list[tuple[int, int]]] = [[] for _ in seeds]
        for move in moves:
            for episode, game, path in zip(episodes, games, seen, strict=True):
                assert isinstance(game, LakeGame)
                if not (path and game.rows[path[-1][0]][path[-1][1]] in "HG"):
                    episode.step(assistant(f"<answer>{move}</answer>"))
                    path.append(game.position)
        return seen

    assert places(1, 2) == [*places(1), *places(2)]
    assert places(1) != places(2)


def test_shortest_path_against_relaxation() -> None:
    """Length against Bellman-Ford distances; the path itself played in gymnasium."""
    for seed in range(50):
        rows = tuple(generate_random_map(6, 0.7, seed))
        path = shortest_path(rows, (0, 0))
        assert path is not None
        far = 10**9
        distance = {(r, c): far for r in range(6) for c in range(6) if rows[r][c] != "H"}
        distance[0, 0] = 0
        for _ in distance:
            for r, c in distance:
                near = [distance.get((r + dr, c + dc), far) for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))]
                distance[r, c] = min(distance[r, c], min(near) + 1)
        assert len(path) == distance[5, 5]
        lake = gymnasium.make("FrozenLake-v1", desc=list(rows), is_slippery=False)
        lake.reset()
        rewards = [lake.step(ACTIONS.index(action))[1] for action in path]
        assert sum(map(float, rewards)) == 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"size": 6, "max_actions": 12, "demo_actions_per_turn": 1, "max_turns": 12},
        {"talk": "bare", "protocol": "plain"},
    ],
)
def test_demonstrations_win_within_the_budget(config: dict[str, Any]) -> None:
    env = frozen_lake(FrozenLakeConfig(**config))
    for split in ("train", "eval"):
        for index in range(40):
            demonstration = env.demonstration(split, index)
            assert demonstration.success
            shown = demonstration.messages
            episode = env.reset(split, index, 0)
            results = [episode.step(message) for message in shown if message["role"] == "assistant"]
            assert results[-1].info.success
            assert not any(result.over for result in results[:-1])
            seen = [*env.reset(split, index, 0).opening, *(m for r in results[:-1] for m in r.messages)]
            assert [m for m in shown if m["role"] == "user"] == seen


def test_slippery_demonstrations_win_too() -> None:
    env = frozen_lake(FrozenLakeConfig(is_slippery=True, demo_actions_per_turn=1, **LOOSE))
    shown = env.demonstration("train", 0)
    assert shown.success
    assert shown.messages[-1]["role"] == "assistant"


ROWS = ("SFH", "FHF", "FFG")


def play(*actions: str, **config: Any) -> tuple[LakeGame, list[MoveOutcome]]:
    """A game on ROWS after some actions."""
    lake = FrozenLakeEnv(desc=list(ROWS), is_slippery=False)
    lake.reset(seed=0)
    game = LakeGame(ROWS, lake, FrozenLakeConfig(**config))
    return game, [game.act(action) for action in actions]


@pytest.mark.parametrize(
    ("render", "text"),
    [
        ("grid", "_PO\n_O_\n__G"),
        ("spaced", "_ P O\n_ O _\n_ _ G"),
        ("grid+coords", "_PO\n_O_\n__G\nP 0 1 G 2 2"),
        ("coords", "P 0 1 G 2 2 O 0 2 1 1"),
    ],
)
def test_renderings(render: Any, text: str) -> None:
    assert play("Right", render=render)[0].render() == text


def test_a_hole_ends_the_game() -> None:
    game, outcomes = play("Right", "Down", hole_reward=-0.5)
    assert game.render() == "__O\n_X_\n__G"
    assert outcomes == [MoveOutcome({}, False, False), MoveOutcome({"hole": -0.5}, True, False)]


def test_the_goal_wins_and_steps_may_cost() -> None:
    game, outcomes = play("Down", "Down", "Right", "Right", success_reward=2, step_reward=-0.01)
    assert game.render() == "__O\n_O_\n__*"
    assert outcomes[0] == MoveOutcome({"step": -0.01}, False, False)
    assert outcomes[-1] == MoveOutcome({"success": 2.0, "step": -0.01}, True, True)


def test_what_lies_around_the_player_is_named():
    config = FrozenLakeConfig(render="grid+around")
    rows = ("SFHF", "FFFF", "FFFF", "FFFG")
    lake = FrozenLakeEnv(desc=list(rows), is_slippery=False)
    lake.reset(seed=0)
    game = LakeGame(rows, lake, config)
    assert game.render().splitlines() == ["P_O_", "____", "____", "___G", "Left # Down _ Right _ Up #"]
    game.act("Right")
    assert game.render().splitlines()[-1] == "Left _ Down _ Right O Up #"
    for action in ("Down", "Down", "Down", "Right"):
        game.act(action)
    assert game.render().splitlines()[-1] == "Left _ Down # Right G Up _"


def test_a_blind_demonstration_follows_the_protocol_and_only_heads_for_the_goal():
    lake = frozen_lake(FrozenLakeConfig(demo_blind=1.0, max_actions_per_turn=1, max_turns=10))
    won = 0
    for index in range(60):
        shown = lake.demonstration("train", index)
        messages = shown.messages
        episode = lake.reset("train", index, 0)
        assert messages[-1]["role"] == "assistant"
        replies = [m for m in messages if m["role"] == "assistant"]
        assert {m["content"] for m in replies} <= {"<answer>Right</answer>", "<answer>Down</answer>"}
        results = [episode.step(m) for m in replies]
        assert results[-1].terminated
        assert all("format" not in r.info.reward_components for r in results)
        assert shown.success == results[-1].info.success
        won += shown.success
    assert 0 < won < 60


def test_distinct_training_layouts():
    config = FrozenLakeConfig(distinct_train=True, train_tasks=300)
    first, second = frozen_lake(config), frozen_lake(config)
    layouts = [first.layouts.get("train", index).layout for index in range(300)]
    assert len(set(layouts)) == 300
    assert [second.layouts.get("train", index).layout for index in (299, 0)] == [layouts[299], layouts[0]]
    assert not set(layouts) & {first.layouts.get("eval", index).layout for index in range(100)}


def test_the_longest_episode_of_the_quickstart_fits_its_context():
    """Every turn as long as it can be: a reply that does not end by itself costs the token that ends it."""
    run = config.load([ROOT / "configs" / "quickstart.yaml"]).config
    tokenizer = ChatTokenizer(ROOT / str(run.model.path))
    lake = frozen_lake(FrozenLakeConfig.model_validate(run.data.env_config))
    length = 0
    for index in range(200):
        episode = lake.reset("eval", index, 0)
        board = [{"role": "user", "content": episode.game.render()}]
        first, later = tokenizer.render_prompt(board), tokenizer.continue_after([], board)
        turns = lake.config.max_turns
        reply = run.grpo_config.max_response_length
        length = max(length, len(first) + (turns - 1) * len(later) + turns * reply)
    assert length <= run.rollout.engine.context_length
