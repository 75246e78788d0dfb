"""Checks of the user's own rules on made data, before a run trains with them.

A loss has to be finite, differentiable, without gradient outside the mask, the same each time, and the same whether
sequences are in one micro-batch, in several, or packed into a row. Advantages, filters and credits have to give what is
asked for any rewards and for a group of one, and the same each time. An error names the property that the rule lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from services.trainer.algorithms.terms.surrogate import Tokens
from shared import own_rules
from shared.algorithm_base import PolicyGradientSection
from shared.errors import ConfigError, RuleFailed
from shared.rule_code import checked, read
from volley_algorithms.rules.credit import credit_of
from volley_algorithms.rules.losses import LossFunction, loss_of
from volley_algorithms.rules.made import made_groups, made_tokens, made_turns, packed, single
from volley_algorithms.rules.of_groups import advantage_of, filter_of
from volley_algorithms.sections import OwnSection

_DISTANCES = (0.0, 0.1, 5.0)
"""Standard deviations of the present log-probabilities from the sampler's, in nats: on policy, near it, far from it."""
_TOLERANCE = 2e-4
"""Largest difference by the order of float32 sums, as a share of the largest value."""


def check_rules(section: PolicyGradientSection, keeps: str | None) -> None:
    """Try the user's rules: those of an algorithm, and the filter `keeps`. Raises ConfigError.

    It runs their code, which may compute: several processes have to share their devices before.
    """
    has_reference = section.beta > 0
    if isinstance(section, OwnSection) and section.loss:
        _check_loss(section.loss, reference=has_reference)
    if isinstance(section, OwnSection) and section.advantage:
        checked(own_rules.ADVANTAGE, section.advantage, advantage_of, made_groups(reference=has_reference))
    if section.credit not in own_rules.CREDITS:
        checked(own_rules.CREDIT, section.credit, credit_of, made_turns())
    if keeps:
        checked(own_rules.FILTER, keeps, filter_of, made_groups(reference=False))


def _check_loss(value: str, *, reference: bool) -> None:
    try:
        rule = read(value)
        problem = next(_problems_of_loss(loss_of(rule), reference=reference), None)
    except RuleFailed as error:
        raise ConfigError(f"{own_rules.LOSS}, on made data: {error.detail}", error.hint) from error
    if problem:
        raise ConfigError(f"{own_rules.LOSS}: {rule} {problem}")


class _Measured(NamedTuple):
    """Loss of each token, 0 at masked ones, and its gradient to all log-probabilities; float32 [B, T] each."""

    loss: np.ndarray
    gradient: np.ndarray


def _measuring(loss: LossFunction) -> Callable[[Tokens], _Measured]:
    """Return a function that computes the loss as the trainer does; it traces the loss once for each shape."""

    def total(logprobs: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        per_token = loss(tokens._replace(logprobs=logprobs)) * tokens.mask
        return per_token.sum(), per_token

    compiled = jax.jit(jax.value_and_grad(total, has_aux=True))

    def measured(tokens: Tokens) -> _Measured:
        (_, per_token), gradient = compiled(tokens.logprobs, tokens)
        return _Measured(np.asarray(per_token), np.asarray(gradient))

    return measured


def _problems_of_loss(loss: LossFunction, *, reference: bool) -> Iterator[str]:
    measured, measured_again = _measuring(loss), _measuring(loss)
    for distance in _DISTANCES:
        tokens = made_tokens(distance, reference=reference)
        whole, again = measured(tokens), measured_again(tokens)
        outside = np.asarray(tokens.mask) == 0
        if not all(np.isfinite(one).all() for one in whole):
            yield f"is not finite: its value or gradient is NaN or infinite {distance:g} nats from the sampler"
        if not distance and not whole.gradient.any():
            yield "is not differentiable: its gradient to the log-probabilities is 0 on policy"
        if not all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True)):
            yield "is not deterministic: two calls with the same inputs differ"
        if whole.gradient[outside].any():
            yield "has a gradient outside the mask: use tokens.mask, sequence_sum or sequence_mean"
        rows, n = [measured(single(tokens, i)) for i in range(len(outside))], outside.shape[1]
        if not _alike(whole, _Measured(*(np.concatenate([x[:, :n] for x in xs]) for xs in zip(*rows, strict=True)))):
            yield "gives another result for one micro-batch than for several: a token may depend on its sequence alone"
        if not _alike(whole, _Measured(*(x.reshape(outside.shape) for x in measured(packed(tokens))))):
            yield "gives another result for packed rows: sum along sequences with sequence_sum or sequence_mean"


def _alike(one: _Measured, other: _Measured) -> bool:
    return all(np.allclose(a, b, 0, _TOLERANCE * float(np.abs(a).max())) for a, b in zip(one, other, strict=True))
