"""Why an episode gets no reward. Neither is the environment's fault, and neither is ever a reward of zero."""

from __future__ import annotations

from shared.errors import InputError, Unavailable


class RewardFailed(Unavailable):
    """A judge or reward service did not answer, or not with a score: the episode fails, and is played again."""

    title = "No reward"


class JudgementUnusable(RewardFailed):
    """What came is empty, or was cut: there is nothing to read in it, and it is not kept."""


class RewardRefused(InputError):
    """Asking again gives nothing else: a wrong key or model, or a budget that is used up."""

    title = "Reward refused"
