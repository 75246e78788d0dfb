"""GSM8K: grade-school word problems, answered at once or with a calculator over several turns.

The reward is 1 for the right number after `#### ` (or as the last number, with `extraction: flexible`), plus
`format_reward` if the answer is after `#### `. With `attempts` above 1, a wrong answer may be corrected.
Demonstrations are the dataset's solutions; with the calculator, their `<<48/2=24>>` annotations become calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.env.episode_types import (
    MAX_REWARD,
    Demonstration,
    Info,
    Message,
    StepResult,
    assistant,
    user,
)
from volley_environments.gsm8k.data import (
    MAX_NUMBER,
    Problem,
    read_number,
    read_problems,
    same_number,
    solution_messages,
    solution_text,
)
from volley_environments.problem_files import ProblemFiles, files_of_splits
from volley_sandbox.tools.arithmetic import CalculatorError, calculate
from volley_serving.dialects.calls import CallFormat, ToolCall, tool_calls, write_call

CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression with + - * / // % ** and parentheses.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}

_MAX_CALLS_PER_TURN = 8
_ASK = "Think step by step and end with the final answer as a number after ####, like: #### 42"
_TOOL = f"You can use a calculator: write {write_call('calculator', {'expression': '48/2'})} and wait for its result."


class Gsm8kConfig(BaseModel):
    """`train` and `eval` are JSONL files with `question` and `answer`; a split without a file does not exist.

    `prompt` comes before the question, in place of the request for `#### `. A wrong answer is worth `wrong_reward` and
    may be corrected until `attempts` are used up (GRL: 10 for a right answer, -0.1 for a wrong one).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    train: Path | None = None
    eval: Path | None = None
    tool: Literal["none", "calculator"] = "none"
    extraction: Literal["strict", "flexible"] = "strict"
    max_turns: int = Field(default=8, ge=1, le=64)
    correct_reward: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    wrong_reward: float = Field(default=0.0, ge=-MAX_REWARD, le=0)
    format_reward: float = Field(default=0.0, ge=0, le=MAX_REWARD)
    attempts: int = Field(default=1, ge=1, le=64)
    system_prompt: str = Field(default="", max_length=20_000)
    prompt: str = Field(default="", max_length=20_000)


@dataclass(slots=True)
class Gsm8kEpisode:
    """One problem in progress."""

    problem: Problem
    config: Gsm8kConfig
    turns: int = 0
    answers: int = 0

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (CALCULATOR,) if self.config.tool == "calculator" else ()

    @property
    def opening(self) -> tuple[Message, ...]:
        return _opening(self.problem, self.config)

    def step(self, message: Message) -> StepResult:
        self.turns += 1
        calls = tool_calls(message)[:_MAX_CALLS_PER_TURN] if self.tools else []
        return self._compute(calls) if calls else self._grade(message["content"])

    def _compute(self, calls: Sequence[ToolCall]) -> StepResult:
        """Answer tool calls. Calls in the last turn truncate the episode."""
        answers = [_answer_call(call) for call in calls]
        fault = "tool" if any(not ok for _, ok in answers) else None
        messages = tuple(Message(role="tool", content=text) for text, _ in answers)
        return StepResult(messages, 0.0, False, self.turns >= self.config.max_turns, Info({}, False, fault))

    def _grade(self, text: str) -> StepResult:
        number = read_number(text, self.config.extraction)
        right = number is not None and same_number(number, self.problem.answer)
        rewards = {"correct": self.config.correct_reward if right else self.config.wrong_reward}
        self.answers += 1
        if self.config.format_reward:
            marked = read_number(text, "strict") is not None
            rewards["format"] = self.config.format_reward if marked else 0.0
        info = Info(
            rewards,
            right,
            "format" if number is None else None,
            {"answer": number and number[:MAX_NUMBER], "expected": self.problem.answer},
        )
        if right or self.answers >= self.config.attempts:
            return StepResult((), sum(rewards.values()), True, False, info)
        again = user("The answer is wrong. Think again.")
        return StepResult((again,), sum(rewards.values()), False, self.turns >= self.config.max_turns, info)


class Gsm8k(ProblemFiles[Problem]):
    """Environment of GSM8K. Files are read at the first use; raises ConfigError if one is missing or malformed."""

    def __init__(self, config: Gsm8kConfig) -> None:
        hint = "set data.train and data.eval to the dataset's train.jsonl and test.jsonl"
        files = files_of_splits(config.train, config.eval)
        super().__init__("gsm8k", files, read_problems, lambda problem: problem.question, hint)
        self._config = config

    def reset(self, split: str, index: int, seed: int) -> Gsm8kEpisode:
        """Start an episode. `seed` has no effect, because nothing is random."""
        return Gsm8kEpisode(self.problem(split, index), self._config)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The dataset's own solution."""
        problem = self.problem(split, index)
        ask = _opening(problem, self._config)
        if self._config.tool == "calculator":
            return Demonstration((*ask, *solution_messages(problem, self._config.max_turns)), True, (CALCULATOR,))
        return Demonstration((*ask, assistant(solution_text(problem))), success=True)

    def calculator_demonstration(self, split: str, index: int, max_turns: int, form: CallFormat) -> Demonstration:
        """The dataset's own solution with its annotations as calculator calls. Raises NotFound."""
        problem = self.problem(split, index)
        ask = _opening(problem, self._config)
        return Demonstration((*ask, *solution_messages(problem, max_turns, form)), success=True)


def _opening(problem: Problem, config: Gsm8kConfig) -> tuple[Message, ...]:
    asked = [config.prompt, problem.question] if config.prompt else [problem.question, _ASK]
    text = "\n".join(asked + ([_TOOL] if config.tool == "calculator" else []))
    system: Message = {"role": "system", "content": config.system_prompt}
    return (*[system][: bool(config.system_prompt)], user(text))


def _answer_call(call: ToolCall) -> tuple[str, bool]:
    """Answer to a call, and True if it was carried out."""
    if call.problem:
        return f"error: {call.problem}", False
    if call.name != "calculator":
        return f"error: there is no tool {call.name[:40]!r}, only calculator", False
    expression = (call.arguments or {}).get("expression")
    if not isinstance(expression, str):
        return "error: calculator needs an argument expression, a string", False
    try:
        return calculate(expression), True
    except CalculatorError as error:
        return f"error: {error}", False
