"""AdamW with warm-up, schedule and clipping, which keeps the last gradient norm in its state.

The norm is that of the whole step's gradient, the sum over its micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax


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
        optax.adamw(schedule(options), b1=options.b1, b2=options.b2, weight_decay=options.weight_decay),
    )


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
