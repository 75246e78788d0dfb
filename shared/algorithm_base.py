"""Keys that several algorithms share, and the data of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared import own_rules
from shared.section import Fraction, OwnRuleText, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
Aggregation = Literal["sequence-mean-token-mean", "token-mean", "sequence-mean-token-scale", "seq-mean-token-sum"]


class OptimizerConfig(Section):
    """AdamW: learning rate, its schedule, and clipping.

    `learning_rate` is the highest rate. It rises linearly in `warmup_steps` optimizer steps; `schedule_type` then keeps
    it, or lowers it to 0 at the run's last step. `max_grad_norm` clips the norm of the whole gradient.
    """

    learning_rate: PositiveFloat = 1e-5
    schedule_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    b1: Decay = 0.9
    b2: Decay = 0.95
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0

    def findings(self, key: str, n_updates: int) -> Iterator[str]:
        """Find a warm-up that is longer than `n_updates`, if these are known; `key` is the section's place."""
        if self.warmup_steps >= n_updates > 0 and self.warmup_steps:
            yield (
                f"{key}.learning_rate={self.learning_rate:g} is never reached:"
                f" warmup_steps={self.warmup_steps} of {n_updates} updates"
            )


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
    the rewards from that turn on; a function of a file or module gives it another number. `teacher_kl_coef` weighs the
    reverse KL to a teacher, token by token, in the advantages. `sequence-mean-token-scale` divides by
    `grpo_config.max_response_length`. `mask_truncated` leaves truncated episodes out of the loss and of all statistics
    of their group and step.
    """

    name: str
    loss_agg_mode: Aggregation = "token-mean"
    beta: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_loss_mode: Literal["kl", "mse_kl", "low_var_kl"] = "low_var_kl"
    entropy_coef: NonNegativeFloat = 0.0
    credit: Literal["episode", "turn"] | OwnRuleText = "episode"
    reward_normalization: RewardNormalization = RewardNormalization()
    mask_truncated: bool = False
    teacher_kl_coef: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _of_whole_episodes(self) -> Self:
        if self.credits_turns and self.reward_normalization.method != "identity":
            raise ValueError(
                f"reward_normalization works on whole episodes, so it cannot be combined with {self.shown_credit}"
            )
        return self

    @property
    def credits_turns(self) -> bool:
        """True if each turn has a reward of its own."""
        return self.credit != "episode"

    @property
    def shown_credit(self) -> str:
        """`credit` as on the command line, and a rule by its name and digest."""
        return f"credit={own_rules.shown(self.credit) or self.credit}"

    @property
    def compares_group(self) -> bool:
        """True if advantages are relative to the other episodes of a task."""
        return False

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if a group of episodes with equal rewards trains the policy."""
        return not self.compares_group

    @property
    def rests_on_equal_rewards(self) -> bool:
        """True if groups of equal rewards train nothing: no advantage, and neither a KL nor a teacher."""
        return not (self.learns_from_equal_rewards or self.credits_turns or self.teacher_kl_coef or self.beta)

    def contradiction(self, data: GrpoConfig, max_turns: int) -> str | None:
        """Explain why keys of its own do not fit such data, with at most `max_turns` turns; None if they do."""
        return None

    @property
    def is_unbounded(self) -> bool:
        """True if nothing bounds the ratio to the policy that sampled, except a correction."""
        return False

    @property
    def correction(self) -> SamplerCorrection:
        """Off-policy correction of the loss."""
        return SamplerCorrection()

    @property
    def component_names(self) -> tuple[str, ...]:
        """Reward components that the advantages need."""
        return ()

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
