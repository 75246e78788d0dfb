"""What pins a run: the part of its configuration that decides what is trained, and which of it may change in a run's
life.

The settings in force are written into every checkpoint, under the digest of its manifest: whole at the first epoch,
later only what an epoch changed. Each start of a trainer is an epoch, so the lineage of epochs, which says at which
step each began, is also the record of every change, and what step *s* was trained under is what was in force at the
epoch that made it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import orjson

from shared import moved_keys
from shared.algorithm_schema import keys_of
from shared.errors import ConfigError
from shared.files.reading import read_file
from shared.schema import RunConfig

type Flat = Mapping[str, Any]
"""Values of a configuration by dotted key, as JSON holds them."""
type Settings = tuple[tuple[int, Flat], ...]
"""(epoch, what it began to have in force), oldest first: the first entry is whole, later ones hold only what changed.
"""

MAX_STEPS = "trainer.max_steps"
_ALGORITHM = "algorithm."
_BETA, _NAME, _TEACHER = "algorithm.beta", "algorithm.name", "algorithm.teacher_kl_coef"
_ONE_MODE = (("rl", "sft+rl"), ("sft+rl", "rl"))
"""One thing under two names: whether there is a warm start is said by `sft`, which is pinned."""
_PATHS = ("model.path", "data.train", "data.eval")
CONTENT = "model.content."
_MOST_NAMED = 5
_MAX_RECORD = 4 * 2**20


class Rule(NamedTuple):
    """What begins with `prefix` may change in a run's life, or may not, because `reason`."""

    prefix: str
    may: bool
    reason: str


IRRELEVANT = (
    "services.",
    "run.dir",
    "run.bucket",
    "data.sources",
    "orchestrator.max_concurrent_episodes",
    "orchestrator.lease_s",
    "orchestrator.episode_timeout_s",
    "trainer.offload_reference",
)
"""Addresses, limits, and where memory is taken: they decide nothing about what is trained, and are recorded nowhere.
What a name in data.env stands for is told by the digest in that name.
"""

RULES = (
    Rule("run.", False, "it is what the run is: every draw and every record rests on it"),
    Rule("model.initial_weights", True, "only a run without a checkpoint reads it"),
    Rule("model.routing_replay", True, "a group brings its experts or does not, and is trained by what it brings"),
    Rule(
        "model.content",
        False,
        "it is the digest of a file in the model's folder, which decides texts and token ids: put the file back",
    ),
    Rule(
        "model.",
        False,
        "weights and optimizer belong to this model; start a run from the trained weights with model.path=RUN@VERSION",
    ),
    Rule("mode", False, "it is what the run is: another one starts from its weights with model.path=RUN@VERSION"),
    Rule(
        "data.mixture",
        False,
        "tickets before and after would be divided differently; PATCH /runs/{name} changes the weights while the run "
        "goes on",
    ),
    Rule("data.curriculum", True, "it only decides the next changes of the mixture, each of which is a line on disk"),
    Rule(
        "data.",
        False,
        "tickets name tasks of this data, and evaluations before and after would measure different things; a file that "
        "has changed is another environment, and the run's own is kept in its folder",
    ),
    Rule("sft.eval_every_n_steps", True, "it only says how often the weights are measured"),
    Rule("sft.save_interval_steps", True, "it only says how often checkpoints are made"),
    Rule(
        "sft.",
        False,
        "a warm start is over before the first step; and a run of SFT has its data in the order that this decides",
    ),
    Rule("dpo.", False, "the loss before and after would be of different objectives"),
    Rule("grpo_config.num_generations", False, "groups of the old size are already on their way to the trainer"),
    Rule(
        "grpo_config.num_iterations",
        False,
        "the optimizer's schedule counts updates, and a step would be another number of them",
    ),
    Rule(
        "grpo_config.off_policy_steps",
        False,
        "it bounds which tickets are issued: those of one bound would be stale under another",
    ),
    Rule(
        "grpo_config.max_response_length", False, "it bounds the episodes that are already on their way to the trainer"
    ),
    Rule("algorithm.", True, "only the trainer's loss reads it, anew at every step"),
    Rule("trainer.max_steps", True, "it only says when the run ends, and where a linear or cosine schedule does"),
    Rule("trainer.groups_per_step", False, "tickets, steps and staleness are counted in it"),
    Rule(
        "trainer.optimizer_config.",
        True,
        "the optimizer's moments and its count of steps are kept; only the next updates differ",
    ),
    Rule("trainer.checkpointing_options.", True, "it only says how often checkpoints are made, and how many are kept"),
    Rule("trainer.on_nonfinite", True, "it only says what follows when a step is refused"),
    Rule(
        "trainer.filters.", True, "it only decides which of the next groups are trained on; each end is in the ledger"
    ),
    Rule(
        "trainer.lora",
        False,
        "it is what checkpoints hold; start a run from the trained weights with model.path=RUN@VERSION",
    ),
    Rule("trainer.", False, "the optimizer's state and the order of sums rest on it"),
    Rule("rollout.engine.max_running_requests", True, "it only decides how fast the engine is"),
    Rule("rollout.engine.max_prefill_tokens", True, "it only decides how fast the engine is"),
    Rule("rollout.engine.precompile_", True, "it only decides how fast the engine is"),
    Rule(
        "rollout.sampling.",
        False,
        "groups sampled the old way are already on their way, and the trainer would score them the new way",
    ),
    Rule("rollout.", False, "it decides how the episodes come about that are already on their way to the trainer"),
    Rule("orchestrator.eval_every_n_steps", True, "it only says how often the weights are measured"),
    Rule("orchestrator.max_attempts", True, "it only says how often an episode that broke is tried again"),
    Rule("orchestrator.", False, "it bounds the episodes that are already on their way to the trainer"),
)
"""The first rule whose prefix a key begins with holds; every key has one, and what is in doubt may not change."""
_UNKNOWN = Rule("", False, "this version knows no such key")


@dataclass(frozen=True, slots=True)
class Change:
    """One key with its values."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.was)} → {_shown(self.now)}"


def relevant(config: RunConfig) -> dict[str, Any]:
    """The configuration with defaults filled in, flat, without what is irrelevant to what is trained."""
    flat: dict[str, Any] = {}
    _flatten("", orjson.loads(config.model_dump_json()), flat)
    return {key: value for key, value in flat.items() if not key.startswith(IRRELEVANT)}


def in_force(settings: Settings, epoch: int) -> dict[str, Any]:
    """What was in force in `epoch`; before the first entry nothing had changed yet. Empty if nothing was recorded."""
    found: dict[str, Any] = {}
    for began, changed in settings:
        if not found or began <= epoch:
            found |= changed
    return _of_its_algorithm(moved_keys.in_flat(found))


def _of_its_algorithm(flat: Flat) -> dict[str, Any]:
    """Without the keys of an earlier algorithm, which were recorded as null when another one without them began."""
    known = keys_of(flat.get(_NAME))
    gone = {key for key, value in flat.items() if value is None and key.startswith(_ALGORITHM)} if known else set[str]()
    return {key: value for key, value in flat.items() if key not in gone or key.split(".")[1] in known}


def amended(settings: Settings, epoch: int, now: Flat) -> Settings:
    """The settings with what `epoch` changes in them; the same if it changes nothing, or `now` is empty."""
    if not settings or not now:
        return ((epoch, dict(now)),) if now else settings
    changed = {change.key: change.now for change in changes(in_force(settings, epoch), now)}
    return (*settings, (epoch, changed)) if changed else settings


def parse(raw: Any) -> Settings:
    """Settings as JSON holds them. Raises TypeError or ValueError."""
    settings = tuple((epoch, dict(flat)) for epoch, flat in raw)
    if any(type(epoch) is not int or not all(isinstance(key, str) for key in flat) for epoch, flat in settings):
        raise TypeError("settings are not keys and values by epoch")
    if [epoch for epoch, _ in settings] != sorted({epoch for epoch, _ in settings}):
        raise ValueError("the epochs of the settings do not ascend")
    return settings


def original(record: Path) -> dict[str, Any]:
    """What a run was started with, as its run.json tells; empty if that cannot be read.

    For checkpoints that are older than their settings: of everything else, the checkpoint is the witness.
    """
    with suppress(OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raw = orjson.loads(read_file(record, _MAX_RECORD))
        return undone(dict(raw["config"]), [dict(one["changes"]) for one in raw.get("amendments", ())])
    return {}


def undone(config: Flat, amendments: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Any]:
    """The configuration before amendments, each {key: (was, now)}, oldest first."""
    found = dict(config)
    for changed in reversed(amendments):
        found |= {key: was for key, (was, _) in changed.items()}
    return found


def changes(was: Flat, now: Flat) -> list[Change]:
    """The keys whose values differ, in order. A key that one side does not know has its default there."""
    was, now = moved_keys.in_flat(was), moved_keys.in_flat(now)
    filled = {key: (_value(was, key), _value(now, key)) for key in sorted({*was, *now})}
    return [Change(key, a, b) for key, (a, b) in filled.items() if a != b and not _means_the_same(key, a, b)]


def _means_the_same(key: str, was: Any, now: Any) -> bool:
    """Whether two values that differ change nothing: a path in two spellings, and what an older run did not record: its
    date, the content of its model's folder.
    """
    if key.startswith(CONTENT):
        return was is None or now is None
    return (key in _PATHS and same_path(was, now)) or (key == "run.date" and was is None)


def permitted(was: Flat, now: Flat, *, step: int) -> list[Change]:
    """What changes from `step` on, the newest durable one. Raises ConfigError naming what may not, with the reason."""
    found = changes(was, now)
    wrong = [(change, reason) for change in found if (reason := _objection(change, step))]
    if wrong:
        named = "; ".join(
            f"{c.key} (was {_shown(c.was)}, now {_shown(c.now)}) may not change: {reason}"
            for c, reason in wrong[:_MOST_NAMED]
        )
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        back = " ".join(f"{c.key}={_shown(c.was)}" for c, _ in wrong[:_MOST_NAMED])
        raise ConfigError(
            f"the run was begun with another configuration: {named}{more}",
            f"go back to {back}, or choose another run.name=…",
        )
    return found


def rule_of(key: str) -> Rule:
    """The rule for a key of `relevant`; of another one, that it may not change."""
    return next((rule for rule in RULES if key.startswith(rule.prefix)), _UNKNOWN)


def same_path(a: Any, b: Any) -> bool:
    """Whether two texts may name the same path, where one was written relative to a directory that the
    other one names.
    """
    if not isinstance(a, str) or not isinstance(b, str):
        return False
    one, other = (PurePath(os.path.normpath(text)) for text in (a, b))
    if one.is_absolute() == other.is_absolute():
        return one == other
    relative, absolute = (other, one) if one.is_absolute() else (one, other)
    parts = tuple(part for part in relative.parts if part != "..")
    return absolute.parts[-len(parts) :] == parts if parts else False


def _objection(change: Change, step: int) -> str | None:
    """Why the value may not change like that; None if it may."""
    rule = rule_of(change.key)
    if change.key == "mode" and (change.was, change.now) in _ONE_MODE:
        return None
    if not rule.may:
        return rule.reason
    if change.key == MAX_STEPS and change.now < step:
        return f"{step} steps are trained already"
    if change.key == _NAME and "ppo" in (change.was, change.now):
        return "its critic is trained from the beginning, or not at all"
    if change.key == _BETA and not (change.was and change.now):
        return "the weights of step 0 are kept for the KL term from the beginning, or not at all"
    if change.key == _TEACHER and not (change.was and change.now):
        return "the episodes that are on their way to the trainer were shown to a teacher, or were not"
    return None


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    else:
        into[prefix] = value


def _value(flat: Flat, key: str) -> Any:
    return flat[key] if key in flat else _defaults().get(key)


@cache
def _defaults() -> dict[str, Any]:
    return relevant(RunConfig.model_validate({"model": {"path": ""}, "data": {"env": "?"}}))


def _shown(value: Any) -> str:
    """As one would write it on the command line."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return orjson.dumps(value).decode()
    return "null" if value is None else str(value)
