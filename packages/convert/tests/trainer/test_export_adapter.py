"""Adapters of a run as a folder of full weights, and as PEFT's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from transformers import AutoConfig

from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.models import family
from services.trainer.models.arrays import CheckpointContents
from services.trainer.models.lora import LoraOptions
from shared.errors import ConfigError
from shared.models.adapter import is_adapter, is_b
from shared.models.config import ModelConfig
from shared.run import trust
from shared.run.checkpoint_files import BASE, Adapter
from shared.run.folder import RunFolder
from shared.run.state import initial_state
from shared.schema import Projection
from shared.types import WeightVersion
from tests.support import families, models
from tests.support.torch_client import Torch
from volley_convert import export
from volley_proof.verify.checkpoints import retained
from volley_proof.verify.violation import ViolationKind

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, head_dim=4)
WEIGHTS = models.random_weights(CONFIG, 0)


def make_run(
    folder: Path,
    written: dict = CONFIG,
    weights: models.Weights = WEIGHTS,
    params: models.Weights | None = None,
    *,
    full: bool = False,
) -> Path:
    """A run's folder with one version, of adapters (`params`, or some), or of full weights."""
    model, run = models.write_hf(folder / "model", written, weights), folder / "run"
    config = ModelConfig.parse(written).to_hf()
    checkpoints = CheckpointFolders(run / "checkpoints", "run", 3, OrbaxArrays())
    checkpoints.fence(1)
    base = checkpoints.save_base(WeightVersion(1, 0), models.to_tunix(weights, config))
    adapter, params = Adapter(2, 8.0, base), params or models.random_adapter(config, 1)
    contents = CheckpointContents(params, {"count": np.zeros((), np.int32)}, None, config, None, adapter)
    if full:
        contents = replace(contents, params=models.to_tunix(weights, config), adapter=None)
    checkpoints.save(initial_state(0).starting_epoch(1, keep_reference=False), contents, None)
    settings = {"run": {"name": "run", "dir": str(folder)}, "model": {"path": str(model)}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings | {"data": {"env": "frozen_lake"}}), encoding="utf-8")
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


@pytest.mark.parametrize("name", families.NAMES)
def test_every_export_is_the_same_model_to_transformers_and_peft(name: str, torch: Torch, tmp_path: Path) -> None:
    """Every tensor has its place, and log-probabilities are the fixture's, or those of base and adapters."""
    case, rng = families.case(name), np.random.default_rng(2)
    lora = LoraOptions(2, 8.0, get_args(Projection))
    mesh = family.make_mesh((1, 1), ("fsdp", "tp"))
    _, state = family.abstract(ModelConfig.parse(case.written), "float32", "none", mesh, lora)
    shapes = {family.leaf_name(path): variable.get_value().shape for path, variable in state.flat_state()}
    adapters = {leaf: rng.normal(0, 0.1, s).astype(np.float32) for leaf, s in shapes.items() if is_adapter(leaf)}
    found = {}
    for kind in ("full", "merged", "adapter"):
        folder = tmp_path / kind
        run = make_run(folder, case.written, case.weights, adapters, full=kind == "full")
        export.export(run, folder / "out", "latest", adapter_only=kind == "adapter")
        found[kind] = torch.ask("exported", folder=str(folder / "out"), ids=case.ids.tolist())["logprobs"]
    np.testing.assert_allclose(found["full"], case.logprobs, atol=1e-5)
    np.testing.assert_allclose(found["merged"], found["adapter"], atol=1e-5)
    assert np.abs(found["adapter"] - found["full"]).max() > 0.01


def test_a_merged_export_of_a_bfloat16_run_keeps_a_change_that_bfloat16_would_lose(
    torch: Torch, tmp_path: Path
) -> None:
    case = families.case("llama-tied")
    weights = {name: value.astype(ml_dtypes.bfloat16) for name, value in case.weights.items()}
    adapters = models.random_adapter(case.config, 1)
    adapters = {leaf: value * (0.002 if is_b(leaf) else 1) for leaf, value in adapters.items()}
    folders = {kind: tmp_path / kind for kind in ("merged", "rounded", "adapter")}
    run = make_run(tmp_path, case.written, weights, adapters)
    told = export.export(run, folders["merged"], "latest")
    assert "load the folder in float32" in told["note"]
    assert str(AutoConfig.from_pretrained(folders["merged"]).dtype).endswith("float32")
    assert "note" not in export.export(run, folders["adapter"], "latest", adapter_only=True)
    merged = load_file(folders["merged"] / "model.safetensors")
    models.write_hf(folders["rounded"], case.written, {k: v.astype(ml_dtypes.bfloat16) for k, v in merged.items()})
    found = {k: torch.ask("exported", folder=str(f), ids=case.ids.tolist())["logprobs"] for k, f in folders.items()}
    apart = {kind: np.abs(one - found["adapter"]).max() for kind, one in found.items()}
    assert apart["merged"] < 1e-5 < 1e-3 < apart["rounded"]


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
