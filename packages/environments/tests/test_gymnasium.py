"""The environment `gymnasium` against gymnasium itself, step by step."""

from __future__ import annotations

import random
import re
from typing import Any

import gymnasium
import pytest
from gymnasium.utils import seeding

from services.env.episode_types import assistant
from shared.errors import InputError, NotFound
from volley_environments.gymnasium.environment import Gymnasium, GymnasiumConfig
from volley_environments.gymnasium.tabular import GreedyPolicy

LOOSE: dict[str, Any] = {"max_turns": 100, "max_actions": 1000, "talk": "bare"}
ESCAPES = re.compile(r"\x1b\[[\d;]*m")
MARKS = re.compile(r"\{[a-z]+:([^{}]*)\}")


@pytest.mark.parametrize(
    ("name", "make", "distinct"),
    [
        ("Taxi-v4", {}, True),
        ("Taxi-v4", {"is_rainy": True}, True),
        ("CliffWalking-v1", {"is_slippery": True}, False),
        ("FrozenLake-v1", {"map_name": "8x8", "is_slippery": True}, False),
        ("Blackjack-v1", {}, True),
    ],
)
def test_it_plays_as_gymnasium_does(name: str, make: dict[str, Any], distinct: bool) -> None:
    """Observation, reward and end of random walks, with the seed of the start and the seed of what follows."""
    env = Gymnasium(GymnasiumConfig(id=name, make=make, distinct_starts=distinct, **LOOSE))
    dice = random.Random(name)
    can_draw = name != "Blackjack-v1"
    for index in range(10):
        theirs: Any = gymnasium.make(name, **make, **({"render_mode": "ansi"} if can_draw else {})).unwrapped
        observed, _ = theirs.reset(seed=env._drawn("train", index).layout.seed)
        theirs.np_random = seeding.np_random(index)[0]
        ours = env.reset("train", index, seed=index)
        seen = ours.opening[0]["content"]
        for _ in range(40):
            expected = theirs.render() if can_draw else str(observed)
            assert MARKS.sub(r"\1", MARKS.sub(r"\1", seen)) == ESCAPES.sub("", expected).strip("\n")
            action = dice.randrange(theirs.action_space.n)
            observed, reward, terminated, _, _ = theirs.step(action)
            result = ours.step(assistant(f"<answer>{action}</answer>"))
            seen = result.messages[0]["content"]
            assert (result.reward, result.terminated) == (reward, terminated)
            assert result.info.success == (terminated and reward > 0)
            if terminated:
                break


def test_colours_become_marks() -> None:
    env = Gymnasium(GymnasiumConfig(id="FrozenLake-v1", distinct_starts=False, talk="bare"))
    assert env.reset("train", 0, 0).opening[0]["content"] == "{red:S}FFF\nFHFH\nFFFH\nHFFG"


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"])
def test_the_policy_is_optimal(name: str) -> None:
    """Its values solve Bellman's equation."""
    inner: Any = gymnasium.make(name).unwrapped
    policy = GreedyPolicy(inner.P)
    for state, actions in inner.P.items():
        best = max(
            sum(p * (r + (0 if over else 0.99 * policy._values[s])) for p, s, r, over in o) for o in actions.values()
        )
        assert policy._values[state] == pytest.approx(best, abs=1e-4)


def test_cliff_walking_is_shown_the_shortest_way() -> None:
    env = Gymnasium(GymnasiumConfig(id="CliffWalking-v1", distinct_starts=False, success_above=-2, **LOOSE))
    shown = env.demonstration("eval", 3)
    assert shown.success
    episode = env.reset("eval", 3, 0)
    rewards = [episode.step(message).reward for message in shown.messages if message["role"] == "assistant"]
    assert sum(rewards) == -13


def test_without_a_table_there_is_no_demonstration() -> None:
    with pytest.raises(NotFound, match="no demonstrations"):
        Gymnasium(GymnasiumConfig(id="Blackjack-v1")).demonstration("train", 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "Nowhere-v0"}, "cannot make Nowhere-v0"),
        ({"id": "Taxi-v3"}, "cannot make Taxi-v3 .*Taxi-v4"),
        ({"make": {"colour": 1}}, "cannot make Taxi-v4 with .*colour"),
        ({"id": "CartPole-v1"}, "CartPole-v1 observes Box"),
        ({"id": "Pendulum-v1"}, "Pendulum-v1 has actions of Box"),
        ({"actions": ("a", "b")}, "has 6 actions, and actions names 2"),
        ({"id": "CliffWalking-v1"}, "no (new )?layout for .*distinct_starts to false"),
    ],
)
def test_what_cannot_be_played_in_text_is_said(config: dict[str, Any], message: str) -> None:
    env = Gymnasium(GymnasiumConfig(**config))
    with pytest.raises(InputError, match=message):
        _ = [env.task(split, 0) for split in env.splits]


@pytest.mark.parametrize(
    "config",
    [{"id": "os:path"}, {"actions": ("a", "A")}, {"actions": ("go left",)}, {"make": {"render_mode": "human"}}],
)
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"id|actions|make"):
        GymnasiumConfig(**config)
