"""What requests and answers look like on the wire; these models are also the OpenAPI page."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.env.environments.base import Message, StepResult
from services.env.episodes import Slot
from shared import http
from shared.errors import InputError

MAX_CONTENT = 2**20
"""Characters of one message."""

RequestId = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SplitBody(Body):
    split: Name


class TaskBody(Body):
    split: Name
    index: int


class RegisterBody(Body):
    """A configured variant of the environment `base`."""

    name: Name
    base: Name
    config: dict[str, Any] = {}


class CreateBody(Body):
    """`seed` drives what is random in the episode; left out, it is made from `request_id`."""

    request_id: RequestId
    env: Name
    split: Name
    index: int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class AssistantMessage(BaseModel):
    """OpenAI's assistant message; its other fields are ignored. `content` may be null only beside tool calls."""

    model_config = ConfigDict(frozen=True)

    role: Literal["assistant"] = "assistant"
    content: Annotated[str, Field(max_length=MAX_CONTENT)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("message has no content; send the assistant's text, which may be empty")
        return self

    def as_message(self) -> Message:
        message = Message(role="assistant", content=self.content or "")
        return {**message, "tool_calls": self.tool_calls} if self.tool_calls else message


class StepBody(Body):
    request_id: RequestId
    message: AssistantMessage


class Created(BaseModel):
    episode_id: str
    task: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    info: dict[str, Any]
    ttl_s: float


class Stepped(BaseModel):
    messages: list[dict[str, Any]]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


async def read[B: Body](request: Request, model: type[B]) -> B:
    """The JSON or msgpack body as `model`; a GET's query string stands for a body. Raises DecodeError, or InputError naming the field."""
    raw = dict(request.query_params) if request.method == "GET" else await http.read_body(request)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise InputError("; ".join(_explain(e) for e in error.errors())) from error


def documents(model: type[Body]) -> dict[str, Any]:
    """OpenAPI's description of a body that `read` reads."""
    schema = model.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """`schema` with its references replaced by what they name, so that it can stand inside another document."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def created(slot: Slot, ttl_s: float) -> dict[str, Any]:
    request, episode = slot.request, slot.live
    return {
        "episode_id": slot.id,
        "task": slot.task,
        "messages": list(slot.opening),
        "tools": list(episode.tools),
        "info": {"env": request.entry.name, "split": request.split, "index": request.index, "seed": slot.seed},
        "ttl_s": ttl_s,
    }


def stepped(result: StepResult) -> dict[str, Any]:
    known = {"reward_components": dict(result.info.reward_components), "success": result.info.success, "error": result.info.error}
    return {
        "messages": list(result.messages),
        "reward": float(result.reward),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": {**result.info.extra, **known},
    }


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "body"
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "extra_forbidden":
        return f"unknown field {key}"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}"
