"""Prometheus metrics of the orchestrator."""

from __future__ import annotations

from shared.telemetry import REGISTRY, Counter, Gauge, Histogram

EPISODES = Counter("volley_episodes", "Episodes ended", ["purpose", "status"], registry=REGISTRY)
EPISODES_RUNNING = Gauge("volley_episodes_running", "Episodes in progress", registry=REGISTRY)
EPISODE_SECONDS = Histogram(
    "volley_episode_seconds", "Duration of an episode", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000), registry=REGISTRY
)
TOKENS = Counter("volley_tokens_sampled", "Tokens sampled by the model", ["purpose"], registry=REGISTRY)
GENERATE_SECONDS = Histogram(
    "volley_generate_seconds", "Duration of one generate request", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100), registry=REGISTRY
)
RETRIES = Counter("volley_episode_retries", "Attempts that failed for reasons of infrastructure", ["error"], registry=REGISTRY)
GROUPS = Counter("volley_groups", "Groups by what became of them", ["outcome"], registry=REGISTRY)
