"""Sections of the package's algorithms.

A section holds only keys that its algorithm uses. Names and defaults are Tunix's, and verl's where Tunix has none.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shared import own_rules
from shared.algorithm_base import (
    Aggregation,
    ClippedSection,
    CorrectedSection,
    CriticSection,
    GroupSection,
    GrpoConfig,
    PolicyGradientSection,
)
from shared.section import Fraction, OwnRuleText


def _of_rewards(section: PolicyGradientSection) -> list[str]:
    """Return the keys that are set and concern the episode's reward."""
    of_rewards = {
        section.shown_credit: section.credits_turns,
        "reward_normalization": section.reward_normalization.method != "identity",
        "kl_in": bool(section.beta) and section.kl_in == "reward",
    }
    return [key for key, is_meant in of_rewards.items() if is_meant]


class EstimatedSection(GroupSection):
    """Keys of algorithms that leave the estimator of advantages open."""

    advantage_estimator: Literal["grpo", "drgrpo", "rloo", "maxrl"] = "grpo"


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

    def contradiction(self, data: GrpoConfig, max_turns: int) -> str | None:
        if self.overlong_buffer is None or self.overlong_length:
            return None
        if max_turns > 1:
            return (
                f"algorithm.overlong_buffer={self.overlong_buffer} with episodes of up to {max_turns} turns needs "
                "algorithm.overlong_length: how many sampled tokens an episode may have in all of them"
            )
        if self.overlong_buffer >= data.max_response_length:
            return (
                f"algorithm.overlong_buffer={self.overlong_buffer} of "
                f"grpo_config.max_response_length={data.max_response_length} penalizes every episode: it has to be less"
            )
        return None


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
        if self.baseline == "group" and (self.gamma != 1 or self.credits_turns):
            raise ValueError(
                f"baseline=group compares whole episodes: it cannot be combined with gamma or {self.shown_credit}"
            )
        return self

    @property
    def compares_group(self) -> bool:
        return self.baseline == "group"


class RaeSection(ClippedSection):
    """RAE of SPIRAL. `decay` is that of the moving average of rewards, of each environment and seat."""

    name: Literal["rae"]
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95

    @model_validator(mode="after")
    def _of_whole_rewards(self) -> Self:
        if meant := _of_rewards(self):
            raise ValueError(f"{meant[0]} changes the reward that rae compares with the average of rewards")
        return self


class OnPolicyDistillationSection(ClippedSection):
    """On-policy distillation: train on the reverse KL to the teacher alone; rewards are ignored.

    A token's advantage is its own KL and that of later tokens, discounted by `gamma`.
    """

    name: Literal["on_policy_distillation"]
    teacher_kl_coef: PositiveFloat = 1.0
    gamma: Fraction = 0.0

    @model_validator(mode="after")
    def _no_rewards(self) -> Self:
        if meant := _of_rewards(self):
            raise ValueError(f"{meant[0]} applies to rewards, which on_policy_distillation ignores")
        return self


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
        if meant := _of_rewards(self):
            raise ValueError(f"{meant[0]} applies to the reward of the episode; gdpo reads its components")
        return self

    @property
    def component_names(self) -> tuple[str, ...]:
        return tuple(self.reward_components)

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

    @model_validator(mode="after")
    def _of_rewards(self) -> Self:
        if self.outcome_coef == 0 and (meant := _of_rewards(self)):
            raise ValueError(f"{meant[0]} applies to rewards, which mopd ignores with outcome_coef=0: set it above 0")
        return self

    @property
    def compares_group(self) -> bool:
        return self.outcome_coef > 0


class OwnSection(EstimatedSection, ClippedSection):
    """A loss and advantages of one's own: `loss` and `advantage` name functions of files or modules.

    A loaded configuration holds their text. Without `loss` the clipped loss is used, without `advantage` the estimator.
    """

    name: Literal["own"]
    loss: OwnRuleText | None = None
    advantage: OwnRuleText | None = None

    @model_validator(mode="after")
    def _replaced(self) -> Self:
        if self.loss is None and self.advantage is None:
            raise ValueError("name=own needs algorithm.loss or algorithm.advantage, such as my_loss.py:loss")
        replaced = ("epsilon", "epsilon_high", "epsilon_c") if self.loss else ()
        replaced = (*replaced, "advantage_estimator") if self.advantage else replaced
        fields = type(self).model_fields
        if given := [key for key in replaced if getattr(self, key) != fields[key].default]:
            by = "advantage" if given[0] == "advantage_estimator" else "loss"
            raise ValueError(f"{given[0]}={getattr(self, given[0])} has no effect: algorithm.{by} replaces it")
        if self.advantage and self.credit not in own_rules.CREDITS:
            raise ValueError(f"{self.shown_credit} has no effect: algorithm.advantage replaces it")
        return self

    @property
    def compares_group(self) -> bool:
        return self.advantage is None

    @property
    def rests_on_equal_rewards(self) -> bool:
        return super().rests_on_equal_rewards and self.loss is None
