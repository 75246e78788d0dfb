"""The project's error tree.

    VolleyError                 base class; has a title, a detail and a hint for the user
    ├── ConfigError             a config key, value or file is wrong (commands exit with code 2)
    ├── InputError              a request is wrong                                         422
    │   ├── DecodeError         bytes are not a valid record of the expected type          400
    │   │   ├── MalformedAnswer     a service's answer cannot be read
    │   │   └── Untrainable         a valid group that cannot be trained on
    │   ├── TooLarge            a body, prompt or episode exceeds its limit                413
    │   ├── ContextExceeded     a prompt, or it and its answer, exceed the context         400
    │   ├── NotFound            no such path, environment, episode, run or version         404
    │   │   └── ModelNotFound       a client names another model
    │   ├── Expired             the result or session was there, and is no longer           410
    │   ├── WrongMethod         the path takes other methods                               405
    │   ├── Forbidden           a path outside the configured root, a missing token        403
    │   │   └── Unauthorized    the bearer token is missing or wrong                       401
    │   ├── RewardRefused       a judge or reward service would refuse every attempt
    │   ├── UnknownFrame        a WebSocket message that the protocol does not define
    │   └── Conflict            not allowed in the present state                           409
    ├── Unavailable             try again later (also: a deadline passed)                  503
    │   ├── WeightsUnpublished  a rollout server has found no checkpoint yet
    │   ├── RunIdMismatch       the orchestrator holds records of another start of the run
    │   ├── NotReady            a rollout server takes no requests now: it stops, or its weights are not to be used
    │   ├── ServiceUnreachable  another service did not answer
    │   │   └── TlsFailed       its certificate was rejected, or it does not speak TLS
    │   ├── QueueUnavailable    Redis did not answer
    │   ├── ProcessesMissing    not all processes of the trainer have joined
    │   ├── RateLimited         the service is at its limit                                429
    │   │   └── Busy                an environment is at its limit; the call has not started
    │   ├── GivenUp             an environment's call took too long
    │   ├── GradingBusy         no grading process became free in time
    │   ├── RewardFailed        a judge or reward service did not answer
    │   │   └── JudgementUnusable   its answer is empty or cut off
    │   ├── OutOfMemory         weights or an episode do not fit                           507
    │   ├── DeviceFailed        a rollout server's device failed while it loaded weights
    │   └── StorageUnavailable  files cannot be written now                                507
    │       ├── StorageFull     a disk, a quota or a file size limit is used up
    │       └── StorageDenied   no permission, a read-only file system, a missing folder
    ├── ProcessLost             a process of the trainer is gone; the others have to exit  503
    ├── Fenced                  a newer trainer has taken over; this one has to stop       409
    ├── WeightsError            a checkpoint has another digest, tree or fingerprint       422
    ├── SandboxFailed           code in a sandbox raised, crashed or met a limit           500
    │   └── SandboxLost         a sandbox is gone for another reason than its code         500
    ├── OpenEnvRefused          a remote OpenEnv server answered with an error             500
    ├── NemoGymRefused          a remote NeMo-Gym server answered with an error            500
    ├── GradingEnded            grading an answer met a limit                              500
    ├── RuleFailed              a rule of the user raised, or returned something else than promised  500
    ├── NonFinite               training produced non-finite numbers                       500
    └── EngineDied              the inference engine is gone; the process has to exit      500

Each client translates foreign exceptions to this tree in one function. An HTTP answer carries an error as a problem
body (RFC 9457): `problem` writes it, `from_problem` reads it. Errors that services send to each other are defined here,
so that the reader knows their names; errors that never leave their process may be defined elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from shared.outcomes import FilterRule
from shared.services import ServiceName

MAX_DETAIL = 2000  # characters in an answer
MAX_RETRY_AFTER_S = 60.0  # the longest that a client accepts from a service

type Cause = Literal["infrastructure", "request", "defect"]
type Action = Literal["again", "fail", "stop"]
type Party = ServiceName | Literal["redis", "teacher", "judge", "disk", "peer"]
"""Party that an error or a service waits for."""
type Why = Literal["exception", "crash", "memory", "cpu", "time", "output", "protocol", "refused"]
"""Reason why a sandbox failed."""


def _sendable(text: str) -> str:
    """Escape surrogates: file names may hold bytes that are not UTF-8, which answers and logs cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()


_BY_NAME: dict[str, type[VolleyError]] = {}


class VolleyError(Exception):
    """Base of all errors of the project.

    Args:
        detail: what happened, naming the key, path, address or id.
        hint: what the reader can do about it; may be empty.

    A class declares its `cause` and the `action` to take: `again` (transient: retry the attempt, on another server if
    possible; when attempts run out, the group fails), `fail` (no attempt can succeed: the group fails at once) or
    `stop` (the process exits, and restarts from durable state). `waits_on` is the party that has to come back before a
    retry can succeed, if the class determines it. An `outage` says nothing about the request: the service that was
    asked, or its state, is gone. It costs an episode no attempt. `api_code` names the error in OpenAI's API, if clients
    may act on it. Subclasses inherit these values.
    """

    status: ClassVar[int] = 500
    cause: ClassVar[Cause] = "defect"
    action: ClassVar[Action] = "again"
    waits_on: ClassVar[Party | None] = None
    outage: ClassVar[bool] = False
    title: ClassVar[str] = "Internal error"
    api_code: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _BY_NAME[cls.__name__] = cls

    def __init__(self, detail: str, hint: str = "") -> None:
        self.detail, self.hint = _sendable(detail), _sendable(hint)
        super().__init__(self.detail)

    @property
    def transient(self) -> bool:
        """True if another attempt, perhaps on another server, can succeed."""
        return self.action == "again"

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail


class ConfigError(VolleyError):
    status, title = 422, "Invalid configuration"
    cause, action = "request", "fail"


class InputError(VolleyError):
    status, title = 422, "Invalid request"
    cause, action = "request", "fail"


class DecodeError(InputError):
    status, title, cause = 400, "Malformed body", "defect"


class MalformedAnswer(DecodeError):
    title = "Malformed answer"


class Untrainable(DecodeError):
    """`rule` is the filter that drops such a group."""

    title = "Nothing to train on"

    def __init__(self, detail: str, hint: str = "", rule: FilterRule | None = None) -> None:
        super().__init__(detail, hint)
        self.rule = rule


class TooLarge(InputError):
    status, title = 413, "Too large"


class ContextExceeded(InputError):
    """A prompt of `n_prompt` tokens, or it and the `n_new` tokens asked for, exceed the `limit` of both together.

    The numbers are 0 in an error of another service.
    """

    status, title, api_code = 400, "Longer than the context", "context_length_exceeded"

    def __init__(self, detail: str, hint: str = "", n_prompt: int = 0, n_new: int = 0, limit: int = 0) -> None:
        super().__init__(detail, hint)
        self.n_prompt, self.n_new, self.limit = n_prompt, n_new, limit

    @classmethod
    def of(cls, limit: int, n_prompt: int, n_new: int = 0) -> ContextExceeded:
        """Make the error in OpenAI's words, which clients search for."""
        had = f"your messages resulted in {n_prompt} tokens"
        if n_prompt <= limit:
            had = f"you requested {n_prompt + n_new} tokens ({n_prompt} in the messages, {n_new} in the completion)"
        return cls(
            f"This model's maximum context length is {limit} tokens. However, {had}",
            "shorten them, or raise rollout.engine.context_length",
            n_prompt,
            n_new,
            limit,
        )


class NotFound(InputError):
    status, title = 404, "Not found"


class ModelNotFound(NotFound):
    api_code = "model_not_found"


class Expired(InputError):
    status, title = 410, "Expired"


class WrongMethod(InputError):
    """`allow` names the methods that the path takes."""

    status, title = 405, "Method not allowed"

    def __init__(self, detail: str, hint: str = "", allow: str = "") -> None:
        super().__init__(detail, hint)
        self.allow = allow


class Forbidden(InputError):
    status, title = 403, "Forbidden"


class Unauthorized(Forbidden):
    status, title, api_code = 401, "Unauthorized", "invalid_api_key"


class Conflict(InputError):
    status, title = 409, "Conflict"


class RewardRefused(InputError):
    """A retry cannot succeed: the key or model is wrong, or the budget is used up."""

    title = "Reward refused"


class UnknownFrame(InputError):
    title = "Unknown message type"


class Unavailable(VolleyError):
    """The request may succeed later; `retry_after_s` is the delay to wait, in seconds."""

    status, title, cause, api_code = 503, "Unavailable", "infrastructure", "unavailable"

    def __init__(self, detail: str, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(detail, hint)
        self.retry_after_s = retry_after_s


class NotReady(Unavailable):
    title, outage = "Not ready", True


class WeightsUnpublished(Unavailable):
    title, waits_on, outage = "No weights yet", "trainer", True


class RunIdMismatch(Unavailable):
    title, waits_on = "Run id mismatch", "trainer"


class ServiceUnreachable(Unavailable):
    title, outage = "Service unreachable", True


class TlsFailed(ServiceUnreachable):
    title = "No TLS connection"


class QueueUnavailable(Unavailable):
    title, waits_on = "Queue unavailable", "redis"


class ProcessesMissing(Unavailable):
    title, waits_on = "Processes missing", "peer"


class RateLimited(Unavailable):
    status, title, api_code = 429, "Too many requests", "rate_limit_exceeded"


class Busy(RateLimited):
    """The call has not started, so it may be repeated."""

    title = "Environment busy"


class GivenUp(Unavailable):
    """The call has started, and its caller no longer waits for it."""

    title = "Environment too slow"


class GradingBusy(Unavailable):
    """No process was free in time; grading has not started."""

    title = "Grading busy"


class RewardFailed(Unavailable):
    """The attempt fails, and the episode is played again."""

    title = "No reward"


class JudgementUnusable(RewardFailed):
    """The answer has no readable content; it is not stored."""


class OutOfMemory(Unavailable):
    status, title = 507, "Out of memory"


class DeviceFailed(Unavailable):
    title = "Device failed"


class StorageUnavailable(Unavailable):
    status, title, waits_on = 507, "Storage unavailable", "disk"


class StorageFull(StorageUnavailable):
    title = "Storage full"


class StorageDenied(StorageUnavailable):
    title = "Storage not writable"


class ProcessLost(VolleyError):
    status, title = 503, "A process of the trainer is gone"
    cause, action = "infrastructure", "stop"


class Fenced(VolleyError):
    status, title = 409, "Superseded by a newer trainer"
    cause, action = "infrastructure", "stop"


class WeightsError(VolleyError):
    status, title, cause = 422, "Weights rejected", "infrastructure"


class SandboxFailed(VolleyError):
    """Code in a sandbox failed.

    `why` is the reason: `exception` (the code raised; the detail ends with the place), `crash` (its process exited or
    crashed), `memory`, `cpu`, `time` (the call's deadline) or `output` (its answer, log or files) for a limit,
    `protocol` (its output is not an answer), `refused` (its return value is not one of an environment, or it could not
    be started). `alive` is true if the sandbox still answers calls; otherwise it is gone.
    """

    title = "Sandboxed code failed"

    def __init__(self, detail: str, hint: str = "", why: Why = "crash", alive: bool = False) -> None:
        super().__init__(detail, hint)
        self.why: Why = why
        self.alive = alive


class SandboxLost(SandboxFailed):
    """A sandbox's process or container is gone for another reason than its code. It gives no reward."""

    title, cause = "Sandbox lost", "infrastructure"


class OpenEnvRefused(VolleyError):
    """The server answered with an error frame: `code` is the frame's code, `server_message` its message."""

    title = "Refused by the OpenEnv server"

    def __init__(self, detail: str, hint: str = "", code: str = "", server_message: str = "") -> None:
        super().__init__(detail, hint or "a defect of the server, or an action that it does not take")
        self.code, self.server_message = code, server_message


class NemoGymRefused(VolleyError):
    """The server answered a request with an error."""

    title = "Refused by the NeMo-Gym server"


class GradingEnded(VolleyError):
    """A confined grading call exceeded its limits; no correct answer needs that much."""

    title = "Grading ended by its limits"


class RuleFailed(VolleyError):
    title, cause, action = "Own rule failed", "request", "stop"


class NonFinite(VolleyError):
    """`what` names the non-finite values: metrics, parameters by leaf name, parts of the optimizer's state."""

    title, action = "Not finite", "stop"

    def __init__(self, detail: str, hint: str = "", what: Sequence[str] = ()) -> None:
        super().__init__(detail, hint)
        self.what = tuple(what)


class EngineDied(VolleyError):
    title, cause, outage = "Engine died", "infrastructure", True


def first_error[E: BaseException](group: BaseExceptionGroup[E]) -> E:
    """Return the error of a group to report: the first VolleyError, else the first error."""
    error: Any = group.subgroup(VolleyError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def problem(error: VolleyError) -> dict[str, Any]:
    """Return the RFC 9457 body of an error."""
    body: dict[str, Any] = {
        "type": f"urn:volley:{type(error).__name__}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail[:MAX_DETAIL],
    }
    if error.hint:
        body["hint"] = error.hint[:MAX_DETAIL]
    if isinstance(error, Unavailable):
        body["retry_after_s"] = error.retry_after_s
    return body


def from_problem(status: int, body: dict[str, Any]) -> VolleyError:
    """Return the error of a problem body; an unknown type becomes the nearest class by HTTP status.

    A proxy whose service is gone answers 502, 503 or 504 without a type: the service is unreachable.
    """
    name = str(body.get("type", "")).rpartition(":")[2]
    detail = str(body.get("detail") or body.get("title") or _of_openai(status, body) or f"HTTP {status}")
    gone = status in (502, 504) or (status == 503 and not name)
    kind = _BY_NAME.get(name) or (ServiceUnreachable if gone else _by_status(status))
    error = kind(detail, str(body.get("hint", "")))
    after_s = body.get("retry_after_s")
    if isinstance(error, Unavailable) and isinstance(after_s, int | float) and after_s >= 0:
        error.retry_after_s = min(after_s, MAX_RETRY_AFTER_S)
    return error


def _of_openai(status: int, body: dict[str, Any]) -> str | None:
    """Return the message of an OpenAI API error, {"error": {"message": …}}, if the body is one."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {status}: {message[:MAX_DETAIL]}" if isinstance(message, str) else None


def _by_status(status: int) -> type[VolleyError]:
    kinds = (DecodeError, Unauthorized, Forbidden, NotFound, WrongMethod, Conflict, TooLarge, RateLimited, OutOfMemory)
    exact: dict[int, type[VolleyError]] = {kind.status: kind for kind in kinds}
    if status in (408, 503):
        return Unavailable
    return exact.get(status) or (InputError if 400 <= status < 500 else VolleyError)
