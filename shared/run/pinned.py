"""Pinned settings of a run, which decide what is trained, and rules for changing them during the run.

Every checkpoint contains the settings in force, covered by its manifest's digest: complete for the first epoch, later
only what an epoch changed. Each start of a trainer is an epoch, so the lineage, which lists the step at which each
epoch started, is also the record of every change: step *s* was trained under the settings of the epoch that made it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

import orjson

from shared import own_rules, removed_keys
from shared.algorithm_schema import default_of, every_key, keys_of
from shared.errors import ConfigError
from shared.run_config import keys, run_model, sections
from shared.schema import RunConfig

type Flat = Mapping[str, Any]
"""Values of a configuration by dotted key, as JSON holds them."""
type Settings = tuple[tuple[int, Flat], ...]
"""(epoch, settings in force from then on), oldest first; the first entry is complete, later ones hold only changes."""

MAX_STEPS = "trainer.max_steps"
_ALGORITHM = "algorithm."
_BETA, _NAME, _TEACHER = "algorithm.beta", "algorithm.name", "algorithm.teacher_kl_coef"
_WITH_CRITIC = ("ppo", "sao")
_OF_CRITIC = {
    "algorithm.critic_frozen": "the critic's optimizer has a state for each parameter that it trains",
    "algorithm.critic_updates": "the schedule of the critic's optimizer counts its updates",
}
_ONE_MODE = (("rl", "sft+rl"), ("sft+rl", "rl"))
"""Modes that are interchangeable: the pinned `sft` section decides if there is a warm start."""
_PATHS = ("model.path", "data.train", "data.eval")
CONTENT = "model.content."
_MOST_NAMED = 5


class Rule(NamedTuple):
    """Keys that start with `prefix` may change during a run (`may`), or may not, because of `reason`."""

    prefix: str
    may: bool
    reason: str


IRRELEVANT = (
    "services.",
    "run.dir",
    "run.bucket",
    "run.traces",
    "data.sources",
    "orchestrator.max_concurrent_episodes",
    "orchestrator.lease_s",
    "orchestrator.episode_timeout_s",
    "trainer.offload_reference",
)
"""Addresses, limits and memory placement: they do not affect what is trained, and are not recorded. `data.sources` is
redundant, since names in data.env contain the digest of their source. Keys of packages are irrelevant too.
"""

RULES = (
    Rule("run.", False, "it identifies the run: all random draws and records depend on it"),
    Rule("model.initial_weights", True, "only a run without a checkpoint reads it"),
    Rule("model.routing_replay", True, "each group is trained with the experts it carries, if it carries any"),
    Rule(
        "model.content",
        False,
        "it is the digest of a file in the model's folder, which decides texts and token ids: put the file back",
    ),
    Rule(
        "model.",
        False,
        "weights and optimizer belong to this model; start a new run from its weights with model.path=RUN@VERSION",
    ),
    Rule("mode", False, "it defines the run; start a new run from its weights with model.path=RUN@VERSION"),
    Rule(
        "data.mixture",
        False,
        "tickets before and after the change would be assigned differently; PATCH /runs/{name} changes the weights "
        "during the run",
    ),
    Rule("data.curriculum", True, "it only decides the next changes of the mixture, each of which is a line on disk"),
    Rule(
        "data.",
        False,
        "tickets name tasks of this data, and evaluations before and after would not be comparable; a file that "
        "has changed is another environment; the run's own copy is in its folder",
    ),
    Rule("grpo_config.num_generations", False, "groups of the old size are already on their way to the trainer"),
    Rule(
        "grpo_config.num_iterations",
        False,
        "the optimizer's schedule counts updates, and a step would have another number of them",
    ),
    Rule(
        "grpo_config.off_policy_steps",
        False,
        "it bounds which tickets are issued: tickets of one bound would be stale under another",
    ),
    Rule(
        "grpo_config.max_response_length", False, "it bounds the episodes that are already on their way to the trainer"
    ),
    Rule("algorithm.", True, "only the trainer's loss uses it, and reads it at every step"),
    Rule("trainer.max_steps", True, "it only sets the end of the run and of a linear or cosine schedule"),
    Rule("trainer.groups_per_step", False, "it is the unit in which tickets, steps and staleness are counted"),
    Rule(
        "trainer.optimizer_config.",
        True,
        "the optimizer keeps its moments and step count; only the next updates differ",
    ),
    Rule("trainer.checkpointing_options.", True, "it only sets how often checkpoints are saved, and how many are kept"),
    Rule("trainer.on_nonfinite", True, "it only decides what happens after a refused step"),
    Rule(
        "trainer.filters.", True, "it only decides which of the next groups are trained on; each end is in the ledger"
    ),
    Rule("trainer.spot_checks", True, "it only measures"),
    Rule(
        "trainer.lora",
        False,
        "it decides what checkpoints hold; start a new run from the trained weights with model.path=RUN@VERSION",
    ),
    Rule("trainer.", False, "the optimizer's state and the order of summation depend on it"),
    Rule("rollout.engine.max_running_requests", True, "it only affects the engine's speed"),
    Rule("rollout.engine.max_prefill_tokens", True, "it only affects the engine's speed"),
    Rule("rollout.engine.precompile_", True, "it only affects the engine's speed"),
    Rule("rollout.engine.url", True, "it only says where the engine's server is"),
    Rule("rollout.engine.api_key_file", True, "it only says where the engine's server is"),
    Rule("rollout.engine.weights_dir", True, "it only says where the engine's server reads weights"),
    Rule(
        "rollout.sampling.",
        False,
        "groups sampled the old way are already on their way to the trainer, which would score them the new way",
    ),
    Rule("rollout.", False, "it affected the episodes that are already on their way to the trainer"),
    Rule("orchestrator.eval_every_n_steps", True, "it only sets how often weights are evaluated"),
    Rule("orchestrator.max_attempts", True, "it only sets how often a failed episode is retried"),
    Rule(
        "orchestrator.generation.",
        True,
        "it only decides which of the next groups are generated; each end is in the ledger",
    ),
    Rule("orchestrator.", False, "it bounds the episodes that are already on their way to the trainer"),
)
"""The first rule whose prefix matches a key applies. Every key has a rule; in doubt it may not change."""
_UNKNOWN = Rule("", False, "this version does not know the key")


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value changed."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.was)} → {_shown(self.now)}"


def relevant(config: RunConfig) -> dict[str, Any]:
    """Return the settings that affect training, with defaults, by dotted key."""
    flat: dict[str, Any] = {}
    _flatten("", orjson.loads(config.model_dump_json()), flat)
    return {key: value for key, value in flat.items() if not key.startswith(_irrelevant())}


@cache
def _irrelevant() -> tuple[str, ...]:
    return (*IRRELEVANT, *keys())


def in_force(settings: Settings, epoch: int) -> dict[str, Any]:
    """Return the settings in force in `epoch`; empty if nothing was recorded.

    Before the first entry, its settings apply, since nothing had changed. Raises ConfigError for settings that this
    version or installation lacks (shared.removed_keys).
    """
    found: dict[str, Any] = {}
    for began, changed in settings:
        if not found or began <= epoch:
            found |= changed
    return _of_its_algorithm(removed_keys.readable(found))


def _of_its_algorithm(flat: Flat) -> dict[str, Any]:
    """Drop keys of an earlier algorithm that the present one lacks.

    They were recorded as null when the present one took over, or have the default that they have without it.
    """
    if not (known := keys_of(flat.get(_NAME))):
        return dict(flat)
    others = every_key() - known

    def is_gone(key: str, value: Any) -> bool:
        top = key.removeprefix(_ALGORITHM).partition(".")[0]
        return key.startswith(_ALGORITHM) and top not in known and (value is None or top in others)

    return {key: value for key, value in flat.items() if not is_gone(key, value)}


def amended(settings: Settings, epoch: int, now: Flat) -> Settings:
    """Add the changes of `epoch` to the settings; return them unchanged if there are none, or `now` is empty."""
    if not settings or not now:
        return ((epoch, dict(now)),) if now else settings
    changed = {change.key: change.now for change in changes(in_force(settings, epoch), now)}
    return (*settings, (epoch, changed)) if changed else settings


def parse(raw: Any) -> Settings:
    """Parse settings from JSON. Raises TypeError or ValueError."""
    settings = tuple((epoch, dict(flat)) for epoch, flat in raw)
    if any(type(epoch) is not int or not all(isinstance(key, str) for key in flat) for epoch, flat in settings):
        raise TypeError("settings are not keys and values by epoch")
    if [epoch for epoch, _ in settings] != sorted({epoch for epoch, _ in settings}):
        raise ValueError("the epochs of the settings do not ascend")
    return settings


def undone(config: Flat, amendments: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Any]:
    """Return the configuration before amendments, each {key: (was, now)}, oldest first."""
    found = dict(config)
    for changed in reversed(amendments):
        found |= {key: was for key, (was, _) in changed.items()}
    return found


def changes(was: Flat, now: Flat) -> list[Change]:
    """Return the keys whose values differ, sorted. A key missing on one side has its default there.

    Raises ConfigError for keys that this version or installation lacks (shared.removed_keys).
    """
    was, now = removed_keys.readable(was), removed_keys.readable(now)
    keys = sorted(key for key in {*was, *now} if not key.startswith(_irrelevant()))
    filled = {key: (value_of(was, key), value_of(now, key)) for key in keys}
    return [Change(key, a, b) for key, (a, b) in filled.items() if a != b and not _means_the_same(key, a, b)]


def value_of(flat: Flat, key: str) -> Any:
    """Return the value of a key; its default if the settings lack it, as those of older versions do."""
    if key in flat:
        return flat[key]
    return _defaults().get(key, default_of(flat.get(_NAME), key.removeprefix(_ALGORITHM)))


def _means_the_same(key: str, was: Any, now: Any) -> bool:
    """True for equivalent values: two spellings of a path, or a value that one side does not record."""
    if key.startswith(CONTENT):
        return was is None or now is None
    return (key in _PATHS and same_path(was, now)) or (key == "run.date" and was is None)


def permitted(was: Flat, now: Flat, *, step: int, free: tuple[str, ...] = ()) -> list[Change]:
    """Return the changes that take effect after `step`, the newest durable one.

    Keys that start with one of `free` may change too. Raises ConfigError naming forbidden changes.
    """
    found = changes(was, now)
    wrong = [
        (change, reason) for change in found if not change.key.startswith(free) and (reason := _objection(change, step))
    ]
    if wrong:
        named = "; ".join(
            f"{c.key} (was {_shown(c.was)}, now {_shown(c.now)}) may not change: {reason}"
            for c, reason in wrong[:_MOST_NAMED]
        )
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        back = " ".join(f"{c.key}={_shown(c.was)}" for c, _ in wrong[:_MOST_NAMED] if not _is_of_rule(c))
        raise ConfigError(
            f"the run was started with another configuration: {named}{more}",
            f"{f'set {back} again' if back else 'put the file back'}, or choose another run.name=…",
        )
    return found


def rule_of(key: str) -> Rule:
    """Return the rule of a key of `relevant`; other keys may not change."""
    return next((rule for rule in rules() if key.startswith(rule.prefix)), _UNKNOWN)


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules of the packages' sections, and the core's; the first whose prefix matches a key applies."""
    added: list[Rule] = []
    for place, section in sections().items():
        if place.startswith(IRRELEVANT):
            continue  # not recorded, so nothing to ask
        added += [Rule(f"{place}.{key}", True, reason) for key, reason in section.changeable.items()]
        added.append(Rule(f"{place}.", section.may_change, section.reason))
    return (*added, *RULES)


def same_path(a: Any, b: Any) -> bool:
    """True if two texts may name the same path: equal, or a relative one that the absolute one ends with."""
    if not isinstance(a, str) or not isinstance(b, str):
        return False
    one, other = (PurePath(os.path.normpath(text)) for text in (a, b))
    if one.is_absolute() == other.is_absolute():
        return one == other
    relative, absolute = (other, one) if one.is_absolute() else (one, other)
    parts = tuple(part for part in relative.parts if part != "..")
    return absolute.parts[-len(parts) :] == parts if parts else False


def _objection(change: Change, step: int) -> str | None:
    """Return why this change is not allowed; None if it is."""
    rule = rule_of(change.key)
    if change.key == "mode" and (change.was, change.now) in _ONE_MODE:
        return None
    if not rule.may:
        return rule.reason
    if change.key == MAX_STEPS and change.now < step:
        return f"{step} steps are already trained"
    if change.key == _NAME and not {change.was, change.now}.isdisjoint(_WITH_CRITIC):
        return "a critic has to be trained from the first step"
    if change.key in _OF_CRITIC:
        return _OF_CRITIC[change.key]
    if _is_of_rule(change):
        return (
            "a run keeps the rules that it began with, in its own copy: `volley up RUN_DIR` goes on with them, and"
            " `volley fork` trains with others"
        )
    if change.key == _BETA and not (change.was and change.now):
        return "the KL term's reference, the weights of step 0, is only kept if beta is set from the start"
    if change.key == _TEACHER and not (change.was and change.now):
        return "episodes on their way to the trainer were sampled with a teacher or without one"
    return None


def _is_of_rule(change: Change) -> bool:
    """True if a rule of the user came, went or changed."""
    return any(map(own_rules.is_text, (change.was, change.now)))


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    else:
        into[prefix] = value


@cache
def _defaults() -> dict[str, Any]:
    return relevant(run_model().model_validate({"model": {"path": ""}, "data": {"env": "?"}}))


def _shown(value: Any) -> str:
    """Format a value as on the command line, and the text of a rule by its name and digest."""
    if (rule := own_rules.shown(value)) is not None:
        return rule
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return orjson.dumps(value).decode()
    return "null" if value is None else str(value)
