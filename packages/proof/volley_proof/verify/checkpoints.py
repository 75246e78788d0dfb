"""Verify that the retained checkpoints are whole, match their names, and agree along the newest one's lineage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, DecodeError, VolleyError, WeightsError
from shared.models.config import ModelConfig
from shared.run import checkpoint_files, commits, saved
from shared.run import state as states
from shared.run.checkpoint_files import BAD, MANIFEST, PARAMS, Manifest
from shared.run.folder import RunFolder
from shared.run.lineage import in_lineage
from shared.run.state import TrainerState
from shared.types import WeightVersion
from volley_proof.verify.violation import Violation, ViolationKind

_DTYPES = {"float16", "bfloat16", "float32", "float64"}
_ENTRIES = {PARAMS, states.OPTIMIZER, states.STATE, MANIFEST}
_MOST_S = 1e11
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A whole checkpoint."""

    manifest: Manifest
    state: TrainerState

    @property
    def version(self) -> WeightVersion:
        return self.state.version


def retained(root: Path, run: str) -> tuple[list[RetainedCheckpoint], list[Violation]]:
    """Read intact checkpoints under `root`, oldest first, and violations of the others.

    A checkpoint that a running trainer removes meanwhile is in neither.
    """
    found, violations, bases = [], [], set[str]()
    for version in checkpoint_files.versions(root):
        folder = root / str(version)
        try:
            one = _checked(folder, version, run)
            if (adapter := one.manifest.adapter) and adapter.base.digest not in bases:
                checkpoint_files.verify_base(root, adapter.base)
                bases.add(adapter.base.digest)
            found.append(one)
            saved.check(folder)
        except (VolleyError, OSError) as error:
            if (folder / MANIFEST).exists():
                detail = error.detail if isinstance(error, VolleyError) else str(error)
                violations.append(
                    Violation(ViolationKind.CHECKPOINT, detail, step=version.step, file=f"{root.name}/{version}")
                )
    return found, violations


def set_aside(root: Path) -> dict[str, str]:
    """Damaged checkpoints that the trainer set aside, with their damage. No violations: nothing depends on them."""
    return {str(version): _damage(root / BAD / str(version)) for version in checkpoint_files.versions(root / BAD)}


def _damage(folder: Path) -> str:
    try:
        states.verify(folder)
    except (VolleyError, OSError) as error:
        return str(error)
    return "whole by now"


def _checked(folder: Path, version: WeightVersion, run: str) -> RetainedCheckpoint:
    """Raises WeightsError."""
    manifest, state = states.verify_digests(folder)
    for what, recorded, expected in (
        ("the manifest's version", manifest.version, str(version)),
        ("the manifest's step", manifest.step, version.step),
        ("the manifest's run", manifest.run, run),
        ("the state's version", str(state.version), str(version)),
    ):
        if recorded != expected:
            raise WeightsError(f"{what} is {recorded}, expected {expected}")
    dtypes = {leaf.dtype for leaf in manifest.tree}
    kind = "adapter" if manifest.adapter else "full"
    if manifest.kind != kind or not manifest.tree or not manifest.files or not dtypes <= _DTYPES:
        raise WeightsError("the manifest does not describe weights: kind, tree or files are wrong or empty")
    if len({leaf.key for leaf in manifest.tree}) < len(manifest.tree) or not 0 <= manifest.created < _MOST_S:
        raise WeightsError("the manifest names a weight twice, or no valid time")
    if extra := sorted({path.name for path in folder.iterdir()} - _ENTRIES):
        raise WeightsError(f"{extra[0][:100]} does not belong to a checkpoint")
    return RetainedCheckpoint(manifest, state)


def check(found: Sequence[RetainedCheckpoint], head: TrainerState, root: Path) -> list[Violation]:
    """Check the newest state, and the manifests along its lineage."""
    details = _lineage(head)
    if head.issued < max(head.low, *head.done, 0) if head.done else head.issued < head.low:
        details.append(f"{head.issued} tickets were issued, but later ones are finished")
    if head.reference is not None and not (root / head.reference / MANIFEST).exists():
        details.append(f"the reference {head.reference} is missing")
    violations = [_of(root, head, detail) for detail in details]
    mine = [one for one in found if in_lineage(one.version, head.lineage)]
    for one in mine:
        if (detail := _differs(one.manifest, mine[-1].manifest)) is not None:
            violations.append(_of(root, one.state, f"{detail} those of {mine[-1].version}"))
        base = _parsed(one.manifest.base_version)
        if base is not None and not in_lineage(base, head.lineage):
            violations.append(_of(root, one.state, f"its base {base} is not in the lineage"))
    return violations


def _differs(one: Manifest, newest: Manifest) -> str | None:
    """First difference between two manifests of a run, or None. Manifests of any version of Volley compare."""
    if one.adapter != newest.adapter:
        return "its weights are adapters of another base than"
    if {leaf.key: leaf for leaf in one.tree} != {leaf.key: leaf for leaf in newest.tree}:
        return "its arrays have other names, shapes or dtypes than"
    if (one.probe and one.probe.input_ids) != (newest.probe and newest.probe.input_ids):
        return "its probe is of other tokens than"
    if one.model != newest.model and not _computes_the_same(one.model, newest.model):
        return "its weights are of another model than"
    return None


def _computes_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        return ModelConfig.parse(one).difference(ModelConfig.parse(other)) is None
    except ConfigError:
        return False


def check_states(ancestors: Sequence[TrainerState], root: Path, groups_per_step: int) -> list[Violation]:
    """Check the states of checkpoints and commit records along the newest one's lineage, oldest first."""
    head = ancestors[-1]
    violations, known = list[Violation](), False
    for state in ancestors:
        if known and not state.settings:
            violations.append(_of(root, state, "it has no settings, an older one has"))
        known = known or bool(state.settings)
        violations += [
            _of(root, state, detail) for detail in (*_ancestor(state, head), *_count(state, groups_per_step))
        ]
    return violations


def _lineage(head: TrainerState) -> list[str]:
    pairs = head.lineage
    if not pairs or pairs[0][1] != 0 or pairs[-1][0] != head.epoch or pairs[-1][1] > head.step:
        return [f"the lineage {list(pairs[-_MOST_NAMED:])} does not lead from step 0 to {head.version}"]
    return []


def _count(head: TrainerState, groups_per_step: int) -> list[str]:
    trained, expected = head.progress().n_trained, head.step * groups_per_step
    return [] if trained == expected else [f"{trained} tickets are trained, {head.step} steps need {expected}"]


def _ancestor(one: TrainerState, head: TrainerState) -> list[str]:
    details = []
    if one.lineage != head.lineage[: len(one.lineage)]:
        details.append(f"its lineage is not a prefix of that of {head.version}")
    now, then = head.progress(), one.progress()
    forgotten = next(
        (t for t in chain(range(now.low + 1, then.low + 1), sorted(then.done)) if not now.is_finished(t)), None
    )
    if forgotten is not None:
        details.append(f"ticket {forgotten} is finished here, but not in {head.version}")
    if one.issued > head.issued or one.void > head.void or one.seed != head.seed or one.reference != head.reference:
        details.append(f"its issued and void tickets, seed or reference do not agree with those of {head.version}")
    if one.settings != head.settings[: len(one.settings)]:
        details.append(f"its settings are not a prefix of those of {head.version}")
    if one.origin != head.origin:
        details.append(f"the weights before its first step are not those that {head.version} names")
    return details


def _parsed(version: str | None) -> WeightVersion | None:
    try:
        return WeightVersion.parse(version) if version else None
    except DecodeError:
        return WeightVersion(0, 0)


def _of(root: Path, state: TrainerState, detail: str) -> Violation:
    folder = root / str(state.version)
    path = folder / states.STATE if folder.exists() else commits.path_of(RunFolder(root.parent).archive, state.version)
    return Violation(ViolationKind.STATE, detail, step=state.step, file=path.relative_to(root.parent).as_posix())
