"""Check the largest group that a configuration allows.

A group that the trainer could not accept is refused at the start, not when its longest episodes arrive.
"""

from __future__ import annotations

from shared.errors import ConfigError
from shared.routing import RoutingShape
from shared.run.archive import MAX_GROUP_BYTES
from shared.schema import RunConfig
from shared.types import MAX_GROUP_OBJECTS

_TOKEN_BYTES, _TEACHER_BYTES = 9, 4
"""Bytes per token: id, log-probability and loss mask; and the teacher's log-probability."""
_EPISODE_BYTES = 2**16
"""Bytes per episode for texts, spans, turns and rewards."""
_TURN_VALUES, _EPISODE_VALUES = 20, 128
"""Values per turn of the model (its span, its message, two messages that answer it), and further values per episode."""


def check_group(config: RunConfig, routing: RoutingShape | None) -> None:
    """Raise ConfigError if a group may be larger than the trainer accepts.

    The largest group has episodes as long as rollout.engine.context_length, with orchestrator.max_turns turns.

    Args:
        routing: of the model's experts, if it has any.
    """
    n, length = config.grpo_config.num_generations, config.rollout.engine.context_length
    of_experts, of_token = _of_experts(config, routing), token_bytes(config, routing)
    of_episode = length * of_token + _EPISODE_BYTES
    if n * of_episode <= MAX_GROUP_BYTES:
        _check_values(n, min(config.orchestrator.max_turns, length // 2))
        return
    knobs = {
        "model.routing_replay=": "false" if of_experts else None,
        "rollout.engine.context_length=": max(0, (MAX_GROUP_BYTES // n - _EPISODE_BYTES) // of_token),
        "grpo_config.num_generations=": MAX_GROUP_BYTES // of_episode,
    }
    experts = f", {of_experts} of them for its experts" if of_experts else ""
    raise ConfigError(
        f"a group of {n} episodes of {length:,} tokens may have {n * of_episode / 2**20:,.0f} MiB, more than the"
        f" {MAX_GROUP_BYTES >> 20} MiB that the trainer accepts: {of_token} bytes per token{experts}",
        " or ".join(f"{key}{value}" for key, value in knobs.items() if value),
    )


def token_bytes(config: RunConfig, routing: RoutingShape | None) -> int:
    """Return the bytes of one token of an episode."""
    of_teacher = _TEACHER_BYTES if config.algorithm.teacher_kl_coef else 0
    if any(server.templates for server in config.services.orchestrator.all_teachers().values()):
        of_teacher *= 2  # the id of the teacher's prompt
    return _TOKEN_BYTES + of_teacher + _of_experts(config, routing)


def _of_experts(config: RunConfig, routing: RoutingShape | None) -> int:
    return routing.token_bytes if routing is not None and config.model.routing_replay else 0


def _check_values(n: int, turns: int) -> None:
    of_episode = turns * _TURN_VALUES + _EPISODE_VALUES
    if n * of_episode > MAX_GROUP_OBJECTS:
        knobs = {
            "orchestrator.max_turns=": max(0, (MAX_GROUP_OBJECTS // n - _EPISODE_VALUES) // _TURN_VALUES),
            "grpo_config.num_generations=": MAX_GROUP_OBJECTS // of_episode,
        }
        raise ConfigError(
            f"a group of {n} episodes of {turns:,} turns may have {n * of_episode:,} values, more than"
            f" the {MAX_GROUP_OBJECTS:,} that the trainer accepts",
            " or ".join(f"{key}{value}" for key, value in knobs.items() if value),
        )
