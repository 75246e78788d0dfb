"""AdamW with warm-up, schedule and clipping, which keeps the last gradient norm in its state.

The norm is that of the whole step's gradient, the sum over its micro-batches. All parameters decay, except those that
get no gradient by design: these are buffers elsewhere, which an optimizer never sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shared.models.names import is_untrained


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """`warmup_steps` and `total_steps` count optimizer steps; `max_grad_norm` clips the global norm."""

    learning_rate: float
    schedule_type: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    total_steps: int
    b1: float
    b2: float
    weight_decay: float
    max_grad_norm: float


class NormState(NamedTuple):
    norm: jax.Array


def make_optimizer(options: OptimizerOptions) -> optax.GradientTransformation:
    """Make the transformation; the first element of its state is a NormState."""
    return optax.chain(
        _record_norm(),
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adamw(schedule(options), options.b1, options.b2, weight_decay=options.weight_decay, mask=_decays),
    )


def _decays(params: Any) -> Any:
    """Tell for each parameter whether it decays; a path holds the parts of its name, and Flax's `value` at its end."""

    def of_leaf(path: Sequence[Any], _value: Any) -> bool:
        return not is_untrained(jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"))

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def schedule(options: OptimizerOptions) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up from 0, then constant or a decay to 0 at `total_steps`."""
    peak, rest = options.learning_rate, max(1, options.total_steps - options.warmup_steps)
    after: optax.Schedule = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[options.schedule_type]
    if not options.warmup_steps:
        return after
    # A rate of exactly 0 would waste the first step of the warm-up.
    warmup = optax.linear_schedule(peak / options.warmup_steps, peak, options.warmup_steps)
    return optax.join_schedules([warmup, after], [options.warmup_steps])


def _record_norm() -> optax.GradientTransformation:
    def init(_params: Any) -> NormState:
        return NormState(jnp.zeros((), jnp.float32))

    def update(updates: Any, _state: NormState, _params: Any = None) -> tuple[Any, NormState]:
        return updates, NormState(optax.global_norm(updates).astype(jnp.float32))

    return optax.GradientTransformation(init, update)
