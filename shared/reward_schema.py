"""How episodes are rewarded beyond what their environment gives: a part of the run's configuration (shared/schema.py).

What decides the rewards stands in `data.rewards`, and is pinned with the run; where they are asked for, and what that
may cost, stands in `services.env.reward_servers`, and may change at any time.
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
from shared.server_schema import ForeignServer

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
"""The last line, which says Score: N or Score: N/HIGHEST and nothing else, bold or not."""

type Name = Annotated[str, Field(pattern=COMPONENT)]
type ScaleEnd = Annotated[float, Field(ge=-1e9, le=1e9)]
type ComponentWeight = Annotated[float, Field(ge=-1e6, le=1e6)]


class RewardServer(ForeignServer):
    """Where rewards are asked for. `url` is the base of an OpenAI-compatible API (…/v1) for judges, the whole address
    for reward services.

    A request that fails in passing is made up to `attempts` times.
    """

    attempts: Annotated[int, Field(ge=1, le=20)] = 3


class JudgeReward(Section):
    """A language model's grade. `prompt` has the places {task}, {answer}, {conversation} and {expected}; the score is
    the last number that `pattern` finds in what the judge says (its first group), or what stands at `field` of the last
    JSON object there, and is brought from `scale` to 0 … 1. An answer without one fails the episode, or counts as
    `unreadable`. `request` adds fields to the request, and takes those away that it sets to null. A new `version` asks
    anew.
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
    """A score, or scores by name, that a service of one's own gives. A new `version` asks anew."""

    type: Literal["service"]
    server: Name
    weight: ComponentWeight = 1.0
    version: Annotated[str, Field(max_length=64)] = ""


class EnvironmentRewards(Section):
    """The reward of one environment's episodes: `environment` times its own, and at the end of the episode `weight`
    times the score of each component.
    """

    environment: ComponentWeight = 1.0
    components: Annotated[
        dict[Name, Annotated[JudgeReward | ServiceReward, Field(discriminator="type")]],
        Field(min_length=1, max_length=MOST_COMPONENTS),
    ]


def missing_servers(rewards: dict[str, EnvironmentRewards], servers: dict[str, RewardServer]) -> list[str]:
    """The components whose server there is not, as sentences."""
    return [
        f"data.rewards.{env}.components.{name}.server={component.server} is none of services.env.reward_servers"
        for env, rewarded in rewards.items()
        for name, component in rewarded.components.items()
        if component.server not in servers
    ]


def filled(prompt: str, values: dict[str, str]) -> str:
    """The prompt with its places filled in, all at once: what is filled in may hold braces of its own."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], prompt)
