"""Settings that `trainer.backend: tunix` refuses, because google-tunix 0.1.7 computes them wrong or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from shared.algorithm_base import ClippedSection, PolicyGradientSection
from shared.algorithm_schema import CispoSection, EchoSection, PpoSection


@dataclass(frozen=True, slots=True)
class TunixSettings:
    """Settings that matter to Tunix's learner. A step has `rows` episodes, a micro-batch at most `micro_rows`."""

    section: PolicyGradientSection
    rows: int
    micro_rows: int
    num_generations: int
    temperature: float
    adapts: bool
    packs: bool
    cuts_left: bool
    num_processes: int


def tunix_problem(settings: TunixSettings) -> str | None:
    """Describe the first setting that Tunix's learner cannot train with, and what to choose; None if there is none."""
    found = _of_batches(settings) or _of_loss(settings)
    return None if found is None else f"trainer.backend=tunix: {found}, or use trainer.backend=volley"


def _of_batches(settings: TunixSettings) -> str | None:
    mode = settings.section.loss_agg_mode
    if settings.adapts:
        return "its trainer looks for adapters of a class of its own; remove trainer.lora"
    if settings.packs:
        return "its packed rows have no causal mask without flash attention; remove trainer.micro_batch_tokens"
    if settings.num_processes > 1:
        return "it runs in one process here; remove services.trainer.num_processes"
    if settings.cuts_left:
        return "episodes of several sequences have no place in its batches; set orchestrator.generation.truncation=none"
    if mode == "token-mean" and settings.micro_rows < settings.rows:
        return (
            "loss_agg_mode=token-mean is biased over micro-batches, which it weighs alike whatever their tokens;"
            " remove trainer.train_micro_batch_size"
        )
    if mode == "sequence-mean-token-scale":
        return (
            "loss_agg_mode=sequence-mean-token-scale divides by the padded length of a row, which differs from step to"
            " step; choose another algorithm.loss_agg_mode"
        )
    return None


def _of_loss(settings: TunixSettings) -> str | None:
    section = settings.section
    if not isinstance(section, ClippedSection) or isinstance(section, CispoSection | EchoSection):
        return f"it has no {section.name}; choose another algorithm.name"
    if section.epsilon is None:
        return "its losses always clip; set algorithm.epsilon"
    if section.sampler_rs != "none":
        return "it rejects no tokens; set algorithm.sampler_rs=none"
    if isinstance(section, PpoSection):
        return _of_ppo(section, settings.temperature)
    if section.entropy_coef:
        return "its GRPO loss has no entropy bonus; set algorithm.entropy_coef=0"
    if settings.num_generations < 2:
        return "its GRPO needs groups; set grpo_config.num_generations to 2 or more"
    return None


def _of_ppo(section: PpoSection, temperature: float) -> str | None:
    if temperature != 1.0:
        return "its PPO loss ignores the temperature; set rollout.sampling.temperature=1"
    if section.loss_agg_mode != "token-mean":
        return "its PPO loss is a mean over tokens; set algorithm.loss_agg_mode=token-mean"
    if section.sampler_is != "none":
        return "its PPO loss has no importance weights; set algorithm.sampler_is=none"
    if section.critic_updates > 1 or section.critic_frozen != "none":
        return "it updates the whole critic once a step; set algorithm.critic_updates=1 and critic_frozen=none"
    if section.critic_warmup_steps:
        return "its train step always updates the policy; set algorithm.critic_warmup_steps=0"
    if _penalty(section) and section.kl_loss_mode != "kl":
        return "its PPO loss knows one KL penalty; set algorithm.kl_loss_mode=kl"
    return None


def _penalty(section: PolicyGradientSection) -> bool:
    return section.beta > 0 and section.kl_in == "loss"
