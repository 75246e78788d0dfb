"""Registry of algorithms by their section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.trainer.algorithms.cispo import Cispo
from services.trainer.algorithms.dapo import Dapo
from services.trainer.algorithms.drgrpo import DrGrpo
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.gspo import Gspo
from services.trainer.algorithms.on_policy_distillation import OnPolicyDistillation
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from services.trainer.algorithms.rloo import Rloo
from services.trainer.algorithms.terms.algorithm import Algorithm
from services.trainer.algorithms.terms.distillation import Taught
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient
from shared import algorithm_schema as schema

ALGORITHMS: Mapping[type[schema.PolicyGradientSection], type[PolicyGradient[Any]]] = {
    schema.GrpoSection: Grpo,
    schema.DrGrpoSection: DrGrpo,
    schema.RlooSection: Rloo,
    schema.DapoSection: Dapo,
    schema.GspoSection: Gspo,
    schema.CispoSection: Cispo,
    schema.ReinforcePlusPlusSection: ReinforcePlusPlus,
    schema.OnPolicyDistillationSection: OnPolicyDistillation,
    schema.PpoSection: Ppo,
}


def algorithm(section: schema.PolicyGradientSection, n_updates: int, max_response_length: int) -> PolicyGradient[Any]:
    """Make the algorithm of a section; see `PolicyGradient.of`."""
    return ALGORITHMS[type(section)].of(section, n_updates, max_response_length)


def taught(made: Algorithm, section: schema.PolicyGradientSection) -> Algorithm:
    """Add the section's teacher, if any, to an algorithm that has none."""
    return Taught(made, section.teacher_kl_coef) if section.teacher_kl_coef and not made.needs.teacher else made
