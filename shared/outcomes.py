"""How episodes end and why attempts at them fail: the one list of classes, who causes each, and what is done about it.

Invariants
- What the model does is data: an episode that the model or a bound of its length ended has a reward, whatever it did.
- What anything else does is never a reward: an attempt that failed is made again, and if that is of no use its whole
  group ends as `failed` with the name of the class.
- Every subclass of VolleyError has a line in FAILURES; a class that is new here is judged like its nearest known
  ancestor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shared.errors import VolleyError

End = Literal["answered", "format", "invalid_action", "tool", "length", "context", "turns"]
Fault = Literal["format", "invalid_action", "tool", "length"]

ENDS: Mapping[End, str] = {
    "answered": "the environment ended it after a turn without fault",
    "format": "the environment ended it after a turn it found nothing to read in",
    "invalid_action": "the environment ended it after a turn with an unknown action",
    "tool": "the environment ended it after a tool call that failed",
    "length": "the environment ended it after a turn that was cut at max_response_length",
    "context": "the context is full",
    "turns": "the turns or actions it may take are used up",
}
"""How an episode ended, all of them caused by the model. Where several hold, the cut counts before the environment's
fault.
"""

FAULTS: Mapping[Fault, str] = {
    "format": "nothing to read in the answer",
    "invalid_action": "an action that does not exist",
    "tool": "a tool call that names no tool, has wrong arguments, or fails",
    "length": "cut at max_response_length",
}
"""What a turn can have wrong without ending the episode; counted by turn."""

type Cause = Literal["infrastructure", "request", "defect"]
type Action = Literal["again", "fail", "stop"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A class of errors.

    `again`: the attempt is made again, elsewhere if possible, while attempts are left, then the group fails. `fail`: no
        attempt
    can succeed, so the group fails at once. `stop`: the process that meets it ends, and starts again from what is
    durable.
    """

    cause: Cause
    action: Action
    what: str


FAILURES: Mapping[str, Failure] = {
    "VolleyError": Failure("defect", "again", "a service answered 500: its code, or an environment's, failed"),
    "ConfigError": Failure("request", "fail", "a configuration key, value or file is wrong"),
    "InputError": Failure("request", "fail", "a service refuses the request"),
    "DecodeError": Failure("defect", "fail", "an answer is not the record it claims to be"),
    "TooLarge": Failure("request", "fail", "a body is over its limit"),
    "PromptTooLong": Failure("request", "fail", "the task's first prompt leaves no room to answer"),
    "NotFound": Failure("request", "fail", "no such environment, split or task"),
    "WrongMethod": Failure("request", "fail", "the path knows other methods"),
    "Forbidden": Failure("request", "fail", "the token's role does not allow it"),
    "Unauthorized": Failure("request", "fail", "no or a wrong token"),
    "Conflict": Failure("request", "fail", "not in the present state of the service"),
    "Unavailable": Failure(
        "infrastructure", "again", "a service is there and cannot do it now; an engine aborted too often"
    ),
    "ServiceUnreachable": Failure("infrastructure", "again", "no connection, a broken one, or no answer in time"),
    "QueueUnavailable": Failure(
        "infrastructure", "again", "Redis does not answer or takes no writes; waited for, costs no attempt"
    ),
    "OutOfMemory": Failure("infrastructure", "again", "it does not fit into the server's memory now"),
    "StorageUnavailable": Failure(
        "infrastructure", "again", "files cannot be written now; what was made is kept and written later"
    ),
    "StorageDenied": Failure(
        "infrastructure", "again", "files may not be written, or their folder is gone; like StorageFull"
    ),
    "StorageFull": Failure(
        "infrastructure", "again", "a disk or a quota is full; what was made is kept and written later"
    ),
    "Busy": Failure(
        "infrastructure", "again", "the environment service has other calls to make first; like RateLimited"
    ),
    "GivenUp": Failure("infrastructure", "again", "a call into an environment took too long"),
    "RateLimited": Failure(
        "infrastructure", "again", "a service has enough to do; asked again when it says, costs no attempt"
    ),
    "EpisodeLost": Failure("infrastructure", "again", "the environment service restarted and forgot the episode"),
    "EpisodeTimeout": Failure(
        "infrastructure", "again", "an attempt took longer than episode_timeout_s, outages not counted"
    ),
    "WrongVersion": Failure(
        "infrastructure", "again", "an evaluation got tokens of other weights than those it measures"
    ),
    "EngineDied": Failure(
        "infrastructure", "again", "the inference engine is gone; its process ends and is started again"
    ),
    "PrefixBroken": Failure("defect", "fail", "a turn would not continue exactly what was sampled before"),
    "WeightsError": Failure(
        "infrastructure", "again", "weights were refused: digest, tree, probe; the old ones serve on"
    ),
    "NonFinite": Failure("defect", "stop", "a step of the trainer gave numbers that are not finite; it is refused"),
    "Fenced": Failure("infrastructure", "stop", "a newer trainer has taken over"),
}
"""By the name of the class, which is also what the wire, the ledger and the metrics carry."""


def judged(error: VolleyError) -> Failure:
    """The line of an error's class, or of its nearest ancestor that has one."""
    return next(FAILURES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in FAILURES)


def end_of_turn(fault: Fault | None, *, cut: Literal["length", "context"] | None) -> End:
    """How an episode ended that the environment ended. Args: cut: what bound cut the last turn, if one did."""
    return cut or fault or "answered"
