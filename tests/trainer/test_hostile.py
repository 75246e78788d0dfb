"""A checkpoint full of code: the trainer refuses it, by digest or by decoding, and runs none of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orjson
import pytest

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders, restore
from services.trainer.models.arrays import CheckpointContents
from shared.errors import VolleyError, WeightsError
from shared.run import state
from shared.run.checkpoint_files import MANIFEST, digest, digest_files, read_manifest, write_manifest
from shared.types import WeightVersion
from tests.support.hostile import infect, works

PARAMS = {"layers.0.attn.q_proj.w": jnp.arange(24.0).reshape(2, 3, 4), "final_norm.w": jnp.ones(3)}
OPTIMIZER = {"step": jnp.array(4, jnp.uint32), "opt_state.0.mu.final_norm.w": jnp.full(3, 0.1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = CheckpointFolders(tmp_path / "checkpoints", "run", max_to_keep=2, arrays=OrbaxArrays())
    checkpoints.fence(1)
    first = dataclasses.replace(state.initial_state(7).starting_epoch(1, keep_reference=False), step=1, low=1)
    return checkpoints.save(
        first, CheckpointContents(PARAMS, OPTIMIZER, None, {"model_type": "qwen3"}, None), WeightVersion(1, 0)
    )


def seal(folder: Path) -> None:
    """Makes all digests true again, as somebody could who may write everything."""
    held = orjson.loads((folder / state.STATE).read_bytes())
    held["optimizer_files"] = [dataclasses.asdict(file) for file in digest_files(folder, state.OPTIMIZER)]
    (folder / state.STATE).write_bytes(orjson.dumps(held))
    manifest = read_manifest(folder)
    write_manifest(
        folder, dataclasses.replace(manifest, files=digest_files(folder, "params"), state=digest(folder / state.STATE))
    )


def test_a_checkpoint_of_pickles_is_refused_by_its_digests(folder: Path, tmp_path: Path):
    assert works(tmp_path)
    infect(folder, tmp_path / "canary", keep=(MANIFEST, state.STATE))
    with pytest.raises(WeightsError, match=r"manifest|digest|bytes"):
        restore(folder, OrbaxArrays())
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("keep", [(), (MANIFEST,), (state.STATE,)])
def test_a_manifest_or_state_of_pickles_is_malformed(folder: Path, tmp_path: Path, keep: tuple[str, ...]):
    infect(folder, tmp_path / "canary", keep=keep)
    with pytest.raises(WeightsError):
        restore(folder, OrbaxArrays())
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("part", ["params", state.OPTIMIZER])
def test_pickles_with_true_digests_are_not_executed(folder: Path, tmp_path: Path, part: str):
    infect(folder / part, tmp_path / "canary")
    seal(folder)
    with pytest.raises(VolleyError):
        restore(folder, OrbaxArrays())
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize("part", ["params", state.OPTIMIZER])
def test_a_single_pickle_among_true_files_is_not_executed(folder: Path, tmp_path: Path, part: str, n: int):
    files = sorted(path for path in (folder / part).rglob("*") if path.is_file())
    victim = files[n % len(files)]
    kept = {path: path.read_bytes() for path in files if path != victim}
    infect(folder / part, tmp_path / "canary")
    for path, data in kept.items():
        path.write_bytes(data)
    seal(folder)
    try:
        arrays = restore(folder, OrbaxArrays()).params
    except VolleyError:
        arrays = {}
    assert all(np.asarray(value).dtype != object for value in arrays.values())
    assert not (tmp_path / "canary").exists()
