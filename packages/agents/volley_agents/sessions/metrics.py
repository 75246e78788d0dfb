"""Metrics of the sessions, which the orchestrator serves with its own."""

from shared.process.telemetry import REGISTRY, Counter

SESSIONS = Counter("volley_sessions", "Sessions of agents by what became of them", ["state"], registry=REGISTRY)
SESSION_CALLS = Counter(
    "volley_session_calls",
    "Calls of agents: answered, repeated (with the recorded answer), refused, failed, or left by the agent",
    ["outcome"],
    registry=REGISTRY,
)
SESSION_SEQUENCES = Counter(
    "volley_session_sequences",
    "Calls of agents that did not simply continue a recorded turn, by the reason",
    ["reason"],
    registry=REGISTRY,
)
