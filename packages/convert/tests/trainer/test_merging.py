"""PEFT's adapters merged into their base, against PEFT."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file, save_file

from shared.models import adapter
from shared.models.weight_files import ADAPTER, ADAPTER_WEIGHTS
from tests.support import families, models
from tests.support.torch_client import Torch
from tests.trainer.test_families import load, logprobs
from volley_convert import merging

CASE = families.case("llama-scaled")
RANK = 2
SMALLER = {
    name: value * np.float32(0.2 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1)
    for name, value in CASE.weights.items()
}
"""Log-probabilities of a trained model's size, which float32 holds to 1e-6."""


def adapters_of(folder: Path, base: str, weights: models.Weights | None = None, **changes: Any) -> Path:
    """PEFT's folder of adapters of every projection."""
    folder.mkdir()
    tensors = dict(adapter.peft(*item) for item in models.random_adapter(CASE.config, 1, RANK).items())
    save_file(weights or tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": 2,
    }
    (folder / ADAPTER).write_text(json.dumps(config | {"target_modules": targets} | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1, "1.mlp.up_proj": 4}}], ids=repr
)
def test_the_merged_model_is_that_of_peft(changes: dict[str, Any], torch: Torch, tmp_path: Path) -> None:
    base = models.write_hf(tmp_path / "base", CASE.written, SMALLER)
    adapters = adapters_of(tmp_path / "adapters", str(base), **changes)
    folder = tmp_path / "merged"
    assert merging.merge(adapters, folder) == base
    known = torch.ask("exported", folder=str(adapters), ids=CASE.ids.tolist())["logprobs"]
    np.testing.assert_allclose(logprobs(load(folder), CASE.ids), known, atol=5e-6)
    assert np.abs(known - logprobs(load(base), CASE.ids)).max() > 0.01


def test_only_merged_weights_are_float32_and_the_tokenizer_is_that_of_the_adapters(tmp_path: Path) -> None:
    weights = {name: value.astype(ml_dtypes.bfloat16) for name, value in CASE.weights.items()}
    base = models.write_hf(tmp_path / "base", CASE.written, weights)
    (base / "tokenizer.json").write_text("base", encoding="utf-8")
    adapters = adapters_of(tmp_path / "adapters", "base")
    (adapters / "tokenizer.json").write_text("own", encoding="utf-8")
    (adapters / "base").symlink_to(base)
    merging.merge(adapters, folder := tmp_path / "merged")
    dtypes = {name: value.dtype.name for name, value in load_file(folder / "model.safetensors").items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        name for name in weights if "_proj" in name
    }
    assert orjson.loads((folder / "config.json").read_bytes())["torch_dtype"] == "float32"
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == "own"


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
SHAPE = CASE.weights["model.layers.0.self_attn.q_proj.weight"].shape


@pytest.mark.parametrize(
    ("tensors", "changes", "said"),
    [
        (
            {A: (RANK, 5), B: (SHAPE[0], RANK)},
            {},
            rf"\[{SHAPE[0]}, 2\] and \[2, 5\] are not .* \[{SHAPE[0]}, {SHAPE[1]}\]",
        ),
        ({A: (3, SHAPE[1]), B: (SHAPE[0], 3)}, {}, "have the rank 3, but adapter_config.json says 2"),
        ({A: (RANK, SHAPE[1])}, {}, "lacks lora_A or lora_B of model.layers.0.self_attn.q_proj"),
        (
            {one.replace("layers.0", "layers.9"): (RANK, RANK) for one in (A, B)},
            {},
            "adapts model.layers.9.self_attn.q_proj, which its base .* does not have",
        ),
        ({"base_model.model.lm_head.weight": (2, 2)}, {}, "holds base_model.model.lm_head.weight, which is no adapter"),
        (None, {"use_dora": True}, "use_dora=True is not merged"),
        (None, {"peft_type": "IA3"}, "peft_type='IA3' is not merged"),
        (None, {"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        (None, {"base_model_name_or_path": "/nowhere"}, "the base /nowhere of .* is not here"),
    ],
)
def test_adapters_of_another_base_or_kind_are_refused(
    tensors: dict[str, tuple[int, ...]] | None,
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = models.write_hf(tmp_path / "base", CASE.written, CASE.weights)
    weights = tensors and {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    adapters = adapters_of(tmp_path / "adapters", str(base), weights, **changes)
    assert merging.main([str(adapters), str(tmp_path / "merged")]) == 2
    assert not (tmp_path / "merged").exists()
    assert re.search(said, orjson.loads(capsys.readouterr().out)["detail"])
