"""reasoning-gym: procedural questions with verifiers, from any dataset of the package; one answer an episode.

The package runs in grading processes (`reasoning_gym_library`): it is heavy, some of its datasets use Python's global
random numbers, and some of its scorers evaluate the answer. The reward is the score of the dataset's own scorer.

A question belongs to the split given by its text's hash, so no evaluation question is a training question, under any
seed; see `layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from services.env.environments.games.layouts import MAX_DISTINCT, Effort, Layouts, identity_form
from services.env.environments.tagged_answers import tagged_answer
from services.env.episode_types import (
    EVAL,
    MAX_EXPECTED,
    TRAIN,
    Demonstration,
    Info,
    Message,
    StepResult,
    assistant,
    user,
)
from shared.errors import GradingEnded, NotFound
from volley_sandbox.grading.pool import GradingPool

_LIBRARY = GradingPool("volley_environments.reasoning.library")
"""Pool shared by all environments of the kind, so that the package is loaded at most twice."""

_DRAW_EFFORT = 1000
_SEEDS = 2**31
"""Bound of upstream seeds, which also seed numpy, limited to 32 bits."""

_ASK = "Give the final answer in <answer> tags, like <answer>42</answer>."
_MAX_SHOWN = 256


class ReasoningGymConfig(BaseModel):
    """Settings of reasoning-gym.

    `dataset` names a dataset of the package, `dataset_config` its settings, which set the difficulty. `talk: bare`
    sends only the question, for models too small to read instructions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str = Field(default="chain_sum", pattern=r"^[a-z0-9_]{1,64}$")
    dataset_config: dict[str, JsonValue] = Field(default={})
    talk: Literal["chat", "bare"] = "chat"
    train_tasks: int = Field(default=100_000, ge=1, le=2**31)
    eval_tasks: int = Field(default=100, ge=1, le=MAX_DISTINCT)

    @model_validator(mode="after")
    def _seeded_here(self) -> ReasoningGymConfig:
        if taken := {"seed", "size"} & self.dataset_config.keys():
            raise ValueError(f"dataset_config has no {' and '.join(sorted(taken))}: split and index determine them")
        return self


@dataclass(frozen=True, slots=True)
class DatasetQuestion:
    """One item of a dataset; `answer` is the dataset's own, if it has one."""

    text: str
    answer: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class ReasoningGymEpisode:
    """One question with one answer."""

    env: ReasoningGym
    question: DatasetQuestion
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def opening(self) -> tuple[Message, ...]:
        return (self.env.ask(self.question),)

    def step(self, message: Message) -> StepResult:
        answer = tagged_answer(message["content"])
        extra: dict[str, Any] = {"expected": self.question.answer and self.question.answer[:MAX_EXPECTED]}
        if answer is None:
            return StepResult((), 0.0, True, False, Info({"score": 0.0}, False, "format", extra))
        score, extra["answer"] = 0.0, answer[:_MAX_SHOWN]
        try:
            score = self.env.score(self.question, answer.strip())
        except GradingEnded as ended:
            extra["grading"] = ended.detail
        return StepResult((), score, True, False, Info({"score": score}, score >= 1.0, None, extra))


class ReasoningGym:
    """Environment of one dataset. The package is loaded with the first question, in a separate process."""

    splits = (TRAIN, EVAL)

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._config = config
        self._settings = json.dumps(config.dataset_config, sort_keys=True)
        self._questions = Layouts(
            f"reasoning_gym/{config.dataset}",
            self._make,
            lambda question: (question.text,),
            {TRAIN: config.train_tasks, EVAL: config.eval_tasks},
            advice="change dataset_config",
            form=identity_form,
        )

    def num_tasks(self, split: str) -> int:
        return self._questions.count(split)

    def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{self._questions.get(split, index).digest}"

    def reset(self, split: str, index: int, seed: int) -> ReasoningGymEpisode:
        """Start an episode. `seed` has no effect, because nothing is random after the choice of the question."""
        return ReasoningGymEpisode(self, self.question(split, index))

    def question(self, split: str, index: int) -> DatasetQuestion:
        return self._questions.get(split, index).layout

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The dataset's own answer, which a few scorers grade below 1. Raises NotFound if there is none."""
        question = self.question(split, index)
        if question.answer is None:
            raise NotFound(f"{self._config.dataset} has no answer of its own to {split}/{index}")
        message = assistant(f"<answer>{question.answer}</answer>")
        result = ReasoningGymEpisode(self, question).step(message)
        return Demonstration((self.ask(question), message), result.info.success)

    def ask(self, question: DatasetQuestion) -> Message:
        return user(question.text if self._config.talk == "bare" else f"{question.text}\n{_ASK}")

    def score(self, question: DatasetQuestion, answer: str) -> float:
        """Score an answer. Raises GradingEnded if the scorer exceeds its limits."""
        return _LIBRARY.grade("score", self._config.dataset, self._settings, question.seed, answer)

    def _make(self, seed: int, effort: Effort) -> DatasetQuestion:
        effort.spend(_DRAW_EFFORT)
        text, answer = _LIBRARY.call("question", self._config.dataset, self._settings, seed % _SEEDS)
        return DatasetQuestion(text, answer, seed % _SEEDS)
