"""The algorithm that a run is trained with: one section per algorithm, chosen by `name`.

A section holds only keys that its algorithm uses. Names and defaults are Tunix's, and verl's where Tunix has none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.section import Section

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-5
    schedule_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    b1: Decay = 0.9
    b2: Decay = 0.95
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


class GrpoConfig(Section):
    """The data of a step: `num_generations` episodes per task, `num_iterations` updates on them.

    `off_policy_steps` is the staleness bound in steps (0: synchronous). `max_response_length` bounds one turn, in
    tokens. `algorithm` decides what is computed from the data.
    """

    num_generations: PositiveInt = 8
    num_iterations: PositiveInt = 1
    off_policy_steps: NonNegativeInt = 1
    max_response_length: PositiveInt = 512


class RewardNormalization(Section):
    """Normalize the episodes' rewards before computing advantages.

    The statistics are over the episodes of one task (`state`), of one environment (`inductive`) or of the step
    (`batch`).
    """

    grouping: Literal["state", "inductive", "batch"] = "state"
    method: Literal["identity", "mean_std", "asym_clip"] = "identity"


class PolicyGradientSection(Section):
    """Keys of all algorithms.

    Probability ratios are clipped to [1 - `epsilon`, 1 + `epsilon_high`] (`epsilon_high` null: as `epsilon`; `epsilon`
    null: no clipping); `epsilon_c` is the bound of dual clip. `beta` weighs the KL to the reference, in the loss or in
    the reward (`kl_in`). `sampler_is` weighs a token by the ratio of the trainer's policy to the engine's, capped at
    `sampler_is_threshold`; `sampler_rs` removes tokens outside `sampler_rs_bounds` from the surrogate. With `credit:
    turn`, each turn gets the rewards from that turn on. `teacher_kl_coef` weighs the reverse KL to a teacher, token by
    token, in the advantages. `sequence-mean-token-scale` divides by `grpo_config.max_response_length`.
    """

    name: str
    epsilon: PositiveFloat | None = 0.2
    epsilon_high: PositiveFloat | None = None
    epsilon_c: Annotated[float, Field(gt=1)] | None = None
    loss_agg_mode: Aggregation = "token-mean"
    beta: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_loss_mode: Literal["kl", "mse_kl", "low_var_kl"] = "low_var_kl"
    entropy_coef: NonNegativeFloat = 0.0
    credit: Literal["episode", "turn"] = "episode"
    reward_normalization: RewardNormalization = RewardNormalization()
    mask_truncated: bool = False
    teacher_kl_coef: NonNegativeFloat = 0.0
    sampler_is: Literal["none", "token", "sequence"] = "none"
    sampler_is_threshold: Annotated[float, Field(ge=1)] = 2.0
    sampler_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    sampler_rs_bounds: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)

    @model_validator(mode="after")
    def _meant(self) -> Self:
        low, high = self.sampler_rs_bounds
        if not low < 1 < high:
            raise ValueError(f"sampler_rs_bounds={[low, high]} must include 1: low < 1 < high")
        given = [key for key in ("epsilon_high", "epsilon_c") if key in self.model_fields_set and getattr(self, key)]
        if self.epsilon is None and given:
            raise ValueError(f"{given[0]}={getattr(self, given[0])} has no effect: epsilon is null")
        if self.credit == "turn" and self.reward_normalization.method != "identity":
            raise ValueError("reward_normalization works on whole episodes, so it cannot be combined with credit=turn")
        return self


class GrpoSection(PolicyGradientSection):
    name: Literal["grpo"] = "grpo"


class DrGrpoSection(PolicyGradientSection):
    name: Literal["drgrpo"]
    loss_agg_mode: Aggregation = "sequence-mean-token-scale"


class RlooSection(PolicyGradientSection):
    name: Literal["rloo"]


class _GroupRelativeSection(PolicyGradientSection):
    advantage_estimator: Literal["grpo", "drgrpo", "rloo"] = "grpo"


class DapoSection(_GroupRelativeSection):
    """DAPO. Episodes of more than `overlong_length` - `overlong_buffer` sampled tokens lose up to `overlong_penalty`.

    `overlong_length` null means `grpo_config.max_response_length`, for episodes of one turn.
    """

    name: Literal["dapo"]
    epsilon_high: PositiveFloat | None = 0.28
    overlong_length: PositiveInt | None = None
    overlong_buffer: PositiveInt | None = None
    overlong_penalty: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _some_are_short(self) -> Self:
        if self.overlong_length and self.overlong_buffer and self.overlong_buffer >= self.overlong_length:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} of overlong_length={self.overlong_length} penalizes every "
                "episode: it has to be less"
            )
        return self


class GspoSection(_GroupRelativeSection):
    name: Literal["gspo-token"]
    epsilon: PositiveFloat | None = 3e-4
    epsilon_high: PositiveFloat | None = 4e-4
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"


class CispoSection(_GroupRelativeSection):
    """CISPO. The lower bound is 1 - `epsilon`, so the default of 1 means none."""

    name: Literal["cispo"]
    epsilon: PositiveFloat | None = 1.0
    epsilon_high: PositiveFloat | None = 4.0

    @model_validator(mode="after")
    def _no_dual_clip(self) -> Self:
        if self.epsilon_c is not None:
            raise ValueError("epsilon_c belongs to a clipped loss; CISPO clips the weight, not the loss")
        return self


class ReinforcePlusPlusSection(PolicyGradientSection):
    """REINFORCE++. `gamma` discounts per sampled token."""

    name: Literal["reinforce_plus_plus"]
    gamma: Fraction = 1.0
    baseline: Literal["none", "group"] = "none"

    @model_validator(mode="after")
    def _of_episodes(self) -> Self:
        if self.baseline == "group" and (self.gamma != 1 or self.credit == "turn"):
            raise ValueError("baseline=group compares whole episodes: it cannot be combined with gamma or credit=turn")
        return self


class OnPolicyDistillationSection(PolicyGradientSection):
    """On-policy distillation: train on the reverse KL to the teacher alone; rewards are ignored.

    A token's advantage is its own KL and that of later tokens, discounted by `gamma`.
    """

    name: Literal["on_policy_distillation"]
    teacher_kl_coef: PositiveFloat = 1.0
    gamma: Fraction = 0.0

    @model_validator(mode="after")
    def _no_rewards(self) -> Self:
        of_rewards = {
            "credit": self.credit == "turn",
            "reward_normalization": self.reward_normalization.method != "identity",
            "kl_in": bool(self.beta) and self.kl_in == "reward",
        }
        if meant := [key for key, is_meant in of_rewards.items() if is_meant]:
            raise ValueError(f"{meant[0]} applies to rewards, which on_policy_distillation ignores")
        return self


class PpoSection(PolicyGradientSection):
    """PPO. `gamma` and `gae_lambda` apply per sampled token.

    The first `critic_warmup_steps` steps train the critic alone. `clip_range_value` null does not clip values.
    """

    name: Literal["ppo"]
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten_advantages: bool = True
    clip_range_value: PositiveFloat | None = 0.2
    critic_warmup_steps: NonNegativeInt = 0
    critic_optimizer_config: OptimizerConfig = OptimizerConfig()


AlgorithmSection = Annotated[
    GrpoSection
    | DrGrpoSection
    | RlooSection
    | DapoSection
    | GspoSection
    | CispoSection
    | ReinforcePlusPlusSection
    | PpoSection
    | OnPolicyDistillationSection,
    Field(discriminator="name"),
]


def keys_of(name: str | None) -> Collection[str]:
    """Return the keys of the section of algorithm `name`; empty for an unknown name."""
    sections: tuple[type[PolicyGradientSection], ...] = get_args(get_args(AlgorithmSection)[0])
    return next((one.model_fields for one in sections if name in get_args(one.model_fields["name"].annotation)), ())


def contradiction(algorithm: PolicyGradientSection, data: GrpoConfig, max_turns: int) -> str | None:
    """Explain why the algorithm cannot train on such data, with at most `max_turns` turns; None if it can."""
    return _of_groups(algorithm, data) or _of_ratios(algorithm, data) or _of_lengths(algorithm, data, max_turns)


def _of_groups(algorithm: PolicyGradientSection, data: GrpoConfig) -> str | None:
    if data.num_generations > 1:
        return None
    compares = isinstance(algorithm, GrpoSection | DrGrpoSection | RlooSection | _GroupRelativeSection)
    if compares or getattr(algorithm, "baseline", "none") == "group":
        return (
            f"grpo_config.num_generations=1: {algorithm.name} compares the episodes of a task with each other, "
            "so it needs at least two"
        )
    how = algorithm.reward_normalization
    if how.method != "identity" and how.grouping == "state":
        return (
            f"algorithm.reward_normalization.method={how.method} with grpo_config.num_generations=1: each episode is "
            "the only one of its task (grouping=state), so every reward becomes 0; choose grouping=batch or inductive"
        )
    return None


def _of_ratios(algorithm: PolicyGradientSection, data: GrpoConfig) -> str | None:
    if algorithm.epsilon is not None:
        return None
    if data.num_iterations > 1:
        return (
            f"algorithm.epsilon=null with grpo_config.num_iterations={data.num_iterations}: nothing bounds how far the "
            "policy goes on the data of one step; set epsilon"
        )
    is_corrected = algorithm.sampler_is != "none" or algorithm.sampler_rs != "none"
    if data.off_policy_steps and not is_corrected:
        return (
            f"algorithm.epsilon=null with grpo_config.off_policy_steps={data.off_policy_steps}: nothing bounds the "
            "ratio to the policy that sampled, so one stale token can decide a step; set epsilon, or correct with "
            "algorithm.sampler_is=token"
        )
    return None


def _of_lengths(algorithm: PolicyGradientSection, data: GrpoConfig, max_turns: int) -> str | None:
    if not isinstance(algorithm, DapoSection) or algorithm.overlong_buffer is None or algorithm.overlong_length:
        return None
    if max_turns > 1:
        return (
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} with episodes of up to {max_turns} turns needs "
            "algorithm.overlong_length: how many sampled tokens an episode may have in all of them"
        )
    if algorithm.overlong_buffer >= data.max_response_length:
        return (
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} of "
            f"grpo_config.max_response_length={data.max_response_length} penalizes every episode: it has to be less"
        )
    return None
