"""Mathematics with a boxed answer: problems from JSONL, one answer an episode.

An answer equal to the gold text is right at once; math-verify, in a grading process (`library.py`), decides on any
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.env.episode_types import (
    MAX_EXPECTED,
    MAX_REWARD,
    Demonstration,
    Info,
    Message,
    StepResult,
    assistant,
    user,
)
from shared.errors import GradingEnded
from volley_environments.math.boxed import boxed_answer
from volley_environments.math.data import MathProblem, read_math
from volley_environments.problem_files import ProblemFiles, files_of_splits
from volley_sandbox.grading.pool import GradingPool

_LIBRARY = GradingPool("volley_environments.math.library")
_ASK = "Think step by step and put the final answer in a box: \\boxed{…}"
_MAX_SHOWN = 256


class MathConfig(BaseModel):
    """`train` and `eval` are JSONL files with `problem` and `answer`; a split without a file does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    train: Path | None = None
    eval: Path | None = None
    correct_reward: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    format_reward: float = Field(default=0.0, ge=0, le=MAX_REWARD)


@dataclass(frozen=True, slots=True)
class MathEpisode:
    """One problem with one answer."""

    problem: MathProblem
    config: MathConfig
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def opening(self) -> tuple[Message, ...]:
        return (_question(self.problem),)

    def step(self, message: Message) -> StepResult:
        answer = boxed_answer(message["content"])
        extra: dict[str, Any] = {
            "answer": answer and answer[:_MAX_SHOWN],
            "expected": self.problem.answer[:MAX_EXPECTED],
        }
        right = False
        try:
            right = answer is not None and is_right(self.problem.answer, answer)
        except GradingEnded as ended:
            extra["grading"] = ended.detail
        rewards = {"correct": self.config.correct_reward if right else 0.0}
        if self.config.format_reward:
            rewards["format"] = 0.0 if answer is None else self.config.format_reward
        info = Info(rewards, right, "format" if answer is None else None, extra)
        return StepResult((), sum(rewards.values()), True, False, info)


class Math(ProblemFiles[MathProblem]):
    """Environment of math problems.

    Files are read at the first use; raises ConfigError if one is missing or malformed.
    """

    def __init__(self, config: MathConfig) -> None:
        hint = "set data.train and data.eval to JSONL files of problem and answer"
        files = files_of_splits(config.train, config.eval)
        super().__init__("math", files, read_math, lambda problem: problem.problem, hint)
        self._config = config

    def reset(self, split: str, index: int, seed: int) -> MathEpisode:
        """Start an episode. `seed` has no effect, because nothing is random."""
        return MathEpisode(self.problem(split, index), self._config)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The data set's solution, or the boxed answer alone."""
        problem = self.problem(split, index)
        return Demonstration((_question(problem), assistant(problem.solution)), success=True)


def is_right(gold: str, answer: str) -> bool:
    """True if `answer` is equivalent to `gold`. Raises GradingEnded if the comparison exceeds its limits."""
    return answer.strip() == gold.strip() or _LIBRARY.grade("equal", gold, answer)


def _question(problem: MathProblem) -> Message:
    return user(f"{problem.problem}\n{_ASK}")
