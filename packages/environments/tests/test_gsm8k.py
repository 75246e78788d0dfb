import os
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.env.episode_types import assistant
from shared.errors import ConfigError, NotFound
from volley.layout import PROJECT
from volley_environments.gsm8k.data import read_number, same_number
from volley_environments.gsm8k.environment import Gsm8k, Gsm8kConfig
from volley_serving.dialects.calls import tool_calls, write_call


@given(st.integers(-(10**12), 10**12), st.text(alphabet=st.characters(exclude_characters="#")))
def test_strict_reads_the_number_after_the_mark(number: int, before: str) -> None:
    for text in (f"{before}#### {number}", f"{before}#### {number:,}", f"#### 7\n{before}#### {number} apples."):
        found = read_number(text, "strict")
        assert found is not None
        assert same_number(found, str(number))


@given(st.integers(0, 10**9), st.text(alphabet=st.characters(exclude_categories=["Nd"], exclude_characters=",.-")))
def test_flexible_reads_the_last_number(number: int, after: str) -> None:
    assert read_number(f"1 and 2.5, so {number:,}{after}", "flexible") == str(number)


@given(st.text())
def test_extraction_is_total(text: str) -> None:
    for mode in ("strict", "flexible"):
        found = read_number(text, mode)
        assert found is None or same_number(found, found) or len(found) > 64


@pytest.mark.parametrize("text", ["", "72", "###72", "#### ", "#### seventy", "####72", "#### $72"])
def test_strict_needs_the_mark(text: str) -> None:
    assert read_number(text, "strict") is None


@pytest.mark.parametrize(
    ("given_", "expected", "same"), [("72", "72.0", True), ("72", "73", False), ("9" * 65, "9" * 65, False)]
)
def test_numbers_are_compared_by_value(given_: str, expected: str, same: bool) -> None:
    assert same_number(given_, expected) is same


def test_a_range_is_not_a_negative_number() -> None:
    assert read_number("about 10-12", "flexible") == "12"


def grade(files: dict[str, Path], text: str, **config: Any) -> Any:
    return Gsm8k(Gsm8kConfig(**files, **config)).reset("train", 1, 0).step(assistant(text))


def test_single_turn_rewards_the_right_number_only(gsm8k_files: dict[str, Path]) -> None:
    right, wrong = grade(gsm8k_files, "so\n#### 1,080"), grade(gsm8k_files, "#### 1081")
    assert (right.reward, right.terminated, right.info.success) == (1.0, True, True)
    assert (wrong.reward, wrong.terminated, wrong.info.success) == (0.0, True, False)
    assert (right.info.error, wrong.info.error) == (None, None)
    unmarked = grade(gsm8k_files, "it is 1080")
    assert (unmarked.reward, unmarked.info.error) == (0.0, "format")
    assert grade(gsm8k_files, "it is 1080", extraction="flexible").reward == 1


def test_format_is_a_component_of_its_own(gsm8k_files: dict[str, Path]) -> None:
    result = grade(gsm8k_files, "#### 5", format_reward=0.1)
    assert result.info.reward_components == {"correct": 0.0, "format": 0.1}
    assert result.reward == pytest.approx(0.1)


def test_the_calculator_answers_both_ways_of_calling(gsm8k_files: dict[str, Path]) -> None:
    episode = Gsm8k(Gsm8kConfig(**gsm8k_files, tool="calculator")).reset("train", 0, 0)
    tagged = episode.step(assistant("Half. " + write_call("calculator", {"expression": "48/2"})))
    assert [dict(m) for m in tagged.messages] == [{"role": "tool", "content": "24"}]
    assert (tagged.reward, tagged.over, tagged.info.error) == (0.0, False, None)
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "9**9**9"}'}}
    refused = episode.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert refused.messages[0]["content"].startswith("error: exponents")
    assert episode.step(assistant("#### 24")).reward == 1


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '"x"',
        '{"name":"calculator"}',
        '{"name":1,"arguments":{}}',
        '{"name":"shell","arguments":{}}',
        "[" * 100_000,
    ]
    + ['{"name":"calculator","arguments":{"expression":5}}', '{"name":"calculator","arguments":{}}'],
)
def test_bad_calls_get_an_error_observation(gsm8k_files: dict[str, Path], body: str) -> None:
    episode = Gsm8k(Gsm8kConfig(**gsm8k_files, tool="calculator")).reset("train", 0, 0)
    result = episode.step(assistant(f"<tool_call>{body}</tool_call>"))
    assert result.messages[0]["content"].startswith("error: ")
    assert result.info.error == "tool"
    assert not result.over


def test_calls_of_the_openai_shape_are_checked() -> None:
    broken = {"function": {"name": "calculator", "arguments": "{"}}
    for call in (5, {}, {"function": 5}, broken, {"function": {"name": "x", "arguments": [1]}}):
        assert tool_calls({"role": "assistant", "content": "", "tool_calls": [call]})[0].problem


def test_turns_are_bounded(gsm8k_files: dict[str, Path]) -> None:
    episode = Gsm8k(Gsm8kConfig(**gsm8k_files, tool="calculator", max_turns=2)).reset("train", 0, 0)
    call = assistant(write_call("calculator", {"expression": "1+1"}))
    assert [episode.step(call).truncated for _ in range(2)] == [False, True]


def test_without_the_tool_a_call_is_an_answer(gsm8k_files: dict[str, Path]) -> None:
    assert grade(gsm8k_files, write_call("calculator", {"expression": "1"})).terminated


@pytest.mark.parametrize("tool", ["none", "calculator"])
@pytest.mark.parametrize("max_turns", [1, 2, 8])
def test_demonstrations_replay_to_full_reward(gsm8k_files: dict[str, Path], tool: Any, max_turns: int) -> None:
    """The conversation the demonstration claims is the one the environment gives, message for message."""
    env = Gsm8k(Gsm8kConfig(**gsm8k_files, tool=tool, max_turns=max_turns))
    for split, index in (("train", 0), ("train", 1), ("eval", 0)):
        shown = env.demonstration(split, index).messages
        assert not any("<<" in message["content"] for message in shown)
        episode = env.reset(split, index, 0)
        played, result = list(episode.opening), None
        for message in shown:
            if message["role"] == "assistant":
                result = episode.step(message)
                played += [message, *result.messages]
        assert tuple(played) == shown
        assert result is not None
        assert result.info.success


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file.*data\.train"):
        Gsm8k(Gsm8kConfig(train=tmp_path / "nowhere.jsonl")).num_tasks("train")


NOT_PROBLEMS = [
    "{",
    "[]",
    '{"question": "a"}',
    '{"question": "a", "answer": "no mark"}',
    '{"question": 1, "answer": "#### 1"}',
]


@pytest.mark.parametrize("line", NOT_PROBLEMS)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        Gsm8k(Gsm8kConfig(train=path)).num_tasks("train")


def test_without_files_the_environment_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        _ = Gsm8k(Gsm8kConfig()).splits


def test_a_split_without_a_file_does_not_exist(gsm8k_files: dict[str, Path]) -> None:
    env = Gsm8k(Gsm8kConfig(train=gsm8k_files["train"]))
    assert env.splits == ("train",)
    with pytest.raises(NotFound, match="no split 'eval'"):
        env.reset("eval", 0, 0)
    with pytest.raises(NotFound, match="indices run from 0 to 1"):
        env.reset("train", 2, 0)


def test_an_endless_number_is_not_kept(gsm8k_files: dict[str, Path]) -> None:
    assert len(grade(gsm8k_files, f"#### {'9' * 100_000}").info.extra["answer"]) == 64


def files_of_gsm8k() -> list[Path]:
    """The data set's two files: in the folder VOLLEY_GSM8K names, or in shared/data/gsm8k of a folder around the
    project. Skips the test where they are not.
    """
    around = [folder / "shared" / "data" / "gsm8k" for folder in PROJECT.parents]
    for folder in [Path(os.environ["VOLLEY_GSM8K"])] if "VOLLEY_GSM8K" in os.environ else around:
        files = [folder / "train.jsonl", folder / "test.jsonl"]
        if all(path.is_file() for path in files):
            return files
    pytest.skip("GSM8K's train.jsonl and test.jsonl are not here: set VOLLEY_GSM8K to their folder")


ANS_RE = re.compile(r"#### (\-?[0-9\.\,]+)")
"""Of openai/grade-school-math, dataset.py."""


def original_answer(completion: str) -> str:
    """extract_answer of openai/grade-school-math, which `is_correct` compares as text."""
    match = ANS_RE.search(completion)
    return match.group(1).strip().replace(",", "") if match else "[invalid]"


def test_every_problem_of_gsm8k_is_read_and_graded_as_its_authors_do() -> None:
    """All 8,792: the gold answer, and the verdict on the solution, near misses and answers without the mark."""
    train, test = files_of_gsm8k()
    env = Gsm8k(Gsm8kConfig(train=train, eval=test))
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (7473, 1319)
    for split, path in (("train", train), ("eval", test)):
        for index, line in enumerate(path.read_bytes().splitlines()):
            gold = original_answer(orjson.loads(line)["answer"])
            solution = env.demonstration(split, index).messages[-1]["content"]
            for said in (solution, f"#### {gold}", f"#### {gold}1", f"#### 7{gold}", f"so {gold}", f"####{gold}"):
                result = env.reset(split, index, 0).step(assistant(said))
                assert result.info.extra["expected"] == gold
                assert result.info.success == (original_answer(said) == gold), (path.name, index, said)


def test_a_wrong_answer_may_be_corrected_for_the_rewards_of_grl(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(orjson.dumps({"question": "1 + 1?", "answer": "#### 2"}))
    config = Gsm8kConfig(
        train=path,
        extraction="flexible",
        correct_reward=10.0,
        wrong_reward=-0.1,
        attempts=3,
        max_turns=5,
        system_prompt="S",
        prompt="P",
    )
    environment = Gsm8k(config)
    episode = environment.reset("train", 0, 0)
    assert [dict(message) for message in episode.opening] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "P\n1 + 1?"},
    ]
    results = [episode.step(assistant(text)) for text in ("3", "none", "so 2")]
    assert [result.reward for result in results] == [-0.1, -0.1, 10.0]
    assert [result.over for result in results] == [False, False, True]
    assert len(results[0].messages) == 1
    gives_up = environment.reset("train", 0, 0)
    ended = [gives_up.step(assistant("5")) for _ in range(3)]
    assert [(result.terminated, result.info.success) for result in ended] == [
        (False, False),
        (False, False),
        (True, False),
    ]
