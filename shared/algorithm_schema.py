"""The algorithm that a run is trained with: one section per algorithm, chosen by `name`.

A section holds only keys that its algorithm uses. Names and defaults are Tunix's, and verl's where Tunix has none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple, Self, get_args

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

    `beta` weighs the KL to the reference, in the loss or in the reward (`kl_in`). With `credit: turn`, each turn gets
    the rewards from that turn on. `teacher_kl_coef` weighs the reverse KL to a teacher, token by token, in the
    advantages. `sequence-mean-token-scale` divides by `grpo_config.max_response_length`.
    """

    name: str
    loss_agg_mode: Aggregation = "token-mean"
    beta: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_loss_mode: Literal["kl", "mse_kl", "low_var_kl"] = "low_var_kl"
    entropy_coef: NonNegativeFloat = 0.0
    credit: Literal["episode", "turn"] = "episode"
    reward_normalization: RewardNormalization = RewardNormalization()
    mask_truncated: bool = False
    teacher_kl_coef: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _of_whole_episodes(self) -> Self:
        if self.credit == "turn" and self.reward_normalization.method != "identity":
            raise ValueError("reward_normalization works on whole episodes, so it cannot be combined with credit=turn")
        return self

    @property
    def compares_group(self) -> bool:
        """True if advantages are relative to the other episodes of a task."""
        return False

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if a group of episodes with equal rewards trains the policy."""
        return not self.compares_group

    @property
    def is_unbounded(self) -> bool:
        """True if nothing bounds the ratio to the policy that sampled, except a correction."""
        return False

    @property
    def correction(self) -> SamplerCorrection:
        """Off-policy correction of the loss."""
        return SamplerCorrection()

    @property
    def critic(self) -> CriticSection | None:
        """Keys of the critic; None for an algorithm without one."""
        return None


class SamplerCorrection(NamedTuple):
    """Values of `sampler_is`, `sampler_is_threshold`, `sampler_rs` and `sampler_rs_bounds`."""

    level: Literal["none", "token", "sequence"] = "none"
    threshold: float = 2.0
    rejection: Literal["none", "token", "sequence", "geometric"] = "none"
    bounds: tuple[float, float] = (0.5, 2.0)

    @property
    def is_used(self) -> bool:
        return self.level != "none" or self.rejection != "none"


class CorrectedSection(PolicyGradientSection):
    """Keys of algorithms whose loss may be corrected for the difference between trainer and engine.

    `sampler_is` weighs a token by the ratio of the trainer's policy to the engine's, capped at `sampler_is_threshold`;
    `sampler_rs` removes tokens outside `sampler_rs_bounds` from the surrogate.
    """

    sampler_is: Literal["none", "token", "sequence"] = "none"
    sampler_is_threshold: Annotated[float, Field(ge=1)] = 2.0
    sampler_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    sampler_rs_bounds: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)

    @model_validator(mode="after")
    def _around_1(self) -> Self:
        low, high = self.sampler_rs_bounds
        if not low < 1 < high:
            raise ValueError(f"sampler_rs_bounds={[low, high]} must include 1: low < 1 < high")
        return self

    @property
    def correction(self) -> SamplerCorrection:
        return SamplerCorrection(self.sampler_is, self.sampler_is_threshold, self.sampler_rs, self.sampler_rs_bounds)


class ClippedSection(CorrectedSection):
    """Keys of algorithms that clip probability ratios.

    Ratios are clipped to [1 - `epsilon`, 1 + `epsilon_high`] (`epsilon_high` null: as `epsilon`; `epsilon` null: no
    clipping); `epsilon_c` is the bound of dual clip.
    """

    epsilon: PositiveFloat | None = 0.2
    epsilon_high: PositiveFloat | None = None
    epsilon_c: Annotated[float, Field(gt=1)] | None = None

    @model_validator(mode="after")
    def _clipped(self) -> Self:
        given = [key for key in ("epsilon_high", "epsilon_c") if key in self.model_fields_set and getattr(self, key)]
        if self.epsilon is None and given:
            raise ValueError(f"{given[0]}={getattr(self, given[0])} has no effect: epsilon is null")
        return self

    @property
    def is_unbounded(self) -> bool:
        return self.epsilon is None


class GroupSection(PolicyGradientSection):
    """Base of algorithms that compare the episodes of a task with each other."""

    @property
    def compares_group(self) -> bool:
        return True


class EstimatedSection(GroupSection):
    """Keys of algorithms that leave the estimator of advantages open."""

    advantage_estimator: Literal["grpo", "drgrpo", "rloo", "maxrl"] = "grpo"


class GrpoSection(GroupSection, ClippedSection):
    name: Literal["grpo"] = "grpo"


class DrGrpoSection(GroupSection, ClippedSection):
    name: Literal["drgrpo"]
    loss_agg_mode: Aggregation = "sequence-mean-token-scale"


class RlooSection(GroupSection, ClippedSection):
    name: Literal["rloo"]


class MaxRlSection(GroupSection, ClippedSection):
    name: Literal["maxrl"]


class DapoSection(EstimatedSection, ClippedSection):
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


class GspoSection(EstimatedSection, ClippedSection):
    name: Literal["gspo-token"]
    epsilon: PositiveFloat | None = 3e-4
    epsilon_high: PositiveFloat | None = 4e-4
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"


class CispoSection(EstimatedSection, ClippedSection):
    """CISPO. The lower bound is 1 - `epsilon`, so the default of 1 means none."""

    name: Literal["cispo"]
    epsilon: PositiveFloat | None = 1.0
    epsilon_high: PositiveFloat | None = 4.0

    @model_validator(mode="after")
    def _no_dual_clip(self) -> Self:
        if self.epsilon_c is not None:
            raise ValueError("epsilon_c belongs to a clipped loss; CISPO clips the weight, not the loss")
        return self


class ReinforcePlusPlusSection(ClippedSection):
    """REINFORCE++. `gamma` discounts per sampled token."""

    name: Literal["reinforce_plus_plus"]
    gamma: Fraction = 1.0
    baseline: Literal["none", "group"] = "none"

    @model_validator(mode="after")
    def _of_episodes(self) -> Self:
        if self.baseline == "group" and (self.gamma != 1 or self.credit == "turn"):
            raise ValueError("baseline=group compares whole episodes: it cannot be combined with gamma or credit=turn")
        return self

    @property
    def compares_group(self) -> bool:
        return self.baseline == "group"


class OnPolicyDistillationSection(ClippedSection):
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


class CriticSection(PolicyGradientSection):
    """Keys of algorithms with a critic.

    `gamma` and `gae_lambda` apply per sampled token; `gae_lambda_alpha` a replaces `gae_lambda` by 1 - 1 / (a l) for a
    sequence of l sampled tokens; `critic_gae_lambda` is of the critic's targets (null: as the policy's). The first
    `critic_warmup_steps` steps train the critic alone; it takes `critic_updates` updates for one of the policy.
    `critic_frozen: attention` trains only its other parameters. `clip_range_value` null does not clip values.
    """

    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    gae_lambda_alpha: PositiveFloat | None = None
    critic_gae_lambda: Fraction | None = None
    whiten_advantages: bool = True
    clip_range_value: PositiveFloat | None = 0.2
    critic_updates: PositiveInt = 1
    critic_frozen: Literal["none", "attention"] = "none"
    critic_warmup_steps: NonNegativeInt = 0
    critic_optimizer_config: OptimizerConfig = OptimizerConfig()

    @property
    def critic(self) -> CriticSection:
        return self


class PpoSection(CriticSection, ClippedSection):
    name: Literal["ppo"]


class SaoSection(CriticSection):
    """SAO. Tokens whose ratio to the sampler is not between 1 - `epsilon` and 1 + `epsilon_high` leave the loss."""

    name: Literal["sao"]
    epsilon: Annotated[float, Field(gt=0, le=1)] = 0.3
    epsilon_high: PositiveFloat = 5.0
    gae_lambda_alpha: PositiveFloat | None = 1.5
    critic_gae_lambda: Fraction | None = 1.0
    whiten_advantages: bool = False
    clip_range_value: PositiveFloat | None = None
    critic_updates: PositiveInt = 2
    critic_frozen: Literal["none", "attention"] = "attention"


class DppoSection(EstimatedSection):
    """DPPO. `epsilon` and `epsilon_high` bound a divergence from the sampler, not a ratio.

    `epsilon` null means 0.15 of `tv` and 0.05 of `kl`; `epsilon_high` null as `epsilon`. Ratios count for at most
    `ratio_cap`. `kl_tau` weighs the squared distance from the sampler, in nats.
    """

    name: Literal["dppo"]
    divergence: Literal["tv", "kl"] = "tv"
    epsilon: PositiveFloat | None = None
    epsilon_high: PositiveFloat | None = None
    ratio_cap: Annotated[float, Field(ge=1)] = 20.0
    kl_tau: NonNegativeFloat = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the divergence downwards and upwards."""
        low = self.epsilon if self.epsilon is not None else {"tv": 0.15, "kl": 0.05}[self.divergence]
        return low, low if self.epsilon_high is None else self.epsilon_high


class KpopSection(EstimatedSection):
    """KPop. Tokens whose divergence from the sampler exceeds `epsilon` in either direction leave the loss."""

    name: Literal["kpop"]
    epsilon: PositiveFloat = 0.1
    kl_tau: NonNegativeFloat = 0.0


class SapoSection(EstimatedSection, CorrectedSection):
    """SAPO. `tau_pos` and `tau_neg` say how fast the gate closes for tokens with positive and negative advantages."""

    name: Literal["sapo"]
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"


class EchoSection(EstimatedSection, ClippedSection):
    """ECHO. `observation_coef` weighs the mean negative log-likelihood of the environment's tokens."""

    name: Literal["echo"]
    observation_coef: PositiveFloat = 0.1

    @property
    def learns_from_equal_rewards(self) -> bool:
        return True


class GdpoSection(GroupSection, ClippedSection):
    """GDPO. `reward_components` are the weights of the components, by the name that the environment gives them."""

    name: Literal["gdpo"]
    reward_components: Annotated[dict[str, PositiveFloat], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_components(self) -> Self:
        of_totals = {
            "credit": self.credit == "turn",
            "reward_normalization": self.reward_normalization.method != "identity",
            "kl_in": bool(self.beta) and self.kl_in == "reward",
        }
        if meant := [key for key, is_meant in of_totals.items() if is_meant]:
            raise ValueError(f"{meant[0]} applies to the reward of the episode; gdpo reads its components")
        return self

    @property
    def learns_from_equal_rewards(self) -> bool:
        return True


class MopdSection(EstimatedSection):
    """MOPD. Tokens whose ratio to the sampler is outside `ratio_bounds` leave the loss.

    `outcome_coef` weighs the advantage from rewards, beside `teacher_kl_coef` for that from the teachers.
    """

    name: Literal["mopd"]
    teacher_kl_coef: PositiveFloat = 1.0
    outcome_coef: NonNegativeFloat = 0.0
    ratio_bounds: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 5.0)
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"

    @model_validator(mode="after")
    def _bounded_around_1(self) -> Self:
        low, high = self.ratio_bounds
        if not low < 1 < high:
            raise ValueError(f"ratio_bounds={[low, high]} must include 1: low < 1 < high")
        return self

    @property
    def compares_group(self) -> bool:
        return self.outcome_coef > 0


AlgorithmSection = Annotated[
    GrpoSection
    | DrGrpoSection
    | RlooSection
    | MaxRlSection
    | DapoSection
    | GspoSection
    | CispoSection
    | ReinforcePlusPlusSection
    | PpoSection
    | OnPolicyDistillationSection
    | SaoSection
    | DppoSection
    | KpopSection
    | SapoSection
    | EchoSection
    | GdpoSection
    | MopdSection,
    Field(discriminator="name"),
]


def keys_of(name: str | None) -> Collection[str]:
    """Return the keys of the section of algorithm `name`; empty for an unknown name."""
    sections: tuple[type[PolicyGradientSection], ...] = get_args(get_args(AlgorithmSection)[0])
    return next((one.model_fields for one in sections if name in get_args(one.model_fields["name"].annotation)), ())
