"""What a step is measured by, in numpy float64; the fields of a line of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.trainer.intake import Held


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step.

    Per token: `kl` to the reference model (0 without one), `logprob_abs_diff` mean |log p(trainer) - log p(rollout)|,
    `logprob_abs_diff_current` and `…_max` mean and largest over tokens sampled with the weights being trained (None without),
    `clip_fraction`, `entropy` (nats). Per episode: `reward_*`, `success`, `truncation_rate`. Per group: `staleness_*` in
    steps, of its oldest token. `tokens` are trained ones, `sequence_tokens` all. `version` is that of the weights made.
    """

    step: int
    version: str
    loss: float
    grad_norm: float
    reward_mean: float
    reward_std: float
    success: float
    truncation_rate: float
    kl: float
    logprob_abs_diff: float
    logprob_abs_diff_current: float | None
    logprob_abs_diff_current_max: float | None
    clip_fraction: float
    entropy: float
    tokens: int
    sequence_tokens: int
    groups: int
    episodes: int
    staleness_mean: float
    staleness_max: int


def of_groups(held: Sequence[Held], step: int) -> dict[str, Any]:
    """The fields that come from the data alone; `step` is that of the weights before the update."""
    trajectories = [t for h in held for t in h.group.trajectories]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    staleness = [max(0, step - h.oldest.step) for h in held]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "success": float(np.mean([t.success for t in trajectories])),
        "truncation_rate": float(np.mean([t.status == "truncated" for t in trajectories])),
        "sequence_tokens": int(sum(len(t.token_ids) for t in trajectories)),
        "groups": len(held),
        "episodes": len(trajectories),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": int(max(staleness)),
    }


def of_sums(sums: Mapping[str, float]) -> dict[str, Any]:
    """The per-token means from the loss's sums."""
    n, n_current = max(sums["tokens"], 1.0), sums["current_tokens"]
    return {
        "kl": sums["kl"] / n,
        "logprob_abs_diff": sums["delta"] / n,
        "logprob_abs_diff_current": sums["delta_current"] / n_current if n_current else None,
        "logprob_abs_diff_current_max": sums["delta_current_max"] if n_current else None,
        "clip_fraction": sums["clipped"] / n,
        "entropy": sums["entropy"] / n,
        "tokens": int(sums["tokens"]),
    }
