"""Prometheus metrics of the orchestrator."""

from __future__ import annotations

import math
from typing import Literal

from shared.process.sinks import Line, LineKind
from shared.process.telemetry import REGISTRY, Counter, Gauge, Histogram
from shared.types import Trajectory

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

EPISODES = Counter(
    "volley_episodes", "Episodes that are data, by how they ended", ["purpose", "end"], registry=REGISTRY
)
EPISODE_TOKENS = Histogram(
    "volley_episode_tokens", "Sampled tokens of an episode", ["end"], buckets=_LENGTHS, registry=REGISTRY
)
FAULTS = Counter(
    "volley_turn_faults", "Turns by what the model did wrong in them", ["purpose", "fault"], registry=REGISTRY
)
FAILED_ATTEMPTS = Counter(
    "volley_failed_attempts", "Attempts at episodes that failed, by class of error", ["error"], registry=REGISTRY
)
FAILED_TOKENS = Histogram(
    "volley_failed_attempt_tokens",
    "Tokens an attempt had sampled when it failed",
    ["error"],
    buckets=(0, *_LENGTHS),
    registry=REGISTRY,
)
EPISODES_RUNNING = Gauge("volley_episodes_running", "Episodes in progress", registry=REGISTRY)
EPISODE_SECONDS = Histogram(
    "volley_episode_seconds",
    "Duration of an episode",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
    registry=REGISTRY,
)
TOKENS = Counter("volley_tokens_sampled", "Tokens sampled by the model", ["purpose"], registry=REGISTRY)
GENERATE_SECONDS = Histogram(
    "volley_generate_seconds",
    "Duration of one generate request",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=REGISTRY,
)
TEACHER_SECONDS = Histogram(
    "volley_teacher_seconds",
    "Duration of one question to the teacher, also of one that failed",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    registry=REGISTRY,
)
GROUPS = Counter("volley_groups", "Groups by what became of them", ["outcome"], registry=REGISTRY)
ENV_GROUPS = Counter(
    "volley_env_groups",
    "Groups by environment (without version; of the first 32 names) and by what became of them",
    ["env", "outcome"],
    registry=REGISTRY,
)

ENV_TURNS = Counter(
    "volley_env_turns",
    "Turns of attempts at episodes (0 is the reset) by environment, turn, reward so far and whether they were answered",
    ["env", "turn", "reward", "outcome"],
    registry=REGISTRY,
)
_MOST_TURNS = 9
_EVALUATION = {
    name: Gauge(
        f"volley_evaluation_{name}",
        f"{text} (of the main environment's last evaluation; NaN before)",
        registry=REGISTRY,
    )
    for name, text in {
        "step": "Step of the weights",
        "success": "Share of the held-out tasks that were solved",
        "reward_mean": "Mean reward of the held-out tasks",
    }.items()
}
for _gauge in _EVALUATION.values():
    _gauge.set(math.nan)


def show(kind: LineKind, line: Line) -> None:
    """Show the last evaluation of the run's main environment."""
    if kind == "evaluation" and "env" not in line:
        for name, gauge in _EVALUATION.items():
            gauge.set(line[name])


def count_turn(env: str, turn: int, reward: float, outcome: Literal["answered", "failed"]) -> None:
    """Count a turn. Args: env: environment's label, with its version; reward: of the attempt before this turn."""
    label = f"{_MOST_TURNS}+" if turn >= _MOST_TURNS else str(turn)
    sign = "positive" if reward > 0 else "negative" if reward < 0 else "zero"
    ENV_TURNS.labels(env, label, sign, outcome).inc()


def count(purpose: str, trajectory: Trajectory) -> None:
    """Count one valid episode."""
    end = str(trajectory.end)
    EPISODES.labels(purpose, end).inc()
    EPISODE_TOKENS.labels(end).observe(trajectory.n_sampled)
    for fault, n in trajectory.faults.items():
        FAULTS.labels(purpose, fault).inc(n)
    EPISODE_SECONDS.observe(trajectory.timings["total_s"])
    TOKENS.labels(purpose).inc(trajectory.n_sampled)
