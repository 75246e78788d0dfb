"""Text-to-SQL over SQLite: an answer is right if its query gives the gold query's rows.

Tasks come from JSONL files (BIRD's and Spider's keys, or the schema as SQL), or are made from a seed if there are no
files (`samples.py`). Queries run in a grading process, read-only and bounded (`grading/sql_library.py`). With several
turns a model sees the result of its query, and may try again for a smaller reward.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.env.environments.games.layouts import MAX_DISTINCT, Effort, Layouts, identity_form
from services.env.environments.tagged_answers import tagged_answer
from services.env.episode_types import (
    EVAL,
    MAX_EXPECTED,
    MAX_REWARD,
    TRAIN,
    Demonstration,
    Info,
    Message,
    StepResult,
    assistant,
    check_task,
    user,
)
from shared.errors import GradingEnded
from volley_environments.problem_files import files_of_splits
from volley_environments.text_to_sql.data import SqlTask, read_tasks
from volley_environments.text_to_sql.samples import sample
from volley_sandbox.grading.pool import GradingPool

_LIBRARY = GradingPool("volley_sandbox.grading.sql_library")
_FENCED = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(.*?)```", re.IGNORECASE | re.DOTALL)
_ASK = "Answer with one SQLite query:\n```sql\nSELECT …\n```"
_DRAW_EFFORT = 100
_MAX_QUERY = 20_000
_MAX_SHOWN = 500


class TextToSqlConfig(BaseModel):
    """Settings of text-to-SQL.

    `train` and `eval` are JSONL files, `databases` the folder of the databases that they name; without files,
    `train_tasks` and `eval_tasks` tasks are generated. A right query in turn n is worth `correct_reward` times
    `retry_factor` to the power n - 1 (GRL halves it). `prompt` comes before schema and question, in place of the
    request for one query.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    train: Path | None = None
    eval: Path | None = None
    databases: Path | None = None
    max_turns: int = Field(default=1, ge=1, le=20)
    correct_reward: float = Field(default=1.0, gt=0, le=MAX_REWARD)
    retry_factor: float = Field(default=0.5, ge=0, le=1)
    format_penalty: float = Field(default=0.0, ge=-MAX_REWARD, le=0)
    system_prompt: str = Field(default="", max_length=20_000)
    prompt: str = Field(default="", max_length=20_000)
    train_tasks: int = Field(default=10_000, ge=1, le=2**31)
    eval_tasks: int = Field(default=256, ge=1, le=MAX_DISTINCT)


@dataclass(slots=True)
class TextToSqlEpisode:
    """One question in progress; `shown` holds the database's CREATE statements."""

    sql_task: SqlTask
    shown: str
    config: TextToSqlConfig
    turns: int = 0
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def database(self) -> str:
        """The task's database, for the SQL tool."""
        return self.sql_task.database

    @property
    def opening(self) -> tuple[Message, ...]:
        return _opening(self.sql_task, self.shown, self.config)

    def step(self, message: Message) -> StepResult:
        self.turns += 1
        query = read_query(message["content"])
        if query is None:
            rewards = {"format": self.config.format_penalty} if self.config.format_penalty else {}
            return self._answer("There is no query in a ```sql block.", rewards, Info(rewards, False, "format"))
        extra: dict[str, Any] = {"query": query[:_MAX_SHOWN], "expected": self.sql_task.sql[:MAX_EXPECTED]}
        try:
            found: Mapping[str, Any] = _LIBRARY.grade("grade", self.sql_task.database, self.sql_task.sql, query)
        except GradingEnded as ended:
            extra["grading"] = ended.detail
            found = {"match": False, "problem": "it takes too much memory or time", "n_rows": 0, "shown": ""}
        worth = self.config.correct_reward * self.config.retry_factor ** (self.turns - 1)
        rewards = {"execution": worth if found["match"] else 0.0}
        observation = (
            f"The query fails: {found['problem']}"
            if found["problem"]
            else f"The query gives {found['n_rows']} rows, which are not those asked for:\n{found['shown']}"
        )
        return self._answer(observation, rewards, Info(rewards, bool(found["match"]), None, extra))

    def _answer(self, observation: str, rewards: Mapping[str, float], info: Info) -> StepResult:
        over = info.success or self.turns >= self.config.max_turns
        single = self.config.max_turns == 1
        messages = () if info.success or single else (user(observation),)
        truncated = over and not info.success and not single
        return StepResult(messages, sum(rewards.values()), over and not truncated, truncated, info)


class TextToSql:
    """Environment of text-to-SQL.

    Files are read at the first use; raises ConfigError if one is missing or malformed.
    """

    def __init__(self, config: TextToSqlConfig) -> None:
        self._config = config
        self._files = files_of_splits(config.train, config.eval)
        self._samples = Layouts(
            "text_to_sql",
            _sample,
            lambda task: (task.shown, task.question),
            {TRAIN: config.train_tasks, EVAL: config.eval_tasks},
            form=identity_form,
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._counts)

    @cached_property
    def _tasks(self) -> dict[str, tuple[SqlTask, ...]]:
        return {split: read_tasks(path, self._config.databases) for split, path in self._files.items()}

    @property
    def _counts(self) -> Mapping[str, int]:
        return {split: len(tasks) for split, tasks in self._tasks.items()} if self._files else self._samples.counts

    def num_tasks(self, split: str) -> int:
        check_task("text_to_sql", self._counts, split, 0)
        return self._counts[split]

    def task(self, split: str, index: int) -> str:
        task = self._task(split, index)
        named = f"{task.question}\n{task.database}"
        return f"{split}/{index}@{hashlib.blake2b(named.encode(), digest_size=6).hexdigest()}"

    def reset(self, split: str, index: int, seed: int) -> TextToSqlEpisode:
        """Start an episode. `seed` has no effect, because nothing is random."""
        task = self._task(split, index)
        return TextToSqlEpisode(task, _schema(task), self._config)

    def demonstration(self, split: str, index: int) -> Demonstration:
        """The gold query as an answer."""
        task = self._task(split, index)
        message = assistant(f"```sql\n{task.sql}\n```")
        return Demonstration((*_opening(task, _schema(task), self._config), message), success=True)

    def _task(self, split: str, index: int) -> SqlTask:
        check_task("text_to_sql", self._counts, split, index)
        return self._tasks[split][index] if self._files else self._samples.get(split, index).layout


def read_query(text: str) -> str | None:
    """Query of an answer: its last fenced block, else the content of its <answer> tags; None if there is neither."""
    tagged = tagged_answer(text)
    fenced = _FENCED.findall(text if tagged is None else tagged)
    query = fenced[-1] if fenced else tagged
    return query.strip().rstrip(";").strip()[:_MAX_QUERY] or None if query is not None else None


def _sample(seed: int, effort: Effort) -> SqlTask | None:
    effort.spend(_DRAW_EFFORT)
    return sample(seed)


def _schema(task: SqlTask) -> str:
    return task.shown or _LIBRARY.call("describe", task.database)


def _opening(task: SqlTask, shown: str, config: TextToSqlConfig) -> tuple[Message, ...]:
    before, after = (f"{config.prompt}\n", "") if config.prompt else ("", f"\n{_ASK}")
    system: Message = {"role": "system", "content": config.system_prompt}
    return (*[system][: bool(config.system_prompt)], user(f"{before}{shown}\n\n{task.question}{after}"))
