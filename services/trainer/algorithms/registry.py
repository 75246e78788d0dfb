"""Registry of algorithms by `algorithm.name`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.trainer.algorithms.cispo import Cispo
from services.trainer.algorithms.dapo import Dapo
from services.trainer.algorithms.dppo import Dppo
from services.trainer.algorithms.drgrpo import DrGrpo
from services.trainer.algorithms.echo import Echo
from services.trainer.algorithms.gdpo import Gdpo
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.gspo import Gspo
from services.trainer.algorithms.kpop import Kpop
from services.trainer.algorithms.maxrl import MaxRl
from services.trainer.algorithms.mopd import Mopd
from services.trainer.algorithms.on_policy_distillation import OnPolicyDistillation
from services.trainer.algorithms.own import Own
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from services.trainer.algorithms.rloo import Rloo
from services.trainer.algorithms.sao import Sao
from services.trainer.algorithms.sapo import Sapo
from services.trainer.algorithms.terms.algorithm import Algorithm
from services.trainer.algorithms.terms.distillation import Taught
from services.trainer.algorithms.terms.policy_gradient import PolicyGradient
from shared.algorithm_base import PolicyGradientSection

ALGORITHMS: Mapping[str, type[PolicyGradient[Any]]] = {
    "cispo": Cispo,
    "dapo": Dapo,
    "dppo": Dppo,
    "drgrpo": DrGrpo,
    "echo": Echo,
    "gdpo": Gdpo,
    "grpo": Grpo,
    "gspo-token": Gspo,
    "kpop": Kpop,
    "maxrl": MaxRl,
    "mopd": Mopd,
    "on_policy_distillation": OnPolicyDistillation,
    "own": Own,
    "ppo": Ppo,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "rloo": Rloo,
    "sao": Sao,
    "sapo": Sapo,
}


def algorithm(section: PolicyGradientSection, n_updates: int, max_response_length: int) -> PolicyGradient[Any]:
    """Make the algorithm of a section; arguments as for `PolicyGradient`. Raises RuleFailed for a rule without text."""
    return ALGORITHMS[section.name](section, n_updates, max_response_length)


def taught(made: Algorithm, section: PolicyGradientSection) -> Algorithm:
    """Add the section's teacher, if any, to an algorithm that has none."""
    return Taught(made, section.teacher_kl_coef) if section.teacher_kl_coef and not made.needs.teacher else made
