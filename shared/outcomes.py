"""Ways in which episodes end, mistakes of a turn, and reasons to drop a group.

Invariants
- The model's actions are data: an episode that the model or a length limit ended has a reward, whatever the model did.
- Other failures are never a reward: a failed attempt is repeated; if that does not help, the whole group ends as
  `failed` with the name of the error's class. The class says how it is handled (shared.errors); wire, ledger and
  metrics carry its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

End = Literal["answered", "format", "invalid_action", "tool", "length", "context", "turns"]
Fault = Literal["format", "invalid_action", "tool", "length"]
FilterRule = Literal["no_tokens", "nonfinite_reward", "nonfinite_logprob", "zero_variance", "logprob"]

ENDS: Mapping[End, str] = {
    "answered": "the environment ended it after a turn without fault",
    "format": "the environment ended it after a turn without a readable answer",
    "invalid_action": "the environment ended it after a turn with an unknown action",
    "tool": "the environment ended it after a tool call that failed",
    "length": "the environment ended it after a turn that was cut at max_response_length",
    "context": "the context is full",
    "turns": "the turns or actions it may take are used up",
}
"""Endings caused by the model. If several apply, a cut takes precedence over a fault that the environment reports."""

FAULTS: Mapping[Fault, str] = {
    "format": "the answer cannot be read",
    "invalid_action": "an action that does not exist",
    "tool": "a tool call that names no tool, has wrong arguments, or fails",
    "length": "cut at max_response_length",
}
"""Mistakes of a turn that do not end the episode; counted by turn."""

FILTERS: Mapping[FilterRule, str] = {
    "no_tokens": "an episode has no token that the model sampled",
    "nonfinite_reward": "a reward is NaN or infinite",
    "nonfinite_logprob": "a log-probability is NaN or infinite",
    "zero_variance": "the rewards of its episodes are equal (trainer.filters.zero_variance)",
    "logprob": "engine and trainer disagree on the log-probabilities of its tokens (trainer.filters.logprob)",
}
"""Reasons to drop a valid group. The first three always apply, the others if the run enables them."""


def end_of_turn(fault: Fault | None, *, cut: Literal["length", "context"] | None) -> End:
    """Return how an episode ended that the environment ended. Args: cut: the limit that cut the last turn, if any."""
    return cut or fault or "answered"
