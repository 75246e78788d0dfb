"""reasoning-gym: procedural questions with verifiers, any dataset of the package by name; one answer an episode.

The package runs in grading processes (`reasoning_gym_library`): it is heavy, some of its datasets use Python's global
random numbers, and some of its scorers evaluate the answer. The reward is what the dataset's own scorer gives.

A question belongs to the split that its text's hash says, so an evaluation question is never a training question,
whichever seed made it; see `layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from services.env.environments.games.layouts import MAX_DISTINCT, Effort, Layouts, as_it_is
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
from services.env.grading.answers import tagged_answer
from services.env.grading.pool import GradingPool
from shared.errors import GradingEnded, NotFound

_LIBRARY = GradingPool("services.env.environments.adapters.reasoning_gym_library")
"""Shared by all environments of the kind: the package is loaded once or twice, whatever their number."""

_DRAW_EFFORT = 1000
_SEEDS = 2**31
"""Upstream seeds go into numpy too, which takes 32 bits."""

_ASK = "Give the final answer in <answer> tags, like <answer>42</answer>."
_MAX_SHOWN = 256


class ReasoningGymConfig(BaseModel):
    """`dataset` names one of the package, `dataset_config` holds its settings: they set how difficult it is.

    `talk: bare` sends the question alone, for models too small to read instructions.
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
            raise ValueError(f"dataset_config has no {' and '.join(sorted(taken))}: they come from split and index")
        return self


@dataclass(frozen=True, slots=True)
class Question:
    """One item of a dataset; `answer` is the dataset's own, if it has one."""

    text: str
    answer: str | None
    seed: int


@dataclass(frozen=True, slots=True)
class ReasoningGymEpisode:
    """One question, to be answered once."""

    env: ReasoningGym
    question: Question
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
    """The environment. The package is loaded with the first question, in a process of its own."""

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
            form=as_it_is,
        )

    def num_tasks(self, split: str) -> int:
        return self._questions.count(split)

    def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{self._questions.get(split, index).digest}"

    def reset(self, split: str, index: int, seed: int) -> ReasoningGymEpisode:
        """Nothing is random once the question is chosen: `seed` changes nothing."""
        return ReasoningGymEpisode(self, self.question(split, index))

    def question(self, split: str, index: int) -> Question:
        return self._questions.get(split, index).layout

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The dataset's own answer; a few datasets have one that their scorer gives less than 1. Raises NotFound where
        there is none.
        """
        question = self.question(split, index)
        if question.answer is None:
            raise NotFound(f"{self._config.dataset} has no answer of its own to {split}/{index}")
        said = assistant(f"<answer>{question.answer}</answer>")
        result = ReasoningGymEpisode(self, question).step(said)
        return Demonstration((self.ask(question), said), result.info.success)

    def ask(self, question: Question) -> Message:
        return user(question.text if self._config.talk == "bare" else f"{question.text}\n{_ASK}")

    def score(self, question: Question, answer: str) -> float:
        """Raises GradingEnded when the scorer takes more than its share."""
        return _LIBRARY.grade("score", self._config.dataset, self._settings, question.seed, answer)

    def _make(self, seed: int, effort: Effort) -> Question:
        effort.spend(_DRAW_EFFORT)
        text, answer = _LIBRARY.call("question", self._config.dataset, self._settings, seed % _SEEDS)
        return Question(text, answer, seed % _SEEDS)
