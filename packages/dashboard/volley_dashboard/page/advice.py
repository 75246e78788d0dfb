"""Advice on a run's health, from its metrics: what is seen, since when, and which settings help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from volley.reporting.intervals import SuccessRate
from volley.reporting.jsonl import numbers

type Rows = Sequence[Mapping[str, Any]]

_WINDOW = 5
"""Steps over which a figure has to persist."""


@dataclass(frozen=True, slots=True)
class Advice:
    """`metric` is the curve that shows it; `help` names settings."""

    level: Literal["warning", "note"]
    text: str
    help: str
    metric: str


def advise(steps: Rows, evals: Sequence[SuccessRate]) -> list[Advice]:
    """Return advice, warnings first.

    Args:
        steps: lines of metrics.jsonl that count, by step.
        evals: held-out success of the main environment, by step.
    """
    found = [advice for rule in _RULES for advice in rule(steps)] + list(_fell(evals))
    return sorted(found, key=lambda one: one.level != "warning")


def _first(steps: Iterable[Mapping[str, Any]], key: str, n: int) -> list[float]:
    """Return the first `n` values of a metric, or fewer if there are not as many."""
    return [*islice((row[key] for row in steps if isinstance(row.get(key), int | float)), n)]


def _mean(steps: Rows, key: str) -> float | None:
    """Mean of the last values; None if the run has fewer."""
    values = _first(reversed(steps), key, _WINDOW)
    return sum(values) / _WINDOW if len(values) == _WINDOW else None


def _since(steps: Rows, key: str, holds: Callable[[float], bool]) -> int:
    """First step of the last unbroken stretch in which a condition holds."""
    first = 0
    for row in reversed(steps):
        value = row.get(key)
        if not isinstance(value, int | float):
            continue
        if not holds(value):
            break
        first = int(row["step"])
    return first


@dataclass(frozen=True, slots=True)
class Threshold:
    """Advice if the mean of a metric is above `above` or below `below`; `text` may use {value} and {since}."""

    metric: str
    level: Literal["warning", "note"]
    text: str
    help: str
    above: float = math.inf
    below: float = -math.inf

    def __call__(self, steps: Rows) -> Iterator[Advice]:
        value = _mean(steps, self.metric)
        if value is not None and self._holds(value):
            since = _since(steps, self.metric, self._holds)
            yield Advice(self.level, self.text.format(value=value, since=since), self.help, self.metric)

    def _holds(self, value: float) -> bool:
        return value > self.above or value < self.below


_THRESHOLDS = (
    Threshold(
        "logprob_abs_diff_current",
        "warning",
        "engine and trainer disagree since step {since}: {value:.2g} nats a token for the same weights",
        "use one dtype for both, or correct it: algorithm.sampler_is=token",
        above=0.02,
    ),
    Threshold(
        "clip_fraction",
        "warning",
        "{value:.0%} of the tokens are clipped",
        "lower trainer.optimizer_config.learning_rate, grpo_config.num_iterations or grpo_config.off_policy_steps",
        above=0.3,
    ),
    Threshold(
        "effective_share",
        "warning",
        "the importance weights leave {value:.0%} of the tokens effective",
        "lower grpo_config.off_policy_steps or trainer.optimizer_config.learning_rate",
        below=0.3,
    ),
    Threshold(
        "truncation_rate",
        "note",
        "{value:.0%} of the episodes are cut by a limit",
        "raise grpo_config.max_response_length, orchestrator.max_turns or the environment's own limit; "
        "the curve ends/… shows which",
        above=0.3,
    ),
)


def _entropy(steps: Rows) -> Iterator[Advice]:
    values = _first(steps, "entropy", 2 * _WINDOW)
    now = _mean(steps, "entropy")
    if now is None or len(values) < 2 * _WINDOW:
        return
    before = sum(values[:_WINDOW]) / _WINDOW
    limit = before / 10
    if before > 0 and now < limit and (_mean(steps, "success") or 0.0) < 0.9:
        since = _since(steps, "entropy", lambda value: value < limit)
        yield Advice(
            "warning",
            f"entropy collapsed at step {since}: {before:.3g} → {now:.3g} nats a token, and success is below 90 %",
            "lower trainer.optimizer_config.learning_rate, raise algorithm.epsilon_high (DAPO's clip-higher), "
            "or set algorithm.entropy_coef",
            "entropy",
        )


def _no_variance(steps: Rows) -> Iterator[Advice]:
    share = _mean(steps, "zero_variance_groups")
    if share is None or share < 0.5:
        return
    if (_mean(steps, "success") or 0.0) > 0.5:
        why = "tasks are too easy: add harder ones, or a curriculum (data.curriculum)"
    else:
        why = "tasks are too hard: use a warm start (mode: sft+rl), easier tasks, or more grpo_config.num_generations"
    yield Advice(
        "warning",
        f"{share:.0%} of the groups have no variance: all their rewards are equal, so they teach nothing",
        f"{why}; orchestrator.generation.filters drops such groups before they are trained on",
        "zero_variance_groups",
    )


def _waiting(steps: Rows) -> Iterator[Advice]:
    wait, step = _mean(steps, "wait_s"), _mean(steps, "step_s")
    if wait is None or step is None or wait + step <= 0:
        return
    share = wait / (wait + step)
    if share > 0.6:
        yield Advice(
            "note",
            f"the trainer waits for groups {share:.0%} of the time",
            "add rollout servers (services.rollout_replicas), or raise grpo_config.off_policy_steps",
            "wait_s",
        )
    if share < 0.05:
        yield Advice(
            "note",
            f"servers wait for the trainer: it waits for groups only {share:.0%} of the time",
            "fewer rollout servers do as well; trainer.micro_batch_tokens and packing make steps faster",
            "step_s",
        )


def _attempts(steps: Rows) -> Iterator[Advice]:
    recent = steps[-_WINDOW:]
    failures: dict[str, int] = {}
    for row in recent:
        failed = row.get("failed_attempts")
        for name, n in numbers(failed if isinstance(failed, dict) else {}):
            failures[name] = failures.get(name, 0) + int(n)
    episodes = sum(n for row in recent if isinstance(n := row.get("episodes"), int))
    total = sum(failures.values())
    if episodes and total > 0.1 * episodes:
        named = ", ".join(f"{name} {n}" for name, n in sorted(failures.items(), key=lambda item: -item[1]))
        yield Advice(
            "warning",
            f"{total} attempts of {episodes} episodes failed in the last {len(recent)} steps: {named}",
            "no reward is given for them, but they cost time: see the logs of the named part",
            "failed_attempts",
        )


def _gradients(steps: Rows) -> Iterator[Advice]:
    measured = [row for row in steps if isinstance(row.get("grad_norm"), int | float)]
    if len(measured) < 4 * _WINDOW:
        return
    middle = sorted([row["grad_norm"] for row in measured])[len(measured) // 2]
    recent = ((row["step"], row["grad_norm"]) for row in measured[-_WINDOW:])
    last = [(step, value) for step, value in recent if middle > 0 and value > 10 * middle]
    if last:
        step, value = last[-1]
        yield Advice(
            "warning",
            f"the gradient at step {step} is {value / middle:.0f} times the median",
            "set trainer.optimizer_config.max_grad_norm, or lower the learning rate",
            "grad_norm",
        )


def _fell(evals: Sequence[SuccessRate]) -> Iterator[Advice]:
    if len(evals) < 2:
        return
    best, last = max(evals, key=lambda one: one.success), evals[-1]
    if last.high < best.low:
        yield Advice(
            "warning",
            f"held-out success: from {best.success:.1%} (step {best.step}) to {last.success:.1%} (step {last.step})",
            "`volley export` writes the best version; `volley up` continues, a new run with model.path=RUN@VERSION "
            "starts from there",
            "success",
        )


def _servers(steps: Rows) -> Iterator[Advice]:
    has_checks = (row["spot_checks"] for row in reversed(steps) if isinstance(row.get("spot_checks"), list))
    checks = [*islice(has_checks, 2 * _WINDOW)]  # the newest first
    for one in checks[0] if checks else ():
        if not isinstance(one, dict) or "fault" not in one:
            continue
        if one["fault"] == "sampling":
            what, how, value = "draws its tokens otherwise than the other servers", "excess", "of the entropy"
        else:
            what, how, value = "computes something else than the weights it names", "ratio", "times the rounding noise"
        figure = one.get(how)
        told = f": {how} {figure:.3g} {value}" if isinstance(figure, int | float) else ""
        yield Advice(
            "warning",
            f"{one.get('url')} {what}, seen since {one.get('since')}{told}",
            "stop that server, and compare its model, dtype, quantization and sampling settings with the others'; "
            "trainer.filters.logprob drops groups of wrong log-probabilities",
            "spot_check_ratio",
        )
    if len(checks) == 2 * _WINDOW and not any(checks):
        yield Advice(
            "note",
            f"no server was checked in the last {2 * _WINDOW} steps: no episode had tokens of the newest two versions",
            "lower grpo_config.off_policy_steps, or raise trainer.spot_checks",
            "spot_check_ratio",
        )


_RULES: Sequence[Callable[[Rows], Iterator[Advice]]] = (
    *(_servers, _entropy, _no_variance, *_THRESHOLDS, _gradients, _attempts, _waiting),
)
