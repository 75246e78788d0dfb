"""Wire schemas of requests, from which the OpenAPI page is made."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, JsonValue, model_validator
from pydantic.config import JsonDict

from services.env.backends.remote.address import MAX_URL
from services.env.episode_types import Message
from shared.bounds import check_json
from shared.dialects.calls import MAX_CALLS
from shared.types import MAX_MESSAGE
from shared.web import http

RequestId = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Index = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _example(**body: JsonValue) -> JsonDict:
    """Example body for the OpenAPI page."""
    return {"examples": [body]}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitBody(Body, json_schema_extra=_example(split="train")):
    split: Annotated[Name, Field(examples=["train"])]


class TaskBody(Body, json_schema_extra=_example(split="train", index=0)):
    split: Annotated[Name, Field(examples=["train"])]
    index: Annotated[Index, Field(examples=[0])]


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
EntryName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?$")]
Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
MAX_CONFIG, MAX_CONFIG_VALUES = 16 * 1024, 256
"""Limits of `config`, in bytes as JSON and in values; settings are stored and shown with every version."""


def _check_config(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    data = json.dumps(config).encode()
    if len(data) > MAX_CONFIG:
        raise ValueError(f"config has {len(data)} bytes as JSON; the limit is {MAX_CONFIG}")
    check_json(data, "config", MAX_CONFIG_VALUES)
    return config


Config = Annotated[dict[str, JsonValue], AfterValidator(_check_config)]


class SubmitQuery(Body, json_schema_extra=_example(name="adder", weight=1.0)):
    """Query of a file submission.

    `entry` names the class if the file has several; `config`, as JSON text, holds the arguments of the class or the
    settings of task folders; `weight` is the share in live runs, relative to 1 for the run's own environment, and 0
    joins none.
    """

    name: EnvName
    entry: EntryName | None = None
    config: Annotated[Json[dict[str, JsonValue]], AfterValidator(_check_config)] = {}
    weight: Weight = 0.0


class SubmitBody(
    Body,
    json_schema_extra=_example(name="adder", source='class Adder:\n    splits = {"train": 10}\n    ...', weight=1.0),
):
    """One Python file as text; `config` holds the arguments of its class."""

    name: EnvName
    source: Annotated[str, Field(min_length=1)]
    entry: EntryName | None = None
    config: Config = {}
    weight: Weight = 0.0


class ReplaceBody(Body, json_schema_extra=_example(source='class Adder:\n    splits = {"train": 10}\n    ...')):
    """The next version of the environment in the path."""

    source: Annotated[str, Field(min_length=1)]
    entry: EntryName | None = None
    config: Config = {}
    weight: Weight = 0.0


class RemoteBody(
    Body,
    json_schema_extra=_example(
        name="echo", url="http://127.0.0.1:8000", protocol="openenv", config={"action_field": "message"}, weight=1.0
    ),
):
    """An environment on another server; `config` holds the settings of the protocol.

    `tasks` are JSON lines by split, for servers without tasks of their own (nemo_gym).
    """

    name: EnvName
    url: Annotated[str, Field(min_length=1, max_length=MAX_URL)]
    protocol: Annotated[str, Field(min_length=1, max_length=80)]
    tasks: dict[str, str] = {}
    config: Config = {}
    weight: Weight = 0.0


class AdapterBody(Body, json_schema_extra=_example(name="tac", adapter="textarena", config={"game": "TicTacToe-v0"})):
    """An environment of another package, played by the named adapter; `config` holds the adapter's settings."""

    name: EnvName
    adapter: Annotated[str, Field(min_length=1, max_length=80)]
    config: Config = {}
    weight: Weight = 0.0


class InstalledBody(
    Body, json_schema_extra=_example(name="maze", import_path="my_package.envs:Maze", config={"size": 7})
):
    """An environment of an installed package, which declares it as an entry point.

    `config` holds the arguments of its class.
    """

    name: EnvName
    import_path: Annotated[str, Field(min_length=1, max_length=300)]
    config: Config = {}
    weight: Weight = 0.0


class RegisterBody(Body, json_schema_extra=_example(name="frozen_lake-6", base="frozen_lake", config={"size": 6})):
    """A configured variant of the environment `base`."""

    name: EnvName
    base: Name
    config: Config = {}
    weight: Weight = 0.0


class CreateBody(Body, json_schema_extra=_example(request_id="1", env="frozen_lake", split="train", index=0)):
    """`seed` drives everything random in the episode; by default it is derived from `request_id`."""

    request_id: RequestId
    env: Name
    split: Name
    index: Index
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class AssistantMessage(BaseModel):
    """OpenAI's assistant message; its other fields are ignored. `content` may be null only beside tool calls."""

    model_config = ConfigDict(frozen=True)

    role: Literal["assistant"] = "assistant"
    content: Annotated[str, Field(max_length=MAX_MESSAGE)] | None = None
    tool_calls: Annotated[list[JsonValue], Field(max_length=MAX_CALLS)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("message has no content; send the assistant's text, which may be empty")
        return self

    def as_message(self) -> Message:
        message = Message(role="assistant", content=self.content or "")
        return {**message, "tool_calls": self.tool_calls} if self.tool_calls else message


_ACTION: JsonDict = {"role": "assistant", "content": "<answer>Right || Down</answer>"}


class StepBody(Body, json_schema_extra=_example(request_id="1", message=_ACTION)):
    request_id: RequestId
    message: AssistantMessage


class FinishBody(Body, json_schema_extra=_example(request_id="2")):
    """`output` is what an agent outside sends at its end, for the environment to judge."""

    request_id: RequestId
    output: Annotated[str, Field(max_length=MAX_MESSAGE)] | None = None


class RunBody(
    Body,
    json_schema_extra=_example(request_id="1", base_url="http://127.0.0.1:8002/v1", api_key="sess-1", model="policy"),
):
    """Address of the model for the program of an episode, and the key of its session.

    The program reaches `base_url` and nothing else.
    """

    request_id: RequestId
    base_url: Annotated[str, Field(max_length=MAX_URL, pattern=r"^https?://[^\s?#]+/v1/?$")]
    api_key: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[\x21-\x7e]+$")]
    model: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]


class RunQuery(Body, json_schema_extra=_example(wait_s=20)):
    wait_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


class ToolsQuery(Body, json_schema_extra=_example(env="gsm8k")):
    """`env` is an environment that has tools; by default, the tools that any environment can have."""

    env: Name | None = None


class CallBody(Body, json_schema_extra=_example(arguments={"expression": "48/2"})):
    """`seed` drives everything random in the tool."""

    arguments: dict[str, JsonValue]
    env: Name | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


async def read[B: Body](request: Request, model: type[B]) -> B:
    """Read the JSON or msgpack body as `model`; for a GET, the query string.

    Raises DecodeError, or InputError naming the field.
    """
    if request.method == "GET":
        return http.validated(model, dict(request.query_params), strict=False)
    return await http.read_model(request, model)
