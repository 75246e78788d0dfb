"""Adapters of a run as a folder of full weights, and as PEFT's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from services.trainer.checkpoints import export
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models.arrays import CheckpointContents
from shared.errors import ConfigError
from shared.run import trust
from shared.run.checkpoint_files import BASE, Adapter
from shared.run.folder import RunFolder
from shared.run.state import initial_state
from shared.types import WeightVersion
from tests.support import models
from volley.verify.checkpoints import retained
from volley.verify.violation import ViolationKind

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, head_dim=4)
WEIGHTS = models.random_weights(CONFIG, 0)


def make_run(folder: Path, *, full: bool = False) -> Path:
    model, run = models.write_hf(folder / "model", CONFIG, WEIGHTS), folder / "run"
    checkpoints = CheckpointFolders(run / "checkpoints", "run", 3, OrbaxArrays())
    checkpoints.fence(1)
    base = checkpoints.save_base(WeightVersion(1, 0), models.to_tunix(WEIGHTS, CONFIG))
    adapter, params = Adapter(2, 8.0, base), models.random_adapter(CONFIG, 1)
    contents = CheckpointContents(params, {"count": np.zeros((), np.int32)}, None, CONFIG, None, adapter)
    if full:
        contents = replace(contents, params=models.to_tunix(WEIGHTS, CONFIG), adapter=None)
    checkpoints.save(initial_state(0).starting_epoch(1, keep_reference=False), contents, None)
    config = {"run": {"name": "run", "dir": str(folder)}, "model": {"path": str(model)}, "data": {"env": "frozen_lake"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    trust.accept(RunFolder(run))
    return run


def test_both_folders_are_the_same_model(tmp_path: Path) -> None:
    """PEFT's: W + lora_alpha / r · B A, with names of Hugging Face's modules."""
    run = make_run(tmp_path)
    told = export.export(run, tmp_path / "full", "latest")
    assert told["tensors"] == len(WEIGHTS)
    full = load_file(tmp_path / "full" / "model.safetensors")
    export.export(run, tmp_path / "adapter", "latest", adapter_only=True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 2, 8.0)
    assert said["base_model_name_or_path"] == str(tmp_path / "model")
    assert not (tmp_path / "adapter" / "base").exists()
    assert set(said["target_modules"]) == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    for name, value in WEIGHTS.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if (a := tensors.pop(f"{module}.lora_A.weight", None)) is not None:
            b = tensors.pop(f"{module}.lora_B.weight")
            assert a.shape[0] == b.shape[1] == 2
            value = value + said["lora_alpha"] / said["r"] * b.astype(np.float64) @ a
        np.testing.assert_allclose(full[name], value, atol=1e-6)
    assert not tensors


@pytest.mark.parametrize("weights", [None, models.random_weights(CONFIG, 1)], ids=["random", "others"])
def test_a_base_that_is_not_the_models_folder_is_written_beside(weights: models.Weights | None, tmp_path: Path) -> None:
    """As after a warm start, or from random weights."""
    run = make_run(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    models.write_hf(tmp_path / "model", CONFIG, weights)
    export.export(run, tmp_path / "adapter", "latest", adapter_only=True)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert said["base_model_name_or_path"] == str(tmp_path / "adapter" / "base")
    base = load_file(tmp_path / "adapter" / "base" / "model.safetensors")
    assert base.keys() == WEIGHTS.keys()
    assert all(np.array_equal(base[name], value) for name, value in WEIGHTS.items())


def test_a_run_of_full_weights_has_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains no adapters"):
        export.export(make_run(tmp_path, full=True), tmp_path / "out", "latest", adapter_only=True)
    assert not (tmp_path / "out").exists()


def test_the_proof_covers_the_base(tmp_path: Path) -> None:
    root = make_run(tmp_path) / "checkpoints"
    found, violations = retained(root, "run")
    assert (len(found), violations) == (1, [])
    (folder,) = (root / BASE).iterdir()
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found, violations = retained(root, "run")
    assert not found
    assert [(v.kind, "digest of" in v.detail) for v in violations] == [(ViolationKind.CHECKPOINT, True)]
    shutil.rmtree(folder)
    assert "missing" in retained(root, "run")[1][0].detail or "No such" in retained(root, "run")[1][0].detail
