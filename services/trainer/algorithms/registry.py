"""Registry of algorithms by `algorithm.name`: the core's, and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.terms.added import added_terms
from services.trainer.algorithms.terms.algorithm import Algorithm
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient
from shared.algorithm_base import PolicyGradientSection
from shared.algorithm_kinds import kinds

OWN: Mapping[str, type[PolicyGradient[Any]]] = {
    "grpo": Grpo,
    "ppo": Ppo,
}


def algorithm(section: PolicyGradientSection, n_updates: int, max_response_length: int) -> PolicyGradient[Any]:
    """Make the algorithm of a section; arguments as for `PolicyGradient`. Raises RuleFailed for a rule without text."""
    return _made_by(section.name)(section, n_updates, max_response_length)


def names() -> list[str]:
    """Return the names of all algorithms."""
    return [*OWN, *kinds()]


def _made_by(name: str) -> type[PolicyGradient[Any]]:
    return OWN[name] if name in OWN else resolve_name(kinds()[name].algorithm)


def taught(made: Algorithm, section: PolicyGradientSection) -> Algorithm:
    """Add the section's teacher, if any, to an algorithm that has none. Raises ConfigError."""
    if not section.teacher_kl_coef or made.needs.teacher:
        return made
    return added_terms().taught(made, section.teacher_kl_coef)
