"""Prometheus metrics of the trainer: gauges of the last step, named as in `metrics.jsonl`, and counters of totals."""

from __future__ import annotations

import math

from shared.process.sinks import Line, LineKind
from shared.process.telemetry import REGISTRY, Counter, Gauge, Histogram
from shared.types import WeightVersion

_OF_THE_LAST_STEP = {
    "loss": "Loss",
    "grad_norm": "Norm of the gradient before clipping",
    "reward_mean": "Mean reward of an episode",
    "reward_std": "Standard deviation of the rewards of all episodes",
    "success": "Share of the episodes that succeeded",
    "truncation_rate": "Share of the episodes that were truncated",
    "kl": "Mean Kullback-Leibler divergence from the reference model in nats a token; 0 without one",
    "entropy": "Mean entropy of the policy in nats a token",
    "clip_fraction": "Share of the tokens whose ratio was clipped",
    "logprob_abs_diff": "Mean |log p(trainer) - log p(rollout)| in nats a token",
    "logprob_abs_diff_current": "The same over tokens sampled with the weights being trained; NaN without any",
    "logprob_abs_diff_current_max": "Largest difference over these tokens; NaN without any",
    "staleness_mean": "Mean staleness of a group in steps, by its oldest token",
    "staleness_max": "Largest staleness of a group in steps",
    "spot_check_ratio": "Largest ratio of a server's difference in spot checks to rounding noise; NaN without any",
}
_LAST = {
    name: Gauge(f"volley_trainer_{name}", f"{text} (of the last step)", registry=REGISTRY)
    for name, text in _OF_THE_LAST_STEP.items()
}
_LAST |= {
    name: Gauge(f"volley_trainer_{name}", f"Share of the {what} (of the last step)", registry=REGISTRY)
    for name, what in {
        "zero_variance_groups": "groups whose rewards are equal",
        "zero_variance_tokens": "sampled tokens whose group has equal rewards",
        "routing_diff": "layers, averaged over tokens, whose experts differ from the trainer's choice; NaN without any",
    }.items()
}
_EPOCH = Gauge("volley_trainer_epoch", "Epoch of the trainer: number of its starts on this run", registry=REGISTRY)
_STEP = Gauge(
    "volley_trainer_step",
    "Step of the newest weights; a restart sets it back to the newest checkpoint's",
    registry=REGISTRY,
)
DURABLE = Gauge("volley_trainer_durable_step", "Newest step that is durable in the log", registry=REGISTRY)
BUCKET = Gauge(
    "volley_trainer_bucket_step", "Newest step that the run's bucket has; 0 while it has no head", registry=REGISTRY
)
CHECKPOINT = Gauge("volley_trainer_checkpoint_step", "Step of the newest checkpoint", registry=REGISTRY)
_STEPS = Counter("volley_trainer_steps", "Optimizer steps of RL made by this process", registry=REGISTRY)
_TOKENS = Counter("volley_trainer_tokens", "Tokens trained on", registry=REGISTRY)
_SEQUENCE_TOKENS = Counter(
    "volley_trainer_sequence_tokens",
    "Tokens of the episodes trained on, prompts and observations too",
    registry=REGISTRY,
)
_GROUPS = Counter("volley_trainer_groups", "Groups trained on", registry=REGISTRY)
_EPISODES = Counter("volley_trainer_episodes", "Episodes trained on", registry=REGISTRY)
SUSPECTED = Gauge(
    "volley_trainer_suspected_server",
    "1 for a rollout server that computes something else than the weights it names, by spot checks",
    ["server", "fault"],
    registry=REGISTRY,
)
REFUSED = Counter("volley_trainer_refused_steps", "Steps refused because of non-finite numbers", registry=REGISTRY)
TICKETS = Counter("volley_trainer_tickets", "Tickets by how they ended", ["disposition"], registry=REGISTRY)
FILTERED = Counter("volley_trainer_filtered_groups", "Groups that were filtered", ["rule"], registry=REGISTRY)
PART_SECONDS = Histogram(
    "volley_trainer_part_seconds",
    "Duration of a part of a step",
    ["part"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
    registry=REGISTRY,
)

for _gauge in _LAST.values():
    _gauge.set(math.nan)


def show(kind: LineKind, line: Line) -> None:
    """Set the gauges to the last step, and add it to the counters."""
    if kind == "step":
        _show_step(line)
    elif kind == "supervised" and line["step"]:
        _show_supervised(line)


def _show_step(line: Line) -> None:
    for name in _LAST:
        _show_value(name, line)
    _show_version(line)
    SUSPECTED.clear()
    for one in line.get("spot_checks", ()):
        if "fault" in one:
            SUSPECTED.labels(one["url"], one["fault"]).set(1)
    _STEPS.inc()
    _TOKENS.inc(line["tokens"])
    _SEQUENCE_TOKENS.inc(line["sequence_tokens"])
    _GROUPS.inc(line["groups"])
    _EPISODES.inc(line["episodes"])


def _show_supervised(line: Line) -> None:
    for name in ("loss", "grad_norm"):
        _show_value(name, line)
    _show_version(line)
    _TOKENS.inc(line["tokens"])


def _show_value(name: str, line: Line) -> None:
    value = line.get(name)
    _LAST[name].set(math.nan if value is None else value)


def _show_version(line: Line) -> None:
    version = WeightVersion.parse(line["version"])
    _EPOCH.set(version.epoch)
    _STEP.set(version.step)
