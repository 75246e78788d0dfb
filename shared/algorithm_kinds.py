"""Algorithms that `algorithm.name` can name beside the core's: those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared import packages
from shared.algorithm_base import PolicyGradientSection


@dataclass(frozen=True, slots=True)
class AlgorithmKind:
    """Description of an algorithm, without its code.

    Args:
        section: its keys; `name` is a Literal of the entry point's name.
        algorithm: `MODULE:CLASS` of a `services.trainer.algorithms.terms.policy_gradient.PolicyGradient`. Only the
            trainer imports it.
    """

    section: type[PolicyGradientSection]
    algorithm: str


def kinds() -> Mapping[str, AlgorithmKind]:
    """Return the algorithms of packages, by name. Raises ConfigError."""
    return packages.loaded(packages.ALGORITHMS)
