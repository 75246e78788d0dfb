"""Boxed answers: where they stand, and which of them mean the same, by math-verify and by MATH's own conventions."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.episode_types import assistant
from shared.errors import ConfigError, GradingEnded, NotFound
from volley_environments.math.boxed import boxed_answer
from volley_environments.math.environment import Math, MathConfig, is_right

ROWS = [
    {"problem": "Half of one?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
    {"problem": "What is $(x+1)^2$?", "answer": "x^2+2x+1"},
    {"question": "The roots of x^2=4?", "answer": "\\{-2, 2\\}", "solution": "They are plus and minus two."},
    {"problem": "How many?", "answer": 12},
]


@pytest.fixture
def env(tmp_path: Path) -> Math:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return Math(MathConfig(train=path, format_reward=0.1))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{5}", "5"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1 + \\boxed{2}}", "1 + \\boxed{2}"),
        ("\\fbox{7}", "7"),
        ("\\boxed {8}", "8"),
        ("\\boxed{9", None),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("} { \\boxed{3} {", "3"),
        ("$\\boxed 5$", "5"),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_counts(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@given(st.text(alphabet="\\boxed{} 1", max_size=60))
def test_reading_is_total(text: str) -> None:
    answer = boxed_answer(text)
    assert answer is None or answer in text


def test_reading_takes_linear_time() -> None:
    assert boxed_answer("\\boxed{" * 100_000) is None
    assert boxed_answer("{" * 100_000 + "}" * 100_000) is None


SAME = [
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", "\\dfrac12"),
    ("1,234", "1234"),
    ("(1,2)", "(1, 2)"),
    ("[0,1)", "[0, 1)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\text{(A)}", "A"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("90^\\circ", "90"),
    ("\\$5", "5"),
    ("5", "x=5"),
    ("2^{10}", "1024"),
    ("10\\%", "10"),
    ("\\text{Monday}", "Monday"),
    ("-\\infty", "-\\infty"),
    ("x > 3", "3 < x"),
]
DIFFERENT = [
    ("5", "6"),
    ("\\frac{1}{2}", "\\frac{1}{3}"),
    ("x^2", "x^3"),
    ("(1,2)", "(2,1)"),
    ("\\text{Monday}", "\\text{Tuesday}"),
    ("\\pi", "3.14"),
    ("5", ""),
    ("[0,1)", "(0,1)"),
    ("\\frac{1}{2}", "\\nonsense{ \\frac{1}{2}"),
    ("\\frac{1}{2}", "3 or $\\frac{1}{2}$"),
    ("5", "4 \\text{ or } 5"),
]


@pytest.mark.parametrize(("gold", "answer", "same"), [(*p, True) for p in SAME] + [(*p, False) for p in DIFFERENT])
def test_what_means_the_same(gold: str, answer: str, same: bool) -> None:
    assert is_right(gold, answer) is same


HOSTILE = [
    "\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}",
    "9^{9^{9^{9^9}}}",
    "1000000!!!!",
    "\\sum_{i=1}^{10^{12}} i^{i}",
    "\\int_0^1 x^{x^{x^x}} dx",
    "{" * 900 + "}" * 900,
    "\\frac{1}{" * 151 + "2" + "}" * 151,
    "__import__('os').system('touch {path}')",
    "\\text{__import__('os').system('touch {path}')}",
    "open('{path}','w')",
    "9" * 1999,
    "1" * 100_000,
    "\\",
    "\\frac",
    "\0",
    "\\operatorname{exec}(1)",
]


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_costs_its_own_episode(env: Math, tmp_path: Path, answer: str) -> None:
    path = tmp_path / "pwned"
    result = env.reset("train", 0, 0).step(assistant(f"\\boxed{{{answer.replace('{path}', str(path))}}}"))
    assert not result.info.success
    assert result.terminated
    assert not path.exists()
    assert is_right("2", "1+1")


def test_many_threads_grade_at_once() -> None:
    pairs = [(f"{n}", f"{n - 1}+1") for n in range(30)] + [(f"{n}", f"{n}+1") for n in range(30)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda pair: is_right(*pair), pairs))
    assert verdicts == [True] * 30 + [False] * 30


def test_a_tower_of_powers_is_ended_by_its_limits() -> None:
    with pytest.raises(GradingEnded, match="limits"):
        is_right("5", "9^{9^{9^{9^9}}}!")


def test_rewards_and_faults(env: Math) -> None:
    right, wrong, none = (
        env.reset("train", 1, 0).step(assistant(text)) for text in ("\\boxed{(1+x)^2}", "\\boxed{x}", "(1+x)^2")
    )
    assert right.info.reward_components == {"correct": 1.0, "format": 0.1}
    assert wrong.info.reward_components == {"correct": 0.0, "format": 0.1}
    assert none.info.reward_components == {"correct": 0.0, "format": 0.0}
    assert (right.info.success, wrong.info.success, none.info.success) == (True, False, False)
    assert (right.info.error, wrong.info.error, none.info.error) == (None, None, "format")


def test_demonstrations_replay_to_full_reward(env: Math) -> None:
    assert env.splits == ("train",)
    for index in range(env.num_tasks("train")):
        shown = env.demonstration("train", index)
        episode = env.reset("train", index, 0)
        assert shown.messages[:1] == episode.opening
        assert episode.step(shown.messages[-1]).info.success
    with pytest.raises(NotFound):
        env.task("train", len(ROWS))


@pytest.mark.parametrize("line", ["{", "[]", '{"problem": "a"}', '{"problem": "a", "solution": "no box"}'])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"problem": "a", "answer": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        Math(MathConfig(train=path)).num_tasks("train")


@pytest.mark.parametrize("config", [{}, {"train": Path("/nowhere.jsonl")}])
def test_without_files_it_says_what_to_set(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        _ = Math(MathConfig(**config)).splits
