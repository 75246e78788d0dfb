"""From the configuration's section to the algorithm that it names."""

from __future__ import annotations

from services.trainer.algorithms.cispo import Cispo
from services.trainer.algorithms.dapo import Dapo
from services.trainer.algorithms.drgrpo import DrGrpo
from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.gspo import Gspo
from services.trainer.algorithms.on_policy_distillation import OnPolicyDistillation
from services.trainer.algorithms.ppo import CriticOptions, Ppo
from services.trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from services.trainer.algorithms.rloo import Rloo
from services.trainer.algorithms.terms.actor import ActorOptions
from services.trainer.algorithms.terms.algorithm import Algorithm
from services.trainer.algorithms.terms.distillation import Taught
from services.trainer.algorithms.terms.importance import Correction
from services.trainer.algorithms.terms.policy_gradient import RewardOptions
from services.trainer.algorithms.terms.rewards import Normalization, Overlong
from services.trainer.algorithms.terms.surrogate import Clip
from shared import algorithm_schema as schema


def algorithm(section: schema.PolicyGradientSection, n_updates: int, max_response_length: int) -> Algorithm:
    """With `n_updates` optimizer updates on the data of a step, and turns of so many tokens at most."""
    actor, rewards = _actor(section), _rewards(section, max_response_length)
    match section:
        case schema.GrpoSection():
            return Grpo(actor, rewards, n_updates)
        case schema.DrGrpoSection():
            return DrGrpo(actor, rewards, n_updates)
        case schema.RlooSection():
            return Rloo(actor, rewards, n_updates)
        case schema.DapoSection():
            return Dapo(actor, rewards, n_updates, section.advantage_estimator)
        case schema.GspoSection():
            return Gspo(actor, rewards, n_updates, section.advantage_estimator)
        case schema.CispoSection():
            return Cispo(actor, rewards, n_updates, section.advantage_estimator)
        case schema.ReinforcePlusPlusSection():
            return ReinforcePlusPlus(actor, rewards, n_updates, section.gamma, section.baseline)
        case schema.OnPolicyDistillationSection():
            return OnPolicyDistillation(actor, rewards, n_updates, section.teacher_kl_coef, section.gamma)
        case schema.PpoSection():
            return ppo(section, n_updates, max_response_length)
    raise AssertionError(f"no algorithm for {section!r}")


def taught(made: Algorithm, section: schema.PolicyGradientSection) -> Algorithm:
    """The section's algorithm, beside its teacher if it has one."""
    if not section.teacher_kl_coef or isinstance(section, schema.OnPolicyDistillationSection):
        return made
    return Taught(made, section.teacher_kl_coef)


def ppo(section: schema.PpoSection, n_updates: int, max_response_length: int) -> Ppo:
    """As `algorithm`."""
    critic = CriticOptions(section.gamma, section.gae_lambda, section.whiten_advantages, section.clip_range_value)
    return Ppo(_actor(section), _rewards(section, max_response_length), n_updates, critic)


def _actor(section: schema.PolicyGradientSection) -> ActorOptions:
    high = section.epsilon if section.epsilon is None or section.epsilon_high is None else section.epsilon_high
    return ActorOptions(
        clip=Clip(section.epsilon, high, section.epsilon_c),
        ratio="sequence" if isinstance(section, schema.GspoSection) else "token",
        surrogate="weighted" if isinstance(section, schema.CispoSection) else "clipped",
        correction=Correction(
            section.sampler_is, section.sampler_is_threshold, section.sampler_rs, section.sampler_rs_bounds
        ),
        beta=section.beta if section.kl_in == "loss" else 0.0,
        kl_mode=section.kl_loss_mode,
        entropy_coef=section.entropy_coef,
    )


def _rewards(section: schema.PolicyGradientSection, max_response_length: int) -> RewardOptions:
    how, overlong = section.reward_normalization, None
    if isinstance(section, schema.DapoSection) and section.overlong_buffer is not None:
        longest = section.overlong_length or max_response_length
        overlong = Overlong(longest, section.overlong_buffer, section.overlong_penalty)
    return RewardOptions(
        credit=section.credit,
        normalization=None if how.method == "identity" else Normalization(how.grouping, how.method),
        overlong=overlong,
        kl_coef=section.beta if section.kl_in == "reward" else 0.0,
        mask_truncated=section.mask_truncated,
    )
