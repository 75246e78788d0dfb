"""Statistics of a loss that combine exactly over micro-batches with different token counts.

A statistic is a pytree of float32 scalars, so a compiled loss can return it; `joined` combines those of two
micro-batches, and `value` is the number in the step's line of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np


class Statistic(Protocol):
    """Protocol of the kinds below."""

    def joined(self, other: Self) -> Self: ...

    def value(self) -> float | None: ...


_LEAST_VARIANCE = 1e-9

type Statistics = Mapping[str, Statistic]


class Sum(NamedTuple):
    """Sum over all tokens of the step."""

    total: Any

    def joined(self, other: Self) -> Self:
        return type(self)(self.total + other.total)

    def value(self) -> float:
        return float(self.total)


class Mean(NamedTuple):
    """Mean over the unmasked tokens; None if there are none."""

    total: Any
    count: Any

    def joined(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return float(self.total) / float(self.count) if self.count else None


class Largest(NamedTuple):
    """Maximum over the unmasked tokens; None if there are none."""

    largest: Any
    count: Any

    def joined(self, other: Self) -> Self:
        return type(self)(np.maximum(self.largest, other.largest), self.count + other.count)

    def value(self) -> float | None:
        return float(self.largest) if self.count else None


class EffectiveShare(NamedTuple):
    """Kish's effective sample size of the weights w of n tokens, as a share of n.

    (Σw)² / (n Σw²), in (0, 1]; 0 if every weight is 0, None without tokens.
    """

    total: Any
    squares: Any
    count: Any

    def joined(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))

    def value(self) -> float | None:
        if not self.count:
            return None
        return float(self.total) ** 2 / (float(self.count) * float(self.squares)) if self.squares else 0.0


class ExplainedVariance(NamedTuple):
    """1 - Var(error) / Var(wanted) of n predictions, from their sums; None without tokens or variance of `wanted`."""

    count: Any
    wanted: Any
    wanted_squares: Any
    error: Any
    error_squares: Any

    def joined(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))

    def value(self) -> float | None:
        n, wanted, wanted_squares, error, error_squares = map(float, self)
        if not n or (variance := wanted_squares / n - (wanted / n) ** 2) <= _LEAST_VARIANCE:
            return None
        return 1.0 - max(0.0, error_squares / n - (error / n) ** 2) / variance


def total(mask: jax.Array) -> Sum:
    """Count the unmasked tokens; mask is float32 [B, T]."""
    return Sum(mask.sum())


def mean(x: jax.Array, mask: jax.Array) -> Mean:
    """Average x [B, T] where mask is 1; masked elements may hold any value, NaN included."""
    return Mean(jnp.where(mask > 0, x, 0.0).sum(), mask.sum())


def largest(x: jax.Array, mask: jax.Array) -> Largest:
    """Find the maximum of x [B, T], which is not negative, where mask is 1."""
    return Largest(jnp.where(mask > 0, x, 0.0).max(), mask.sum())


def effective_share(weights: jax.Array, mask: jax.Array) -> EffectiveShare:
    """Compute the effective share of the weights [B, T] where mask is 1."""
    held = jnp.where(mask > 0, weights, 0.0)
    return EffectiveShare(held.sum(), jnp.square(held).sum(), mask.sum())


def explained_variance(found: jax.Array, wanted: jax.Array, mask: jax.Array) -> ExplainedVariance:
    """Compare predictions with their targets, [B, T] each, where mask is 1."""
    r = jnp.where(mask > 0, wanted, 0.0)
    e = jnp.where(mask > 0, wanted - found, 0.0)
    return ExplainedVariance(mask.sum(), r.sum(), jnp.square(r).sum(), e.sum(), jnp.square(e).sum())


def joined(parts: list[Statistics]) -> Statistics:
    """Combine the statistics of several micro-batches; host arrays."""
    return reduce(lambda a, b: {name: one.joined(b[name]) for name, one in a.items()}, parts)


def values(statistics: Statistics) -> dict[str, float | None]:
    """Return the statistics' values by name."""
    return {name: one.value() for name, one in statistics.items()}
