"""Settings that `trainer.backend: tunix` refuses, because google-tunix 0.1.7 computes them wrong or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.algorithm_base import ClippedSection, PolicyGradientSection
from shared.algorithm_schema import PpoSection
from volley_algorithms.sections import CispoSection, EchoSection

if TYPE_CHECKING:  # the schema asks for these limits
    from shared.schema import RunConfig


def problem(config: RunConfig) -> str | None:
    """Describe the first setting that Tunix's learner cannot train with, and what to choose; None if there is none."""
    return _of_batches(config) or _of_loss(config)


def _of_batches(config: RunConfig) -> str | None:
    trainer, mode = config.trainer, config.algorithm.loss_agg_mode
    rows = trainer.groups_per_step * config.grpo_config.num_generations
    if trainer.lora is not None:
        return "its trainer looks for adapters of a class of its own; remove trainer.lora"
    if trainer.micro_batch_tokens is not None:
        return "its packed rows have no causal mask without flash attention; remove trainer.micro_batch_tokens"
    if config.services.trainer.num_processes > 1:
        return "it runs in one process here; remove services.trainer.num_processes"
    if config.orchestrator.generation.truncation == "left":
        return "episodes of several sequences have no place in its batches; set orchestrator.generation.truncation=none"
    if mode == "token-mean" and (trainer.train_micro_batch_size or rows) < rows:
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


def _of_loss(config: RunConfig) -> str | None:
    section, temperature = config.algorithm, config.rollout.sampling.temperature
    if not isinstance(section, ClippedSection) or isinstance(section, CispoSection | EchoSection):
        return f"it has no {section.name}; choose another algorithm.name"
    if section.epsilon is None:
        return "its losses always clip; set algorithm.epsilon"
    if section.sampler_rs != "none":
        return "it rejects no tokens; set algorithm.sampler_rs=none"
    if isinstance(section, PpoSection):
        return _of_ppo(section, temperature)
    if section.entropy_coef:
        return "its GRPO loss has no entropy bonus; set algorithm.entropy_coef=0"
    if config.grpo_config.num_generations < 2:
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
