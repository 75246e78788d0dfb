"""Metrics of an RL step, computed in numpy float64: the fields of a line of `metrics.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.trainer.algorithms.terms.advantages import moments
from services.trainer.groups.group_buffer import ReadyGroup
from shared.types import Group, Trajectory

_MOST_COMPONENTS = 64


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step; `version` is that of the resulting weights.

    Per token: `kl` to the reference model (0 without one); `logprob_abs_diff`, the mean |log p(trainer) -
    log p(rollout)|; `logprob_abs_diff_current` and `…_max`, mean and largest over tokens sampled with the weights being
    trained (None without); `clip_fraction`; `entropy` (nats). Per episode: `reward_*`, `success`, `truncation_rate`.
    Per group: `staleness_*` in steps, of its oldest token. `tokens` counts trained tokens, `sequence_tokens` all,
    those that several sequences of an episode share once.

    `ends` are shares of episodes by how they ended, `end_tokens` their mean sampled tokens. `faults` counts turns by
    fault; `failed_attempts` counts failed attempts of these episodes by class of error; `retried_tokens` is the mean
    sampled tokens of episodes with failed attempts (None without): if it exceeds the overall mean, long episodes fail
    more. `more` has further statistics of the algorithm, which the line holds under their own names.
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
    ends: Mapping[str, float]
    end_tokens: Mapping[str, float]
    faults: Mapping[str, int]
    failed_attempts: Mapping[str, int]
    retried_tokens: float | None
    more: Mapping[str, float | None] = field(default_factory=dict[str, float | None])


def of_groups(held: Sequence[ReadyGroup], step: int) -> dict[str, Any]:
    """Compute the fields that depend only on the data; `step` is that of the weights before the update."""
    trajectories = [t for h in held for t in h.group.trajectories]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    staleness = [max(0, step - h.oldest.step) for h in held]
    mean, deviation = moments(rewards)
    return {
        "reward_mean": mean,
        "reward_std": deviation,
        "success": float(np.mean([t.success for t in trajectories])),
        "truncation_rate": float(np.mean([t.status == "truncated" for t in trajectories])),
        "sequence_tokens": sum(t.n_stored for t in trajectories),
        "groups": len(held),
        "episodes": len(trajectories),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": int(max(staleness)),
        **_outcomes(trajectories),
    }


def of_environments(groups: Sequence[Group], main: str) -> dict[str, float | int]:
    """Compute `env/NAME/reward_mean`, `…/success` (means over episodes) and `…/groups` of each environment.

    Empty if all groups are of the main environment.
    """
    by_env: dict[str, list[Group]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    if by_env.keys() <= {main}:
        return {}
    found: dict[str, float | int] = {}
    for env, its in sorted(by_env.items()):
        trajectories = [t for group in its for t in group.trajectories]
        found[f"env/{env}/reward_mean"] = moments(np.array([t.reward for t in trajectories], np.float64))[0]
        found[f"env/{env}/success"] = float(np.mean([t.success for t in trajectories]))
        found[f"env/{env}/groups"] = len(its)
    return found


def of_components(groups: Sequence[Group]) -> dict[str, float]:
    """Compute `reward/NAME`, the mean of each reward component over the episodes of this step.

    An episode without the component counts 0. Empty if there is only one component.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    names = sorted({name for t in trajectories for name in t.reward_components})[:_MOST_COMPONENTS]
    if len(names) < 2:
        return {}
    parts = {name: np.array([t.reward_components.get(name, 0.0) for t in trajectories], np.float64) for name in names}
    return {f"reward/{name}": moments(values)[0] for name, values in parts.items()}


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    lengths: dict[str, list[int]] = {}
    faults, failures = Counter[str](), Counter[str]()
    for t in trajectories:
        lengths.setdefault(t.end or t.status, []).append(t.n_sampled)
        faults.update(t.faults)
        failures.update(t.failures)
    retried = [t.n_sampled for t in trajectories if t.failures]
    return {
        "ends": {end: len(n) / len(trajectories) for end, n in sorted(lengths.items())},
        "end_tokens": {end: float(np.mean(n)) for end, n in sorted(lengths.items())},
        "faults": dict(sorted(faults.items())),
        "failed_attempts": dict(sorted(failures.items())),
        "retried_tokens": float(np.mean(retried)) if retried else None,
    }


_FIELDS = (
    "kl",
    "logprob_abs_diff",
    "logprob_abs_diff_current",
    "logprob_abs_diff_current_max",
    "clip_fraction",
    "entropy",
)


def of_statistics(statistics: Mapping[str, float | None]) -> dict[str, Any]:
    """Convert a loss's statistics to fields; those without a field of their own are in `more`."""
    maybe = ("logprob_abs_diff_current", "logprob_abs_diff_current_max")
    fields = {name: statistics.get(name) if name in maybe else statistics.get(name) or 0.0 for name in _FIELDS}
    more = {name: value for name, value in statistics.items() if name not in _FIELDS and name != "tokens"}
    return {**fields, "tokens": int(statistics["tokens"] or 0), "more": more}
