"""Readers of a sandbox's answers, which convert them into the service's types.

The sandbox has checked the answers already, to inform the author. But submitted code can send anything, so the service
does not trust them. Every reader raises SandboxFailed (`protocol`) naming the fault.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.env.backend import AgentSpec
from services.env.episode_types import MAX_REWARD, Demonstration, Fault, Info, Message, StepResult
from shared.errors import SandboxFailed
from shared.types import MAX_MESSAGE, MAX_SEAT

MAX_TEXT = 200
MAX_MESSAGES = 1000
MAX_SPLITS = 16
MAX_TASKS = 2**31
MAX_TOOLS = 128
MAX_COMPONENTS = 64
MAX_CALLS = 64
MAX_SEATS = 64

type AuthorProtocol = Literal["simple", "gymnasium", "volley", "agent"]
type Role = Literal["system", "user", "assistant", "tool"]


class ProgramEnd(BaseModel):
    """End of a program: the end of its output, its exit code, and the limit that ended it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    output: str
    exit: Annotated[int, Field(ge=0, le=255)] | None
    ended: Literal["", "time", "memory", "stop"]


@dataclass(frozen=True, slots=True)
class Description:
    """A submitted environment's description of itself. `splits` gives the number of tasks of each split."""

    protocol: AuthorProtocol
    entry: str
    splits: Mapping[str, int]
    tools: Sequence[Mapping[str, Any]]
    has_demonstration: bool
    agent: AgentSpec | None = None


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """Answer to `reset`: the task's id, the messages that the model answers first, and its tools.

    `seats` are the players, if there are several, and `seat` is the one that answers first. `restorable`: its class has
    `snapshot` and `restore`.
    """

    task: str
    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    seats: tuple[str, ...] = ()
    seat: str = ""
    restorable: bool = False


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """Output and exit code of a script; `cut` says that some output was dropped."""

    stdout: str
    stderr: str
    exit: int
    cut: bool


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of one text in an interpreter that continues.

    It holds the printed output, the content of changed files, and the paths of removed files and of files too large to
    send.
    """

    script: ScriptResult
    files: Mapping[str, bytes]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]


def read_description(value: Any) -> Description:
    given = {**value, "agent": value.get("agent")} if isinstance(value, dict) else value
    names = {"protocol", "entry", "splits", "tools", "has_demonstration", "agent"}
    found = _record(given, "the description", names)
    splits = found["splits"]
    if not isinstance(splits, dict) or not 0 < len(splits) <= MAX_SPLITS:
        raise _wrong("splits", splits)
    for name, n in splits.items():
        _text(name, "the name of a split")
        if type(n) is not int or not 0 < n <= MAX_TASKS:
            raise _wrong(f"the number of tasks of {name}", n)
    return Description(
        protocol=_one_of(found["protocol"], AuthorProtocol, "protocol"),
        entry=_text(found["entry"], "entry"),
        splits=splits,
        tools=_tools(found["tools"]),
        has_demonstration=_flag(found["has_demonstration"], "has_demonstration"),
        agent=None if found["agent"] is None else _validated(AgentSpec, found["agent"], "agent"),
    )


def read_task(value: Any) -> str:
    return _text(value, "the task's id")


def read_opening(value: Any) -> OpenedEpisode:
    given = {"seats": [], "seat": "", "restorable": False, **value} if isinstance(value, dict) else value
    found = _record(given, "the answer to reset", {"task", "messages", "tools", "seats", "seat", "restorable"})
    messages, seats = _messages(found["messages"]), found["seats"]
    if not messages:
        raise _wrong("the opening messages", found["messages"])
    if not isinstance(seats, list) or len(seats) > MAX_SEATS or len(set(map(repr, seats))) < len(seats):
        raise _wrong("seats", seats)
    names = tuple(_text(seat, "the name of a seat", MAX_SEAT) for seat in seats)
    if found["seat"] not in (names or ("",)):
        raise _wrong("the seat that answers first", found["seat"])
    restorable = _flag(found["restorable"], "restorable")
    return OpenedEpisode(read_task(found["task"]), messages, _tools(found["tools"]), names, found["seat"], restorable)


def read_step(value: Any) -> StepResult:
    found = _record(value, "the answer to step", {"messages", "reward", "terminated", "truncated", "info"})
    info = _record(found["info"], "info", {"reward_components", "success", "error", "extra"})
    components, reward = info["reward_components"], _number(found["reward"], "reward")
    if not isinstance(components, dict) or len(components) > MAX_COMPONENTS:
        raise _wrong("reward_components", components)
    parts = {_text(name, "a reward component"): _number(part, name) for name, part in components.items()}
    if not math.isclose(math.fsum(parts.values()), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise _wrong("the sum of reward_components", math.fsum(parts.values()))
    if not isinstance(info["extra"], dict):
        raise _wrong("info.extra", info["extra"])
    error = None if info["error"] is None else _one_of(info["error"], Fault, "info.error")
    messages = _messages(found["messages"])
    terminated, truncated = _flag(found["terminated"], "terminated"), _flag(found["truncated"], "truncated")
    if not messages and not terminated and not truncated:
        raise _wrong("the observation of an episode that goes on", messages)
    return StepResult(
        messages, reward, terminated, truncated, Info(parts, _flag(info["success"], "success"), error, info["extra"])
    )


def read_demonstration(value: Any) -> Demonstration:
    found = _record(value, "the demonstration", {"messages", "success", "tools"})
    messages = _messages(found["messages"])
    if not messages or messages[-1]["role"] != "assistant":
        raise _wrong("the last message of the demonstration", found["messages"])
    return Demonstration(messages, _flag(found["success"], "success"), _tools(found["tools"]))


def read_program_end(value: Any) -> ProgramEnd:
    return _validated(ProgramEnd, value, "the end of a program")


def read_script(value: Any) -> ScriptResult:
    found = _record(value, "the result of a script", {"stdout", "stderr", "exit", "cut"})
    if type(found["exit"]) is not int or not 0 <= found["exit"] <= 255:
        raise _wrong("exit", found["exit"])
    for name in ("stdout", "stderr"):
        if not isinstance(found[name], str):
            raise _wrong(name, found[name])
    return ScriptResult(found["stdout"], found["stderr"], found["exit"], _flag(found["cut"], "cut"))


def read_cell(value: Any) -> CellResult:
    """Read a cell's result. Paths are not checked; the store of the files does that."""
    names = {"files", "removed", "left_out"}
    if not isinstance(value, dict) or not names <= value.keys():
        raise _wrong("the result of a cell", value)
    script = read_script({key: part for key, part in value.items() if key not in names})
    files = value["files"]
    if not isinstance(files, dict) or not all(isinstance(content, str) for content in files.values()):
        raise _wrong("files", files)
    try:
        contents = {path: base64.b64decode(content, validate=True) for path, content in files.items()}
    except ValueError:
        raise _wrong("the content of a file", "no base64") from None
    for name in ("removed", "left_out"):
        if not isinstance(value[name], list) or not all(isinstance(path, str) for path in value[name]):
            raise _wrong(name, value[name])
    return CellResult(script, contents, tuple(value["removed"]), tuple(value["left_out"]))


def _validated[M: BaseModel](model: type[M], value: Any, what: str) -> M:
    try:
        return model.model_validate_json(orjson.dumps(value))
    except ValidationError:
        raise _wrong(what, value) from None


def _record(value: Any, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        raise _wrong(what, value)
    return value


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or len(value) > MAX_MESSAGES:
        raise _wrong("messages", value)
    return tuple(_message(message) for message in value)


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys() <= {"role", "content", "tool_calls"}:
        raise _wrong("a message", value)
    content, calls = value["content"], value.get("tool_calls")
    if not isinstance(content, str) or len(content) > MAX_MESSAGE:
        raise _wrong("the content of a message", content)
    message = Message(role=_one_of(value["role"], Role, "the role of a message"), content=content)
    if calls is None:
        return message
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise _wrong("tool_calls", calls)
    return {**message, "tool_calls": calls}


def _tools(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS or not all(isinstance(tool, dict) for tool in value):
        raise _wrong("tools", value)
    return cast("list[dict[str, Any]]", value)


def _number(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not -MAX_REWARD <= value <= MAX_REWARD:
        raise _wrong(what, value)
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(what, value)
    return value


def _text(value: Any, what: str, most: int = MAX_TEXT) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise _wrong(what, value)
    return value


def _one_of(value: Any, kind: Any, what: str) -> Any:
    if value not in get_args(kind.__value__):
        raise _wrong(what, value)
    return value


def _wrong(what: str, value: Any) -> SandboxFailed:
    shown = repr(value)[:80] if isinstance(value, str | int | float | bool) or value is None else type(value).__name__
    return SandboxFailed(f"{what} is {shown}, which is not valid", why="protocol")
