"""Plan of a fork: its folder, configuration, first and last step. Reads the other run's folder only."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.run import archive, commits, pinned, trust
from shared.run.folder import RunFolder
from shared.run.lineage import ForkPoint, epoch_of
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley.runs.run_file import read_record
from volley_proof.forks import fork_start
from volley_proof.forks.fork_start import ForkStart
from volley_proof.verify import mixture
from volley_python.folder import forks, survey
from volley_python.folder.forks import Fork


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of a fork. `first`: step after which it starts; `steps`: most steps to train, None up to the log's end.

    `mended`: replay the episodes in their environments, and train on the rewards of these; `judged_by` names another
    environment, by that of the episodes.
    """

    first: int
    steps: int | None
    least_share: float
    mended: bool = False
    judged_by: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """A fork and its configuration.

    `base` is the configuration of the steps that are trained again before the fork, with the settings of the other run;
    of step 0 alone, those of the fork, except for rewards. `start` is the state to copy; None if the run's first
    weights are made again.
    """

    folder: RunFolder
    loaded: LoadedConfig
    base: LoadedConfig
    fork: Fork
    start: ForkStart | None


def planned(source: RunFolder, wanted: Wanted, overrides: Sequence[str], files: Sequence[Path] = ()) -> ForkPlan:
    """Plan a fork. Raises ConfigError for a run, steps or settings that cannot be used.

    Args:
        overrides: settings of the fork; they win over those of `files`, which win over the run's.
    """
    if not 0 <= wanted.least_share <= 1:
        raise ConfigError(f"--least-share {wanted.least_share:g} is not a share", "choose a number from 0 to 1")
    head = _head(source)
    stored = config.stored(source.path)
    run = stored.config.run.name
    _check_log(source, run, head, wanted)
    _check_scored_environments(source, stored, head, wanted)
    asked = config.stored(source.path, overrides, files)
    named = any(one.startswith("run.name=") for one in overrides)
    name = asked.config.run.name if named else f"{run}-fork"
    moved = any(one.startswith("run.dir=") for one in overrides)
    own = {"run.name": name, "run.bucket": None, "run.dir": str(asked.config.run.dir if moved else source.path.parent)}
    base = config.rooted(config.changed(stored, own), Path.cwd())
    loaded = config.rooted(config.changed(asked, own), Path.cwd())
    folder = RunFolder(loaded.config.run.folder.absolute())
    if folder.path == source.path:
        raise ConfigError(f"run.name={name} is the run itself", "give the fork another name with run.name=…")
    start = _start(source, run, head, wanted.first)
    if start is not None and not _can_resume(head, base, loaded, wanted.first):
        start = None
    if start is None:
        _check_settings(base, loaded, wanted.first)
        base = base if wanted.first else _of_first_weights(base, loaded)
    last = head.step if wanted.steps is None else wanted.first + wanted.steps
    point = ForkPoint(run, 0 if start is None else wanted.first, head.lineage)
    fork = Fork(
        source=str(source.path),
        step=point.step,
        last=min(last, loaded.config.trainer.max_steps),
        version=str(head.version),
        points=(*head.forks, point),
        least_share=wanted.least_share,
        mended=wanted.mended or _has_other_rewards(base, loaded),
        rebuilt=wanted.first if start is None else 0,
        judged_by=dict(wanted.judged_by),
    )
    return ForkPlan(folder, loaded, base, fork, start)


def _has_other_rewards(base: LoadedConfig, loaded: LoadedConfig) -> bool:
    found = pinned.changes(pinned.relevant(base.config), pinned.relevant(loaded.config))
    return any(change.key.startswith(forks.REWARDS) for change in found)


def _unlike(recorded: pinned.Flat, loaded: LoadedConfig) -> list[pinned.Change]:
    """Return changed settings, without the date that the fork's first start has set."""
    found = pinned.changes(recorded, pinned.relevant(loaded.config))
    return [one for one in found if one.key != "run.date" or loaded.config.run.date is not None]


def check_existing(plan: ForkPlan, existing: Fork | None) -> None:
    """Check that the folder with the fork's name is this fork, started before. Raises ConfigError."""
    path, hint = plan.folder.path, "choose another run.name=…, or remove the folder"
    if existing is None:
        raise ConfigError(f"{path} exists and is not a fork", hint)
    ours, theirs = plan.fork, existing
    for name in ("source", "step", "last", "least_share", "mended", "rebuilt", "judged_by"):
        if (now := getattr(ours, name)) != (was := getattr(theirs, name)):
            raise ConfigError(f"{path} is a fork with another {name}: {was}, not {now}", hint)
    record = read_record(plan.folder)
    if record is None:
        return  # it was killed before it began
    possible = [plan.loaded, plan.base] if plan.start is None else [plan.loaded]
    differing = [_unlike(record.config, one) for one in possible]
    if all(differing):
        raise ConfigError(f"{path} is a fork with other settings: {'; '.join(map(str, differing[0][:5]))}", hint)


def _head(source: RunFolder) -> TrainerState:
    """Return the newest state of the run. Raises ConfigError if it is not an RL run with a trained step."""
    source.check()
    trust.check(source)
    survey.check(source)
    if config.stored(source.path).config.is_supervised:
        raise ConfigError(
            f"{source.path} is a supervised run", "only groups of reinforcement learning can be trained again"
        )
    head = commits.newest(source)
    if head is None or not head.step:
        raise ConfigError(f"{source.path} has trained nothing yet", "wait for its first step")
    return head


def _check_log(source: RunFolder, run: str, head: TrainerState, wanted: Wanted) -> None:
    """Check that the log has the steps. Raises ConfigError."""
    first, last = wanted.first, head.step if wanted.steps is None else wanted.first + wanted.steps
    if not 0 <= first < head.step:
        raise ConfigError(
            f"--from {first}: the log of {run} has steps 1 to {head.step}", f"choose 0 to {head.step - 1}"
        )
    if last > head.step or last <= first:
        most = head.step - first
        raise ConfigError(
            f"--steps {wanted.steps}: the log of {run} has {most} steps after step {first}",
            f"choose 1 to {most}; --live goes on generating after the log's end",
        )
    there = set(archive.versions(source.archive))
    versions = (WeightVersion(epoch_of(step, head.lineage) or 0, step) for step in range(1, last + 1))
    if (missing := next((v for v in versions if v not in there), None)) is not None:
        raise ConfigError(f"the groups of {missing} are not in {source.archive}", "restore them, or choose other steps")


def _check_scored_environments(source: RunFolder, stored: LoadedConfig, head: TrainerState, wanted: Wanted) -> None:
    """Check that the run played the environments whose episodes another environment scores. Raises ConfigError."""
    if not wanted.judged_by:
        return
    assignment, _ = mixture.assigned(source.mixture, stored.config.data, head.issued)
    played = {assignment.of(ticket).env for ticket in range(1, head.issued + 1)}
    if unknown := sorted(wanted.judged_by.keys() - played):
        raise ConfigError(
            f"--env {unknown[0]}: no episode of {stored.config.run.name} is of it",
            f"choose {', '.join(sorted(played))}",
        )


def _start(source: RunFolder, run: str, head: TrainerState, first: int) -> ForkStart | None:
    """Find the state to copy; None if the first weights are made again. Raises ConfigError if there is none."""
    try:
        return fork_start.find(source, run, first, head)
    except ConfigError:
        if _may_rebuild_first_weights(head, first):
            return None
        raise


def _may_rebuild_first_weights(head: TrainerState, first: int) -> bool:
    """True if the steps up to `first` had the same settings, and the first weights no other run's groups."""
    start = dict(head.lineage)
    return all(start.get(epoch, 0) == 0 or start[epoch] > first for epoch, _ in head.settings) and not head.forks


def _of_first_weights(base: LoadedConfig, loaded: LoadedConfig) -> LoadedConfig:
    """Return the fork's configuration with the other run's rewards: a critic or a reference begins with the weights."""
    tree = copy.deepcopy(loaded.tree)
    for key in forks.REWARDS:
        section, leaf = key.split(".")
        tree[section].pop(leaf, None)
        if leaf in base.tree[section]:
            tree[section][leaf] = base.tree[section][leaf]
    return config.validate(tree)


def _can_resume(head: TrainerState, base: LoadedConfig, loaded: LoadedConfig, first: int) -> bool:
    """Return True if a fork with these settings can go on from a checkpoint, else it makes the first weights again.

    Raises ConfigError for settings that can do neither.
    """
    try:
        pinned.permitted(pinned.relevant(base.config), pinned.relevant(loaded.config), step=first, free=forks.FREE)
    except ConfigError:
        if first or not _may_rebuild_first_weights(head, first):
            raise
        return False
    return True


def _check_settings(base: LoadedConfig, loaded: LoadedConfig, first: int) -> None:
    """Check the settings of a fork that begins with the run's first weights. Raises ConfigError.

    At step 0 even a critic or a reference may be added.
    """
    was, now = pinned.relevant(base.config), pinned.relevant(loaded.config)
    if first:
        pinned.permitted(was, now, step=first, free=forks.FREE)
        return
    for change in pinned.changes(was, now):
        rule = pinned.rule_of(change.key)
        if not rule.may and not change.key.startswith(forks.FREE):
            raise ConfigError(f"{change} is not possible in a fork: {rule.reason}", "start a new run with volley train")
