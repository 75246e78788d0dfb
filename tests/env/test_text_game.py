"""The conversation around a game, with a game that only counts."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.environments.games.actions import ActionProtocol
from services.env.environments.games.text_game import GameConfig, GameEpisode, MoveOutcome
from services.env.episode_types import assistant


@dataclass
class Counting:
    """Won at three; Down counts back and costs."""

    n: int = 0

    def render(self) -> str:
        return f"n={self.n}"

    def act(self, action: str) -> MoveOutcome:
        self.n += 1 if action == "Up" else -1
        return MoveOutcome({"up": 0.5} if action == "Up" else {"down": -0.25}, self.n == 3, self.n == 3)

    def plan(self) -> tuple[str, ...]:
        return ("Up",) * (3 - self.n)


def episode(**config: int | str) -> GameEpisode:
    settings = GameConfig.model_validate({"talk": "bare", **config})
    return GameEpisode(
        Counting(), settings, ActionProtocol(("Up", "Down"), settings.protocol, settings.max_actions_per_turn)
    )


def test_several_actions_a_turn_until_the_game_is_won() -> None:
    result = episode().step(assistant("<answer>Up || Up || Up || Down</answer>"))
    assert (result.reward, result.terminated, result.truncated, result.info.success) == (1.5, True, False, True)
    assert result.info.extra == {"actions": ["Up", "Up", "Up"], "actions_left": 7}
    assert result.messages[0]["content"] == "n=3"
    assert result.info.error is None


def test_a_malformed_answer_costs_and_its_good_actions_are_played() -> None:
    result = episode().step(assistant("<answer>Up || Fly</answer>"))
    assert result.info.reward_components == {"format": -0.1, "up": 0.5}
    assert result.info.error == "invalid_action"
    assert result.reward == pytest.approx(0.4)


def test_turns_end_the_episode() -> None:
    play = episode(max_turns=2)
    results = [play.step(assistant("?")) for _ in range(2)]
    assert [(r.terminated, r.truncated, r.reward) for r in results] == [(False, False, -0.1), (False, True, -0.1)]
    assert {r.info.error for r in results} == {"format"}


def test_actions_end_the_episode_and_the_rest_is_not_played() -> None:
    result = episode(max_actions=2).step(assistant("<answer>Up || Up || Up</answer>"))
    assert (result.truncated, result.terminated, result.info.success) == (True, False, False)
    assert result.info.extra == {"actions": ["Up", "Up"], "actions_left": 0}


def test_winning_with_the_last_action_is_no_truncation() -> None:
    result = episode(max_actions=3, max_turns=1).step(assistant("<answer>Up || Up || Up</answer>"))
    assert (result.terminated, result.truncated) == (True, False)


@given(
    st.lists(
        st.sampled_from(["<answer>Up</answer>", "<answer>Down || Up</answer>", "", "<answer>x || Down</answer>"]),
        max_size=12,
    )
)
def test_rewards_are_the_sum_of_their_components_and_budgets_hold(texts: list[str]) -> None:
    play, played = episode(max_turns=8), 0
    for turn, text in enumerate(texts, 1):
        result = play.step(assistant(text))
        played += len(result.info.extra["actions"])
        assert result.reward == pytest.approx(sum(result.info.reward_components.values()))
        assert result.info.extra["actions_left"] == 10 - played >= 0
        assert not (result.terminated and result.truncated)
        assert result.over == (result.info.success or turn == 8 or played == 10)
        if result.over:
            break


def test_chat_tells_what_is_left_and_what_was_wrong() -> None:
    play = episode(talk="chat")
    assert play.step(assistant("<answer>Up</answer>")).messages[0]["content"] == "5 turns and 9 actions left.\nn=1"
    assert (
        play.step(assistant("?"))
        .messages[0]["content"]
        .startswith("Not a valid answer; write <answer>Up || Down</answer>.\n")
    )
