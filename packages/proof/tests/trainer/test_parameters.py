"""The parameters of checkpoints against the log's checksums: read without JAX, and compared by `volley verify`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orjson
import pytest

from services.trainer.backend.policy import PolicyBackend
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.learner.checksum import checksum
from services.trainer.learner.policy import PolicyOptions
from services.trainer.models.arrays import CheckpointContents
from services.trainer.models.lora import LoraOptions
from services.trainer.models.options import ModelOptions
from shared.models.config import ModelConfig
from shared.run import checkpoint_files, checksums
from shared.run import state as states
from shared.run.commits import CommitRecord
from shared.run.folder import RunFolder
from shared.run.state import initial_state
from tests.support import models
from tests.trainer.test_policy import CONFIG_1, OPTIONS, START, WEIGHTS, held, ppo_options
from volley_proof.checkpoints import parameters
from volley_proof.verify import parameters as proof
from volley_proof.verify.checkpoints import RetainedCheckpoint

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("rows", [1, 5, 2**22])
def test_the_checksum_is_that_of_the_learner(dtype: type, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_PART", rows)
    arrays = {
        "b.a": RNG.normal(size=(7, 5, 3)).astype(dtype),
        "a": RNG.normal(size=9).astype(dtype),
        "c": np.asarray(2, dtype),
    }
    assert parameters.checksum(arrays) == checksum({name: jnp.asarray(value) for name, value in arrays.items()})


def made(folder: Path, *, rounded: bool, critic: bool = True) -> tuple[list[RetainedCheckpoint], list[CommitRecord]]:
    """Two checkpoints of different parameters, and their records."""
    checkpoints = CheckpointFolders(folder / "checkpoints", "r", 3, OrbaxArrays())
    checkpoints.fence(1)
    found, records = list[RetainedCheckpoint](), list[CommitRecord]()
    for step in (1, 2):
        exact = {"x.w": RNG.normal(size=(4, 6)).astype(np.float32), "x.b": RNG.normal(size=6).astype(np.float32)}
        told = {name: value.astype(ml_dtypes.bfloat16) for name, value in exact.items()} if rounded else exact
        beside = {"critic.params.w": RNG.normal(size=3).astype(np.float32)} if critic else {}
        contents = CheckpointContents(
            told, {"count": np.zeros((), np.int32), **beside}, exact if rounded else None, {}, None
        )
        state = replace(initial_state(0).starting_epoch(1, keep_reference=False), step=step, low=step)
        path = checkpoints.save(state, contents, None)
        trained = {**exact, **{f"critic {name}": value for name, value in beside.items()}}
        records.append(CommitRecord("r", checksum({k: jnp.asarray(v) for k, v in trained.items()}), state))
        found.append(RetainedCheckpoint(*states.verify(path)))
    return found, records


@pytest.mark.parametrize("rounded", [False, True])
def test_parameters_that_the_log_tells_are_not_named(tmp_path: Path, rounded: bool) -> None:
    found, records = made(tmp_path, rounded=rounded)
    assert proof.check(RunFolder(tmp_path), found, records) == ([], [])


def test_parameters_of_another_step_are_named(tmp_path: Path) -> None:
    """Whatever the digests beside them say: here none is looked at."""
    found, records = made(tmp_path, rounded=False)
    first, second = (tmp_path / "checkpoints" / str(one.version) for one in found)
    shutil.rmtree(second / "params")
    shutil.copytree(first / "params", second / "params")
    (violation,), missing = proof.check(RunFolder(tmp_path), found, records)
    assert (violation.step, missing) == (2, [])


def test_a_tree_that_says_other_shapes_than_the_arrays_have_is_named(tmp_path: Path) -> None:
    found, records = made(tmp_path, rounded=False)
    path = tmp_path / "checkpoints" / str(found[0].version) / checkpoint_files.MANIFEST
    raw = orjson.loads(path.read_bytes())
    for leaf in raw["tree"]:
        leaf["shape"].reverse()
    path.write_bytes(orjson.dumps(raw))
    (violation,), _ = proof.check(RunFolder(tmp_path), found, records)
    assert violation.step == 1
    assert "its manifest says of x.w" in violation.detail


@pytest.mark.parametrize("rounded", [False, True])
def test_other_parameters_beside_the_true_ones_in_the_optimizer_are_named(tmp_path: Path, rounded: bool) -> None:
    found, records = made(tmp_path, rounded=rounded)
    first, second = (tmp_path / "checkpoints" / str(one.version) for one in found)
    if rounded:
        shutil.rmtree(second / "params")
        shutil.copytree(first / "params", second / "params")
    else:
        arrays, stored = OrbaxArrays(), second / "optimizer"
        masters = {f"master.{name}": np.asarray(value) for name, value in arrays.read(second / "params").items()}
        training = {name: np.asarray(value) for name, value in arrays.read(stored).items()}
        for folder in (stored, second / "params"):
            shutil.rmtree(folder)
        arrays.write(stored, training | masters)
        shutil.copytree(first / "params", second / "params")
    (violation,), _ = proof.check(RunFolder(tmp_path), found, records)
    assert violation.step == 2
    assert "optimizer" in violation.detail


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        (OPTIONS, None),
        (replace(OPTIONS, published_dtype="bfloat16"), None),
        (ppo_options(), None),
        (OPTIONS, LoraOptions(2, 4.0, ("q_proj", "down_proj"))),
    ],
    ids=["float32", "bfloat16", "ppo", "lora"],
)
def test_a_trainer_tells_what_its_checkpoint_holds(
    tmp_path: Path, options: PolicyOptions, lora: LoraOptions | None
) -> None:
    folders = CheckpointFolders(tmp_path / "run" / "checkpoints", "run", 2, OrbaxArrays())
    folders.fence(1)
    models.write_hf(tmp_path / "model", CONFIG_1, WEIGHTS)
    model = ModelOptions(tmp_path / "model", "float32", "none", (1, 1), ("fsdp", "tp"), 0, lora=lora)
    one, again = (PolicyBackend(model, ModelConfig.parse(CONFIG_1), options, folders) for _ in range(2))
    state = initial_state(0).starting_epoch(1, keep_reference=False)
    one.restore()
    one.build()
    one.start(state)
    one.step(held(1, 2, 3, 4), START)
    told = one.checksums()
    saved = one.save(replace(state, step=1, low=4), state.version)
    manifest = checkpoint_files.read_manifest(saved)
    described = checksums.description(manifest.model, manifest.tree, manifest.adapter, manifest.probe)
    assert told == {**parameters.checksums_of(saved), "description": described}
    again.restore()
    again.build()
    assert again.checksums() == told


def told_by_metrics(folder: Path, records: list[CommitRecord], optimizer: np.ndarray) -> None:
    """The same checksums, and that of the optimizer, as the lines of the steps tell them."""
    with RunFolder(folder).metrics.open("wb") as file:
        for one in records:
            found = {"params": one.checksum, "optimizer": checksum({"count": jnp.asarray(optimizer)})}
            line = {"step": one.version.step, "version": str(one.version), "checksums": found}
            file.write(orjson.dumps(line) + b"\n")


@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_a_checkpoint_is_compared_with_metrics_where_its_record_is_gone(tmp_path: Path, part: str) -> None:
    found, records = made(tmp_path, rounded=False, critic=False)
    told_by_metrics(tmp_path, records, np.zeros((), np.int32))
    assert proof.check(RunFolder(tmp_path), found, []) == ([], [])
    place, name = (
        tmp_path / "checkpoints" / str(found[1].version) / part,
        {"params": "x.w", "optimizer": "optimizer.count"},
    )
    arrays = {key: np.asarray(value) for key, value in OrbaxArrays().read(place).items()}
    shutil.rmtree(place)
    OrbaxArrays().write(place, arrays | {name[part]: arrays[name[part]] + 1})
    (violation,), missing = proof.check(RunFolder(tmp_path), found, [])
    assert (violation.step, missing) == (2, [])


def test_a_checkpoint_without_arrays_of_orbax_is_named_where_the_log_tells_their_checksum(tmp_path: Path) -> None:
    found, records = made(tmp_path, rounded=False)
    (tmp_path / "checkpoints" / str(found[1].version) / "params" / "manifest.ocdbt").unlink()
    (violation,), _ = proof.check(RunFolder(tmp_path), found, records)
    assert violation.step == 2


def test_checkpoints_that_a_running_trainer_removes_meanwhile_are_not_named(tmp_path: Path) -> None:
    found, records = made(tmp_path, rounded=False)
    for one in found:
        shutil.rmtree(tmp_path / "checkpoints" / str(one.version))
        assert proof.check(RunFolder(tmp_path), found, records) == ([], [])


def test_what_cannot_be_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, records = made(tmp_path, rounded=False)
    violations, (why,) = proof.check(RunFolder(tmp_path), found, records[1:])
    assert violations == []
    assert "parameters of e000001-s000001:" in why
    monkeypatch.setenv("VOLLEY_VENVS", str(tmp_path / "none"))
    violations, (why,) = proof.check(RunFolder(tmp_path), found, records)
    assert violations == []
    assert "not compared with the log" in why
