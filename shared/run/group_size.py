"""How large a group may become by the configuration: what could not be taken in is refused before anything is sampled,
not as poison when its longest episodes arrive.
"""

from __future__ import annotations

from shared.errors import ConfigError
from shared.routing import RoutingShape
from shared.run.archive import MAX_GROUP_BYTES
from shared.schema import RunConfig
from shared.types import MAX_GROUP_OBJECTS

_TOKEN_BYTES, _TEACHER_BYTES = 9, 4
"""Of a token its id, its log-probability and its place in the loss mask; and its log-probability by a teacher."""
_EPISODE_BYTES = 2**16
"""For what else an episode has: texts, spans, turns, rewards."""
_TURN_VALUES, _EPISODE_VALUES = 20, 128
"""Of a message of the model its span, itself, and two messages that answer it; and of what else an episode has."""


def check_group(config: RunConfig, routing: RoutingShape | None) -> None:
    """Raises ConfigError if a group whose episodes are all as long as rollout.engine.context_length, and have
    orchestrator.max_turns turns, is larger than the trainer takes in.

    Args:
        routing: of the model's experts, if it has any.
    """
    n, length = config.grpo_config.num_generations, config.rollout.engine.context_length
    of_experts = routing.token_bytes if routing is not None and config.model.routing_replay else 0
    of_token = _TOKEN_BYTES + (_TEACHER_BYTES if config.algorithm.teacher_kl_coef else 0) + of_experts
    of_episode = length * of_token + _EPISODE_BYTES
    if n * of_episode <= MAX_GROUP_BYTES:
        _check_values(n, min(config.orchestrator.max_turns, length // 2))
        return
    knobs = {
        "model.routing_replay=": "false" if of_experts else None,
        "rollout.engine.context_length=": max(0, (MAX_GROUP_BYTES // n - _EPISODE_BYTES) // of_token),
        "grpo_config.num_generations=": MAX_GROUP_BYTES // of_episode,
    }
    told = f", {of_experts} of them which experts it was sent to" if of_experts else ""
    raise ConfigError(
        f"a group of {n} episodes of {length:,} tokens may have {n * of_episode / 2**20:,.0f} MiB, and"
        f" {MAX_GROUP_BYTES >> 20} is the most that is taken in: {of_token} bytes a token{told}",
        " or ".join(f"{key}{value}" for key, value in knobs.items() if value),
    )


def _check_values(n: int, turns: int) -> None:
    of_episode = turns * _TURN_VALUES + _EPISODE_VALUES
    if n * of_episode > MAX_GROUP_OBJECTS:
        knobs = {
            "orchestrator.max_turns=": max(0, (MAX_GROUP_OBJECTS // n - _EPISODE_VALUES) // _TURN_VALUES),
            "grpo_config.num_generations=": MAX_GROUP_OBJECTS // of_episode,
        }
        raise ConfigError(
            f"a group of {n} episodes of {turns:,} turns may have {n * of_episode:,} values, and {MAX_GROUP_OBJECTS:,}"
            " is the most that is taken in",
            " or ".join(f"{key}{value}" for key, value in knobs.items() if value),
        )
