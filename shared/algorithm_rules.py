"""Contradictions between an algorithm and the data that it is to be trained on."""

from __future__ import annotations

from shared.algorithm_base import GrpoConfig, PolicyGradientSection


def contradiction(algorithm: PolicyGradientSection, data: GrpoConfig, max_turns: int) -> str | None:
    """Explain why the algorithm cannot train on such data, with at most `max_turns` turns; None if it can."""
    return _of_groups(algorithm, data) or _of_ratios(algorithm, data) or algorithm.contradiction(data, max_turns)


def _of_groups(algorithm: PolicyGradientSection, data: GrpoConfig) -> str | None:
    if data.num_generations > 1:
        return None
    if algorithm.compares_group:
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
    if not algorithm.is_unbounded:
        return None
    if data.num_iterations > 1:
        return (
            f"algorithm.epsilon=null with grpo_config.num_iterations={data.num_iterations}: nothing bounds how far the "
            "policy goes on the data of one step; set epsilon"
        )
    if data.off_policy_steps and not algorithm.correction.is_used:
        return (
            f"algorithm.epsilon=null with grpo_config.off_policy_steps={data.off_policy_steps}: nothing bounds the "
            "ratio to the policy that sampled, so one stale token can decide a step; set epsilon, or correct with "
            "algorithm.sampler_is=token"
        )
    return None
