"""A loss of the user's own: called, and its result checked at every call."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from services.trainer.algorithms.terms.surrogate import Tokens
from shared.errors import RuleFailed
from shared.own_rules import OwnRule
from shared.rule_code import called

type LossFunction = Callable[[Tokens], jax.Array]


def loss_of(rule: OwnRule) -> LossFunction:
    """Return the loss: float [B, T] of each token, before its mask and weight. It raises RuleFailed."""

    def loss(tokens: Tokens) -> jax.Array:
        made = called(rule, tokens)
        shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", None)
        if shape != tokens.mask.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            found = type(made).__name__ if shape is None else f"{dtype} {list(shape)}"
            raise RuleFailed(f"{rule} returned {found}", f"return float32 {list(tokens.mask.shape)}: a loss per token")
        return made.astype(jnp.float32)

    return loss
