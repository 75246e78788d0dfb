"""How episodes end: the one list of ways, of what a turn can have wrong, and of why a group is not trained on.

Invariants
- What the model does is data: an episode that the model or a bound of its length ended has a reward, whatever it did.
- What anything else does is never a reward: an attempt that failed is made again, and if that is of no use its whole
  group ends as `failed` with the name of the error's class. What is done about each class is said by the class itself
  (shared.errors); wire, ledger and metrics carry its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

End = Literal["answered", "format", "invalid_action", "tool", "length", "context", "turns"]
Fault = Literal["format", "invalid_action", "tool", "length"]
FilterRule = Literal["no_tokens", "nonfinite_reward", "nonfinite_logprob", "zero_variance", "logprob"]

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

FILTERS: Mapping[FilterRule, str] = {
    "no_tokens": "an episode has no token that the model sampled",
    "nonfinite_reward": "a reward is NaN or infinite",
    "nonfinite_logprob": "a log-probability is NaN or infinite",
    "zero_variance": "the rewards of its episodes are equal (trainer.filters.zero_variance)",
    "logprob": "engine and trainer disagree on the log-probabilities of its tokens (trainer.filters.logprob)",
}
"""Why a group that can be read is not trained on. The first three always hold, the others where the run asks for them.
"""


def end_of_turn(fault: Fault | None, *, cut: Literal["length", "context"] | None) -> End:
    """How an episode ended that the environment ended. Args: cut: what bound cut the last turn, if one did."""
    return cut or fault or "answered"
