"""Which algorithm a run is trained with: one section, told apart by its `name`; each holds only what means something to
it. Names and defaults are those of Tunix, and of verl where Tunix has none.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

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
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-5
    schedule_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


class RewardNormalization(Section):
    """Of the episodes' rewards before advantages are made of them: over the episodes of one task (`state`), of one
    environment (`inductive`) or of the step (`batch`).
    """

    grouping: Literal["state", "inductive", "batch"] = "state"
    method: Literal["identity", "mean_std", "asym_clip"] = "identity"


class PolicyGradientSection(Section):
    """What all algorithms have. A ratio of probabilities is bounded to [1 - `epsilon`, 1 + `epsilon_high`]
    (`epsilon_high` null: as `epsilon`; `epsilon` null: not at all); `epsilon_c` is dual clip's bound.

    `beta` weighs the KL to the reference, in the loss or in the reward. `sampler_is` weighs a token by the ratio of the
    trainer's policy to the engine's, cut off at `sampler_is_threshold`; `sampler_rs` leaves out what is outside
    `sampler_rs_bounds`. `credit` by turn gives each turn the rewards from it on. `max_response_length` of
    `sequence-mean-token-scale` is grpo_config's.
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
    sampler_is: Literal["none", "token", "sequence"] = "none"
    sampler_is_threshold: PositiveFloat = 2.0
    sampler_rs: Literal["none", "token", "sequence", "geometric"] = "none"
    sampler_rs_bounds: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 2.0)

    @model_validator(mode="after")
    def _meant(self) -> Self:
        low, high = self.sampler_rs_bounds
        if not low < 1 < high:
            raise ValueError(f"sampler_rs_bounds={[low, high]} leave out tokens whose ratio is 1: they go around it")
        if self.epsilon is None and (self.epsilon_high is not None or self.epsilon_c is not None):
            raise ValueError("epsilon_high and epsilon_c bound nothing where epsilon is null")
        if self.credit == "turn" and self.reward_normalization.method != "identity":
            raise ValueError("reward_normalization is of episodes: it cannot be divided over turns (credit=turn)")
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
    """An episode of more than `overlong_length` - `overlong_buffer` sampled tokens loses up to `overlong_penalty`;
    null: as long as `grpo_config.max_response_length`.
    """

    name: Literal["dapo"]
    epsilon_high: PositiveFloat | None = 0.28
    overlong_length: PositiveInt | None = None
    overlong_buffer: PositiveInt | None = None
    overlong_penalty: PositiveFloat = 1.0


class GspoSection(_GroupRelativeSection):
    name: Literal["gspo-token"]
    epsilon: PositiveFloat | None = 3e-4
    epsilon_high: PositiveFloat | None = 4e-4
    loss_agg_mode: Aggregation = "sequence-mean-token-mean"


class CispoSection(_GroupRelativeSection):
    """The lower bound is 1 - `epsilon`: 1 is none."""

    name: Literal["cispo"]
    epsilon: PositiveFloat | None = 1.0
    epsilon_high: PositiveFloat | None = 4.0

    @model_validator(mode="after")
    def _no_dual_clip(self) -> Self:
        if self.epsilon_c is not None:
            raise ValueError("epsilon_c is of a clipped loss: CISPO bounds a weight, whose loss has no bound")
        return self


class ReinforcePlusPlusSection(PolicyGradientSection):
    """`gamma` discounts by sampled token."""

    name: Literal["reinforce_plus_plus"]
    gamma: Fraction = 1.0
    baseline: Literal["none", "group"] = "none"


class PpoSection(PolicyGradientSection):
    """`gamma` and `gae_lambda` are by sampled token. The policy is not trained in the first `critic_warmup_steps`
    steps; `clip_range_value` null does not bound how far a value moves.
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
    | PpoSection,
    Field(discriminator="name"),
]


def contradiction(
    algorithm: PolicyGradientSection, n_generations: int, n_updates: int, max_staleness: int
) -> str | None:
    """Why the algorithm cannot be meant with groups of so many episodes, so many updates on the data of a step, and
    data of up to so many steps ago; None if it can.
    """
    compares = isinstance(algorithm, GrpoSection | DrGrpoSection | RlooSection | _GroupRelativeSection)
    if n_generations < 2 and (compares or getattr(algorithm, "baseline", "none") == "group"):
        return (
            f"grpo_config.num_generations=1: {algorithm.name} compares the episodes of a task with each other, "
            "so there have to be two at least"
        )
    is_corrected = algorithm.sampler_is != "none" or algorithm.sampler_rs != "none"
    if algorithm.epsilon is None and not is_corrected and (max_staleness or n_updates > 1):
        what = (
            f"grpo_config.off_policy_steps={max_staleness}" if max_staleness else "grpo_config.num_iterations above 1"
        )
        return (
            f"algorithm.epsilon=null with {what}: nothing bounds the ratio to the policy that sampled, so one stale "
            "token can decide a step; set epsilon, or correct with algorithm.sampler_is=token"
        )
    return None
