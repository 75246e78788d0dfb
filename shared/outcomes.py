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
FilterRule = Literal[
    "no_tokens",
    "nonfinite_reward",
    "nonfinite_logprob",
    "zero_variance",
    "logprob",
    "min_reward",
    "response_diversity",
    "reasonable_length",
    "rollout_filter_ratio",
    "custom",
    "straggler",
]

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
    "zero_variance": "the rewards of its episodes are equal (trainer.filters.zero_variance, or"
    " orchestrator.generation.filters.reward_nonzero_std)",
    "logprob": "engine and trainer disagree on the log-probabilities of its tokens (trainer.filters.logprob)",
    "min_reward": "no reward is above orchestrator.generation.filters.min_reward",
    "response_diversity": "too many of its responses are the same (orchestrator.generation.filters.response_diversity)",
    "reasonable_length": "its mean length is outside orchestrator.generation.filters.reasonable_length",
    "rollout_filter_ratio": "its rewards vary less (std) or more (std_rev) than those of the groups that were kept"
    " (orchestrator.generation.filters.rollout_filter_ratio)",
    "custom": "the function of trainer.filters.custom rejected it",
    "straggler": "it took much longer than other groups (orchestrator.generation.straggler)",
}
"""Reasons to drop a valid group. The first three always apply, the others if the run enables them.

The trainer applies the first five and `custom`, the orchestrator the others and, if configured, `zero_variance`.
"""
DEFECTS: frozenset[FilterRule] = frozenset(("no_tokens", "nonfinite_reward", "nonfinite_logprob", "logprob"))
"""Reasons that point to a defect: such a group is kept for inspection."""


def end_of_turn(fault: Fault | None, *, cut: Literal["length", "context"] | None) -> End:
    """Return how an episode ended that the environment ended. Args: cut: the limit that cut the last turn, if any."""
    return cut or fault or "answered"
