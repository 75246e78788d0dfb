"""Wire schemas of requests, from which the OpenAPI page is made."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.config import JsonDict

from services.env.episode_types import Message
from shared.bounds import MAX_CALLS, MAX_SHOWN, MAX_URL
from shared.types import MAX_MESSAGE
from shared.web import http

RequestId = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Index = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def example(**body: JsonValue) -> JsonDict:
    """Example body for the OpenAPI page."""
    return {"examples": [body]}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitBody(Body, json_schema_extra=example(split="train")):
    split: Annotated[Name, Field(examples=["train"])]


class TaskBody(Body, json_schema_extra=example(split="train", index=0)):
    split: Annotated[Name, Field(examples=["train"])]
    index: Annotated[Index, Field(examples=[0])]


class TasksBody(Body, json_schema_extra=example(split="train", indices=[0, 1])):
    split: Annotated[Name, Field(examples=["train"])]
    indices: Annotated[list[Index], Field(min_length=1, max_length=MAX_SHOWN, examples=[[0, 1]])]


class CreateBody(Body, json_schema_extra=example(request_id="1", env="frozen_lake", split="train", index=0)):
    """`seed` drives everything random in the episode; by default it is derived from `request_id`.

    `snapshot`: the episode goes on from `info.snapshot` of a step, instead of its beginning.
    """

    request_id: RequestId
    env: Name
    split: Name
    index: Index
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    snapshot: JsonValue = None


class AssistantMessage(BaseModel):
    """OpenAI's assistant message; its other fields are ignored. `content` may be null only with tool calls."""

    model_config = ConfigDict(frozen=True)

    role: Literal["assistant"] = "assistant"
    content: Annotated[str, Field(max_length=MAX_MESSAGE)] | None = None
    tool_calls: Annotated[list[JsonValue], Field(max_length=MAX_CALLS)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("message has no content; send the assistant's text, which may be empty")
        return self

    def as_message(self) -> Message:
        message = Message(role="assistant", content=self.content or "")
        return {**message, "tool_calls": self.tool_calls} if self.tool_calls else message


_ACTION: JsonDict = {"role": "assistant", "content": "<answer>Right || Down</answer>"}


class StepBody(Body, json_schema_extra=example(request_id="1", message=_ACTION)):
    request_id: RequestId
    message: AssistantMessage


class FinishBody(Body, json_schema_extra=example(request_id="2")):
    """`output` is the final output of an external agent, which the environment judges."""

    request_id: RequestId
    output: Annotated[str, Field(max_length=MAX_MESSAGE)] | None = None


class RunBody(
    Body,
    json_schema_extra=example(request_id="1", base_url="http://127.0.0.1:8002/v1", api_key="sess-1", model="policy"),
):
    """Address of the model for the program of an episode, and the key of its session.

    The program reaches `base_url` and nothing else.
    """

    request_id: RequestId
    base_url: Annotated[str, Field(max_length=MAX_URL, pattern=r"^https?://[^\s?#]+/v1/?$")]
    api_key: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[\x21-\x7e]+$")]
    model: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]


class RunQuery(Body, json_schema_extra=example(wait_s=20)):
    wait_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


async def read[B: Body](request: Request, model: type[B]) -> B:
    """Read the JSON or msgpack body as `model`; for a GET, the query string.

    Raises DecodeError, or InputError naming the field.
    """
    if request.method == "GET":
        return http.validated(model, dict(request.query_params), strict=False)
    return await http.read_model(request, model)
