"""Rewards beyond the environment's own: part of the run's configuration (shared/schema.py).

`data.rewards` decides the rewards and is pinned with the run. `services.env.reward_servers` says where to ask for them
and what they may cost; it may change at any time.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import orjson
from pydantic import (
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from shared.section import Section
from shared.server_schema import ForeignServerSection

MOST_COMPONENTS = 16
COMPONENT = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$"

PROMPT = """Grade the assistant's answer to the task below.

The task:
{task}

The answer:
{answer}

Say in a few sentences what is right and what is wrong with the answer. Then end with one line: Score: N, where N is a \
whole number from 0 (useless) to 10 (perfect)."""

_PLACEHOLDER = re.compile(r"\{(task|answer|conversation|expected)\}")
DEFAULT_PATTERN = (
    r"(?im)^[ \t>#*_`-]{0,8}score[*_`]{0,4}[ \t]{0,4}[:=][ \t*_`]{0,8}(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
    r"(?:[ \t]{0,4}/[ \t]{0,4}(?P<of>[0-9]{1,9}))?[*_`]{0,4}\.?[\s*_`]*\Z"
)
"""Matches a last line of the form Score: N or Score: N/HIGHEST, bold or not."""

type Name = Annotated[str, Field(pattern=COMPONENT)]
type ScaleEnd = Annotated[float, Field(ge=-1e9, le=1e9)]
type ComponentWeight = Annotated[float, Field(ge=-1e6, le=1e6)]


class RewardServer(ForeignServerSection):
    """Server that is asked for rewards.

    `url` is the base of an OpenAI-compatible API (…/v1) for judges, the full address for reward services. A request
    that fails with a transient error is tried up to `attempts` times.
    """

    attempts: Annotated[int, Field(ge=1, le=20)] = 3


class JudgeReward(Section):
    """Grade by a language model.

    `prompt` has the placeholders {task}, {answer}, {conversation} and {expected}. The score is the last number that
    `pattern` finds in the judge's answer (its first group), or the value at `field` of the last JSON object there; it
    is scaled from `scale` to 0 … 1. An answer without a score fails the episode, or scores `unreadable`. `request` adds
    fields to the request, and removes those that it sets to null. A new `version` ignores stored scores.
    """

    type: Literal["judge"]
    server: Name
    model: Annotated[str, Field(min_length=1, max_length=256)]
    weight: ComponentWeight = 1.0
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)] = PROMPT
    pattern: Annotated[str, Field(max_length=1000)] = DEFAULT_PATTERN
    field: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    scale: tuple[ScaleEnd, ScaleEnd] = (0.0, 10.0)
    unreadable: Annotated[float, Field(ge=0, le=1)] | None = None
    request: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    version: Annotated[str, Field(max_length=64)] = ""

    @field_validator("prompt")
    @classmethod
    def _asks(cls, prompt: str) -> str:
        if not {"answer", "conversation"} & set(_PLACEHOLDER.findall(prompt)):
            raise ValueError("must have {answer} or {conversation}, else it judges nothing")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        try:
            n_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        if n_groups < 1:
            raise ValueError("must have a group, like Score: (\\d+)")
        return pattern

    @model_validator(mode="after")
    def _scaled(self) -> JudgeReward:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale={list(self.scale)} must be the lowest and the highest score")
        if taken := {"messages", "model", "stream"} & self.request.keys():
            raise ValueError(f"request cannot set {', '.join(sorted(taken))}")
        try:
            orjson.dumps([self.model, self.prompt, self.version, self.request])
        except TypeError as error:
            raise ValueError(f"this cannot be sent as JSON, whose numbers have 64 bits: {error}") from error
        return self


class ServiceReward(Section):
    """Score, or scores by name, from a reward service. A new `version` ignores stored scores."""

    type: Literal["service"]
    server: Name
    weight: ComponentWeight = 1.0
    version: Annotated[str, Field(max_length=64)] = ""


class EnvironmentRewards(Section):
    """Reward of one environment's episodes.

    It is `environment` times the environment's own reward and, at the end of the episode, `weight` times each
    component's score.
    """

    environment: ComponentWeight = 1.0
    components: Annotated[
        dict[Name, Annotated[JudgeReward | ServiceReward, Field(discriminator="type")]],
        Field(min_length=1, max_length=MOST_COMPONENTS),
    ]


def missing_servers(rewards: dict[str, EnvironmentRewards], servers: dict[str, RewardServer]) -> list[str]:
    """Return a message for each component whose server is not configured."""
    return [
        f"data.rewards.{env}.components.{name}.server={component.server} is none of services.env.reward_servers"
        for env, rewarded in rewards.items()
        for name, component in rewarded.components.items()
        if component.server not in servers
    ]


def filled(prompt: str, values: dict[str, str]) -> str:
    """Fill in all placeholders at once: the values may contain braces themselves."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], prompt)
