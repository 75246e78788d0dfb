"""Section `judges` of the configuration: judges of whole groups, and their servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, JsonValue, model_validator

from shared.errors import ConfigError
from shared.reward_schema import MOST_COMPONENTS, ComponentWeight, Name, RewardServer, ScaleEnd
from shared.schema import RunConfig
from shared.section import PackageSection, Section

type Method = Literal["ranking", "pairwise", "tournament"]
_SET_BY_JUDGE = {"messages", "model", "stream", "n"}
_MOST_CRITERIA = 32
_LEAST_COMPARED = 2


class _Judge(Section):
    """A model on a server of `judges.servers`, and what it sees.

    `shows` is what of an episode the judge sees after the task: its last answer, or all of its turns. `request` adds
    fields to the request, and removes those that it sets to null. A new `version` ignores stored answers.
    """

    server: Name
    model: Annotated[str, Field(min_length=1, max_length=256)]
    weight: ComponentWeight = 1.0
    shows: Literal["answer", "conversation"] = "conversation"
    request: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    version: Annotated[str, Field(max_length=64)] = ""

    @model_validator(mode="after")
    def _sendable(self) -> _Judge:
        if taken := _SET_BY_JUDGE & self.request.keys():
            raise ValueError(f"request cannot set {', '.join(sorted(taken))}")
        try:
            orjson.dumps([self.model, self.version, self.request])
        except TypeError as error:
            raise ValueError(f"this cannot be sent as JSON, whose numbers have 64 bits: {error}") from error
        return self


class ComparisonJudge(_Judge):
    """Comparison of the answers of a group by `criterion`; a score is from 0 to 1.

    `ranking` asks once for the order of all answers, `pairwise` about every two answers in both orders, `tournament`
    about the pairs of a single elimination, in both orders.
    """

    type: Method
    criterion: Annotated[str, Field(min_length=1, max_length=20_000)] = "how well the answer solves the task"


class Criterion(Section):
    """One criterion of a rubric: what is marked, and the weight of its mark among the others."""

    text: Annotated[str, Field(min_length=1, max_length=20_000)]
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0


def _criterion(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


class RubricJudge(_Judge):
    """Marks by several criteria, from `scale[0]` to `scale[1]`, which become 0 and 1.

    `per` is what is marked: an episode, or each of its turns; the marks of turns are divided by their number.
    """

    type: Literal["rubric"]
    criteria: Annotated[
        dict[Name, Annotated[Criterion, BeforeValidator(_criterion, json_schema_input_type=str | Criterion)]],
        Field(min_length=1, max_length=_MOST_CRITERIA),
    ]
    per: Literal["episode", "turn"] = "episode"
    scale: tuple[ScaleEnd, ScaleEnd] = (0.0, 10.0)

    @model_validator(mode="after")
    def _consistent(self) -> RubricJudge:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale={list(self.scale)} must be the lowest and the highest mark")
        if self.per == "turn" and self.shows == "answer":
            raise ValueError("per=turn marks every turn, so it cannot be combined with shows=answer")
        return self


type GroupJudge = Annotated[ComparisonJudge | RubricJudge, Field(discriminator="type")]


class JudgesSection(PackageSection):
    """Judges of whole groups, which add to the rewards of training episodes.

    `rewards` has the judges of each environment, by the name of their reward. `servers` are their servers.
    """

    reason = "groups with and without a judge's reward cannot be compared"
    changeable: ClassVar[dict[str, str]] = {"servers": "it only says where judges are asked, and what they may cost"}
    servers: dict[Name, RewardServer] = Field(default_factory=dict[str, RewardServer])
    rewards: dict[str, Annotated[dict[Name, GroupJudge], Field(min_length=1, max_length=MOST_COMPONENTS)]] = Field(
        default_factory=dict[str, dict[str, GroupJudge]]
    )

    @model_validator(mode="after")
    def _known_servers(self) -> JudgesSection:
        for env, name, judge in self.every():
            if judge.server not in self.servers:
                raise ValueError(f"judges.rewards.{env}.{name}.server={judge.server} is none of judges.servers")
        return self

    def every(self) -> Iterator[tuple[str, str, GroupJudge]]:
        """Yield environment, name and settings of every judge."""
        for env, judges in self.rewards.items():
            for name, judge in judges.items():
                yield env, name, judge

    def of(self, env: str) -> dict[str, GroupJudge]:
        """Return the judges of an environment; NAME@VERSION has those of NAME unless it has its own."""
        return self.rewards.get(env) or self.rewards.get(env.partition("@")[0]) or {}

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError for judges that this run cannot have."""
        for env, name, judge in self.every():
            key, others = f"judges.rewards.{env}.{name}", config.data.rewards.get(env)
            if isinstance(judge, ComparisonJudge) and config.grpo_config.num_generations < _LEAST_COMPARED:
                raise ConfigError(
                    f"{key}.type={judge.type} compares the episodes of a group, and groups have one",
                    "raise grpo_config.num_generations, or use type: rubric",
                )
            if others is not None and name in others.components:
                raise ConfigError(f"{key} and data.rewards.{env}.components.{name} have one name", "rename one")

    def findings(self, config: RunConfig) -> Iterator[str]:
        self.check(config)
        for env, name, judge in self.every():
            if isinstance(judge, RubricJudge) and judge.per == "turn" and not config.algorithm.credits_turns:
                yield (
                    f"judges.rewards.{env}.{name}.per=turn has the effect of a mark for the whole episode, unless"
                    " algorithm.credit=turn"
                )
