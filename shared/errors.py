"""The one error tree of the project.

    VolleyError                 anything a user may have to read; has a title, a detail and a hint
    ├── ConfigError             a config key, value or file is wrong (commands exit with code 2)
    ├── InputError              a request is wrong                                         422
    │   ├── DecodeError         bytes that are not the record they claim to be             400
    │   │   ├── MalformedAnswer     what a service answered cannot be read
    │   │   └── Untrainable         a group that can be read, and that nothing can be learned from
    │   ├── TooLarge            a body, prompt or episode is over its limit                413
    │   ├── NotFound            no such path, environment, episode, run, version           404
    │   ├── WrongMethod         the path takes other methods                               405
    │   ├── Forbidden           a path outside the configured root, a missing token        403
    │   │   └── Unauthorized    no or a wrong bearer token                                 401
    │   ├── RewardRefused       a judge or reward service would refuse every time
    │   ├── UnknownFrame        a WebSocket message that is none of the protocol's
    │   └── Conflict            legal elsewhere, not in the present state                  409
    ├── Unavailable             try again later (also: a deadline passed)                  503
    │   ├── WeightsUnpublished  a rollout server has found no checkpoint yet
    │   ├── ServiceUnreachable  another service did not answer
    │   │   └── TlsFailed       its certificate is not accepted, or it does not speak TLS
    │   ├── QueueUnavailable    Redis did not answer
    │   ├── ProcessesMissing    not all processes of the trainer are there
    │   ├── RateLimited         the service has enough to do now                           429
    │   │   └── Busy                an environment has enough to do now; the call has not begun
    │   ├── GivenUp             an environment's call took too long
    │   ├── GradingBusy         no process was free to grade
    │   ├── RewardFailed        a judge or reward service did not answer
    │   │   └── JudgementUnusable   its answer is empty or cut off
    │   ├── OutOfMemory         weights or an episode do not fit                           507
    │   └── StorageUnavailable  files cannot be written now                                507
    │       ├── StorageFull     a disk, a quota or a file size limit is used up
    │       └── StorageDenied   no permission, a read-only file system, a folder that is gone
    ├── ProcessLost             a process of the trainer is gone: the others have to end   503
    ├── Fenced                  a newer trainer has taken over; this one has to stop       409
    ├── WeightsError            digest, tree or fingerprint of a checkpoint differs        422
    ├── SandboxFailed           code in a sandbox raised, crashed or met a limit           500
    ├── OpenEnvRefused          a remote OpenEnv server answered with an error             500
    ├── NemoGymRefused          a remote NeMo-Gym server answered with an error            500
    ├── GradingEnded            grading an answer met a limit                              500
    ├── NonFinite               training gave numbers that are not finite                  500
    └── EngineDied              the inference engine is gone; the process has to end       500

Foreign exceptions are translated to this tree in one function per client, and nowhere else. An HTTP answer carries an
error as a problem body (RFC 9457), made by `problem` and read back by `from_problem`. Classes that a service sends to
another one are defined here, so that the reader knows them by name; classes that never leave their process may be
defined elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from shared.outcomes import FilterRule
from shared.services import ServiceName

MAX_DETAIL = 2000
"""Characters: an error names what is wrong, and does not send it back whole."""
MAX_RETRY_AFTER_S = 60.0
"""Whatever a service says, nobody waits longer before asking again."""


type Cause = Literal["infrastructure", "request", "defect"]
type Action = Literal["again", "fail", "stop"]
type Party = ServiceName | Literal["redis", "teacher", "disk", "peer"]
"""Whom somebody waits for."""
type Why = Literal["exception", "crash", "memory", "cpu", "time", "output", "protocol", "refused"]
"""Why a sandbox failed."""


def _sendable(text: str) -> str:
    """Names of files may hold bytes that are no text: they would not go into an answer, nor into a log."""
    return text.encode("utf-8", "backslashreplace").decode()


_BY_NAME: dict[str, type[VolleyError]] = {}


class VolleyError(Exception):
    """Base of all errors of the project.

    Args:
        detail: what happened, naming the thing (key, path, address, id).
        hint: what the reader can do about it; may be empty.

    A class says who causes it, and what is done about it: `again` (transient: the attempt is made again, elsewhere if
    possible, while attempts are left, then its group fails), `fail` (no attempt can succeed: the group fails at once),
    `stop` (the process that meets it ends, and starts again from what is durable). `waits_on` is who has to come back
    before it can succeed, where the class tells. A subclass that says nothing is judged like its parent.
    """

    status: ClassVar[int] = 500
    cause: ClassVar[Cause] = "defect"
    action: ClassVar[Action] = "again"
    waits_on: ClassVar[Party | None] = None
    title: ClassVar[str] = "Internal error"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _BY_NAME[cls.__name__] = cls

    def __init__(self, detail: str, hint: str = "") -> None:
        self.detail, self.hint = _sendable(detail), _sendable(hint)
        super().__init__(self.detail)

    @property
    def transient(self) -> bool:
        """Whether another attempt, perhaps on another server, can succeed."""
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
    status, title = 400, "Malformed body"
    cause = "defect"


class MalformedAnswer(DecodeError):
    title = "Malformed answer"


class Untrainable(DecodeError):
    """`rule` is the filter that such a group ends by."""

    title = "Nothing to train on"

    def __init__(self, detail: str, hint: str = "", rule: FilterRule | None = None) -> None:
        super().__init__(detail, hint)
        self.rule = rule


class TooLarge(InputError):
    status, title = 413, "Too large"


class NotFound(InputError):
    status, title = 404, "Not found"


class WrongMethod(InputError):
    """`allow` names the methods the path takes."""

    status, title = 405, "Method not allowed"

    def __init__(self, detail: str, hint: str = "", allow: str = "") -> None:
        super().__init__(detail, hint)
        self.allow = allow


class Forbidden(InputError):
    status, title = 403, "Forbidden"


class Unauthorized(Forbidden):
    status, title = 401, "Unauthorized"


class Conflict(InputError):
    status, title = 409, "Conflict"


class RewardRefused(InputError):
    """Asking again gives nothing else: a wrong key or model, or a budget that is used up."""

    title = "Reward refused"


class UnknownFrame(InputError):
    title = "Unknown message type"


class Unavailable(VolleyError):
    """The request may succeed later; `retry_after_s` says when to try, in seconds."""

    status, title = 503, "Unavailable"
    cause = "infrastructure"

    def __init__(self, detail: str, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(detail, hint)
        self.retry_after_s = retry_after_s


class WeightsUnpublished(Unavailable):
    title, waits_on = "No weights yet", "trainer"


class AnotherBeginning(Unavailable):
    title, waits_on = "Another beginning of the run", "trainer"


class ServiceUnreachable(Unavailable):
    title = "Service unreachable"


class TlsFailed(ServiceUnreachable):
    title = "No TLS connection"


class QueueUnavailable(Unavailable):
    title, waits_on = "Queue unavailable", "redis"


class ProcessesMissing(Unavailable):
    title, waits_on = "Processes missing", "peer"


class RateLimited(Unavailable):
    status, title = 429, "Too many requests"


class Busy(RateLimited):
    """The call has not begun, so it may be repeated."""

    title = "Environment busy"


class GivenUp(Unavailable):
    """The call has begun, and nobody waits for its end."""

    title = "Environment too slow"


class GradingBusy(Unavailable):
    """No process was free in time; nothing has begun."""

    title = "Grading busy"


class RewardFailed(Unavailable):
    """The episode fails, and is played again."""

    title = "No reward"


class JudgementUnusable(RewardFailed):
    """There is nothing to read in the answer, and it is not kept."""


class OutOfMemory(Unavailable):
    status, title = 507, "Out of memory"


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
    status, title = 422, "Weights rejected"
    cause = "infrastructure"


class SandboxFailed(VolleyError):
    """Code in a sandbox did not do what it was asked.

    `why`: `exception` (it raised one; the detail ends with where), `crash` (its process ended by itself or by a fault
    of its own), `memory`, `cpu`, `time` (the call's deadline) and `output` (its answer, log or files) for limits,
    `protocol` (what it said is no answer), `refused` (what it returned is not what an environment returns, or it could
    not be started). `alive`: whether the sandbox answers further calls; one that does not is gone.
    """

    title = "Sandboxed code failed"

    def __init__(self, detail: str, hint: str = "", why: Why = "crash", alive: bool = False) -> None:
        super().__init__(detail, hint)
        self.why: Why = why
        self.alive = alive


class OpenEnvRefused(VolleyError):
    """The server answered with an error frame, of that `code`. `told` is its message alone."""

    title = "Refused by the OpenEnv server"

    def __init__(self, detail: str, hint: str = "", code: str = "", told: str = "") -> None:
        super().__init__(detail, hint or "a defect of the server, or an action that it does not take")
        self.code, self.told = code, told


class NemoGymRefused(VolleyError):
    """The server answered a request of ours with an error."""

    title = "Refused by the NeMo-Gym server"


class GradingEnded(VolleyError):
    """The limits of a confined call ended it: what was graded asks for more than any right answer does."""

    title = "Grading ended by its limits"


class NonFinite(VolleyError):
    """`what` names them: metrics, parameters by leaf name, parts of the optimizer's state."""

    status, title = 500, "Not finite"
    action = "stop"

    def __init__(self, detail: str, hint: str = "", what: Sequence[str] = ()) -> None:
        super().__init__(detail, hint)
        self.what = tuple(what)


class EngineDied(VolleyError):
    status, title = 500, "Engine died"
    cause = "infrastructure"


def first_error[E: BaseException](group: BaseExceptionGroup[E]) -> E:
    """The one error of a group to report: the first of the project's own, if there is any."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if isinstance(error, VolleyError)), leaves[0])


def _leaves[E: BaseException](group: BaseExceptionGroup[E]) -> Iterator[E]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def problem(error: VolleyError) -> dict[str, Any]:
    """The RFC 9457 body of an error."""
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
    """The error a problem body stands for; an unknown type becomes the nearest class by HTTP status."""
    name = str(body.get("type", "")).rpartition(":")[2]
    detail = str(body.get("detail") or body.get("title") or _of_openai(status, body) or f"HTTP {status}")
    kind = _BY_NAME.get(name) or _by_status(status)
    error = kind(detail, str(body.get("hint", "")))
    after_s = body.get("retry_after_s")
    if isinstance(error, Unavailable) and isinstance(after_s, int | float) and after_s >= 0:
        error.retry_after_s = min(after_s, MAX_RETRY_AFTER_S)
    return error


def _of_openai(status: int, body: dict[str, Any]) -> str | None:
    """What OpenAI's API says is wrong: {"error": {"message": …}}."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return f"HTTP {status}: {message[:MAX_DETAIL]}" if isinstance(message, str) else None


def _by_status(status: int) -> type[VolleyError]:
    exact = {
        400: DecodeError,
        401: Unauthorized,
        403: Forbidden,
        404: NotFound,
        405: WrongMethod,
        409: Conflict,
        413: TooLarge,
        429: RateLimited,
        507: OutOfMemory,
    }
    if status in exact:
        return exact[status]
    if status in (408, 502, 503, 504):
        return Unavailable
    return InputError if 400 <= status < 500 else VolleyError
