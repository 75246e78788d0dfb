"""Staged weights as a Hugging Face folder: names, orientation and values of every kind of checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine
from shared.errors import WeightsError
from shared.models.config import ModelConfig
from shared.models.weight_files import INDEX
from shared.run.checkpoint_files import Adapter
from tests.support import models
from volley_engines import model_folder
from volley_engines.merging import BaseCache

V1, V2 = "e000001-s000001", "e000001-s000002"
DENSE = models.tiny_config(num_hidden_layers=2, hidden_size=16, intermediate_size=16, vocab_size=32)
EXPERTS = models.tiny_config(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    num_hidden_layers=1,
    hidden_size=16,
    vocab_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


def written(folder: Path, config: dict[str, Any], found: Path) -> tuple[dict[str, np.ndarray], frozenset[str]]:
    models.write_hf(folder / "model", config)
    staged = examine(found, ModelConfig.parse(config), "test")
    names, _ = write(folder, staged)
    tensors = [load_file(file) for file in sorted((folder / "out").glob("*.safetensors"))]
    return {name: value for one in tensors for name, value in one.items()}, names


def write(folder: Path, staged: StagedWeights) -> tuple[frozenset[str], dict[str, float]]:
    arrival = Arrival(lambda: None, is_complete=True)
    return model_folder.write(staged, folder / "model", folder / "out", arrival, BaseCache())


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_tensors_are_those_that_transformers_names(tmp_path: Path, config: dict[str, Any]):
    weights = models.random_weights(config, 1)
    found, names = written(tmp_path, config, models.write_checkpoint(tmp_path / "c", V1, config, weights))
    assert found.keys() == weights.keys() == names
    assert all(np.array_equal(found[name], value) for name, value in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")) == config


def test_shards_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 2000)
    weights = models.random_weights(DENSE, 1)
    found, _ = written(tmp_path, DENSE, models.write_checkpoint(tmp_path / "c", V1, DENSE, weights))
    assert found.keys() == weights.keys()
    index = json.loads((tmp_path / "out" / INDEX).read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == weights.keys()
    assert len({*index["weight_map"].values()}) > 1
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / shard)


def test_adapters_are_merged_into_their_base(tmp_path: Path):
    root, weights, adapters = tmp_path / "c", models.random_weights(DENSE, 1), models.random_adapter(DENSE, 2)
    root.mkdir()
    adapter = Adapter(2, 4.0, models.write_base(root, DENSE, weights))
    found, _ = written(tmp_path, DENSE, models.write_adapter(root, V1, DENSE, adapters, adapter))
    assert found.keys() == weights.keys()
    a, b = (adapters[f"layers.0.mlp.up_proj.kernel_lora_{half}"].astype(np.float64) for half in "ab")
    name = "model.layers.0.mlp.up_proj.weight"
    assert found[name] == pytest.approx(weights[name] + 2.0 * (a @ b).T, abs=1e-5)
    assert np.array_equal(found["model.norm.weight"], weights["model.norm.weight"])


def test_damaged_weights_leave_no_folder(tmp_path: Path):
    models.write_hf(tmp_path / "model", DENSE)
    where = models.write_checkpoint(tmp_path / "c", V1, DENSE, models.random_weights(DENSE, 1))
    staged = examine(where, ModelConfig.parse(DENSE), "test")
    largest = max(
        (file for file in (where / "params").rglob("*") if file.is_file()), key=lambda one: one.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError):
        write(tmp_path, staged)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "model"]
