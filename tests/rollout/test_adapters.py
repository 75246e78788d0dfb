"""Adapters are served merged into the base that the server holds; the base is part of what weights are."""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.arrays.opening import BaseCache
from services.rollout.engines.sglang_jax.loading.checksum import checksum
from services.rollout.engines.sglang_jax.loading.layout import hugging_face, to_engine
from services.rollout.engines.sglang_jax.loading.staging import load_leaves
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Forbidden, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import Adapter
from tests.support import models
from tests.support.engine import FakeEngine

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8, head_dim=4)
MODEL = ModelConfig.parse(CONFIG)
WEIGHTS = models.random_weights(CONFIG, 0)


def first(root: Path, version: str = "e000001-s000001", seed: int = 0) -> tuple[Path, Adapter]:
    """An adapter with a base of its own."""
    adapter = Adapter(2, 4.0, models.write_base(root, CONFIG, models.random_weights(CONFIG, seed)))
    return models.write_adapter(root, version, CONFIG, models.random_adapter(CONFIG, 1), adapter), adapter


def effective(config: dict, weights: models.Weights, tree: models.Weights, scale: float) -> models.Weights:
    """Float64 under Hugging Face's names."""
    found = {name: value.astype(np.float64) for name, value in models.to_tunix(weights, config).items()}
    for name in tree:
        if name.endswith("_lora_a"):
            a, b = tree[name].astype(np.float64), tree[f"{name[:-1]}b"].astype(np.float64)
            flat = a.reshape(-1, a.shape[-1]) @ b.reshape(b.shape[0], -1)
            found[name.removesuffix("_lora_a")] += scale * flat.reshape(found[name.removesuffix("_lora_a")].shape)
    return {name: read() for name, read in hugging_face({k: lambda v=v: v for k, v in found.items()}).items()}


def runner() -> SimpleNamespace:
    """What `load_leaves` knows of the engine: the names and shapes of its weights."""
    names = {"model.embed_tokens.embedding": (8, 8), "lm_head.embedding": (8, 8), "model.norm.scale": (8,)}
    for tensor, value in WEIGHTS.items():
        if tensor.startswith("model.layers"):
            shape = value.T.shape if value.ndim == 2 else value.shape
            names[tensor.removesuffix(".weight") + (".weight" if value.ndim == 2 else ".scale")] = shape
    leaves, tree = jax.tree.flatten({name: jnp.zeros(shape) for name, shape in names.items()})
    model = SimpleNamespace(head_dim=4)
    return SimpleNamespace(model_state_leaves=leaves, _model_state_def=tree, model_config=model)


def load(weights: StagedWeights, bases: BaseCache) -> dict[str, np.ndarray]:
    leaves, found, _ = load_leaves(runner(), weights, Arrival(lambda: None, is_complete=True), bases)
    assert found == checksum(leaves)
    return {name: np.asarray(v) for name, v in zip(sorted(names_of(runner())), leaves, strict=True)}


def names_of(one: SimpleNamespace) -> list[str]:
    return list(jax.tree.unflatten(one._model_state_def, one.model_state_leaves))


def test_the_engine_loads_the_base_once_and_every_adapter_into_it(tmp_path: Path) -> None:
    folder, adapter = first(tmp_path)
    again = models.random_adapter(CONFIG, 2)
    second = models.write_adapter(tmp_path, "e000001-s000002", CONFIG, again, adapter)
    bases, one = BaseCache(), examine(folder, MODEL, "test")
    shapes = {name: value.shape for name, value in zip(names_of(runner()), runner().model_state_leaves, strict=True)}
    for checkpoint, tree in ((folder, models.random_adapter(CONFIG, 1)), (second, again)):
        found = load(examine(checkpoint, MODEL, "test"), bases)
        shutil.rmtree(adapter.base.folder(tmp_path) / "params", ignore_errors=True)  # it is not read a second time
        as_hf = {k: lambda v=v: v for k, v in effective(CONFIG, WEIGHTS, tree, 2.0).items()}
        for name, expected in to_engine(as_hf, shapes, 4):
            np.testing.assert_allclose(found[name], expected, atol=1e-6)
    with pytest.raises(WeightsError, match=r"missing|No such file"):
        load(one, BaseCache())


@pytest.mark.parametrize("lie", ["half", "shape", "base"])
def test_adapters_that_do_not_fit_are_refused(lie: str, tmp_path: Path) -> None:
    _, adapter = first(tmp_path)
    tree = models.random_adapter(CONFIG, 1)
    name = "layers.0.mlp.up_proj.kernel_lora_a"
    if lie == "half":
        del tree[name]
    elif lie == "shape":
        tree[name] = np.zeros((8, 3), np.float32)
    else:
        tree["layers.7.mlp.up_proj.kernel_lora_a"] = tree["layers.7.mlp.up_proj.kernel_lora_b"] = tree[name]
    folder = models.write_adapter(tmp_path, "e000001-s000002", CONFIG, tree, adapter)
    with pytest.raises((WeightsError, ValueError), match=r"not an adapter"):
        load(examine(folder, MODEL, "test"), BaseCache())


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    folder, adapter = first(tmp_path)
    file = max(adapter.base.folder(tmp_path).rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match="digest of"):
        load(examine(folder, MODEL, "test"), BaseCache())


async def test_adapters_of_another_base_are_refused_until_the_run_is_begun_anew(tmp_path: Path) -> None:
    engine = FakeEngine()
    updates = WeightUpdater(engine, tmp_path, MODEL, "test")
    folder, adapter = first(tmp_path)
    await updates.update(str(folder), None)
    other, theirs = first(tmp_path, "e000001-s000002", seed=5)
    assert theirs.base.digest != adapter.base.digest
    with pytest.raises(WeightsError, match=f"of the base {theirs.base.digest}, this server's is {adapter.base.digest}"):
        await updates.update(str(other), None)
    full = models.write_checkpoint(tmp_path, "e000001-s000003", CONFIG, WEIGHTS)
    with pytest.raises(WeightsError, match="of the base nothing"):
        await updates.update(str(full), None)
    assert updates.current == "e000001-s000001"
    for gone in (folder, other, full):
        shutil.rmtree(gone)
    models.write_adapter(tmp_path, "e000001-s000000", CONFIG, models.random_adapter(CONFIG, 3), theirs)
    await updates.catch_up()
    assert updates.current == "e000001-s000000"


def test_the_digest_is_of_base_and_adapter(tmp_path: Path) -> None:
    folder, _ = first(tmp_path)
    digest = examine(folder, MODEL, "test").digest
    other, _ = first(tmp_path / "other", seed=5)
    assert examine(other, MODEL, "test").digest != digest


def test_a_base_elsewhere_is_not_read(tmp_path: Path) -> None:
    folder, adapter = first(tmp_path / "root")
    where = adapter.base.folder(tmp_path / "root")
    where.rename(tmp_path / "outside")
    with pytest.raises(WeightsError, match="which is not in"):
        examine(folder, MODEL, "test")
    os.symlink(tmp_path / "outside", where)
    with pytest.raises(Forbidden):
        examine(folder, MODEL, "test")


def test_a_load_that_fails_leaves_no_arrays_to_the_garbage_collection(tmp_path: Path) -> None:
    folder, _ = first(tmp_path)
    weights, engine = examine(folder, MODEL, "test"), runner()
    engine.model_state_leaves[sorted(names_of(engine)).index("lm_head.embedding")] = jnp.zeros((8, 4))
    before = len(jax.live_arrays())
    gc.collect()
    gc.disable()
    try:
        with suppress(WeightsError):
            load_leaves(engine, weights, Arrival(lambda: None, is_complete=True), BaseCache())
            pytest.fail("it was loaded")
        assert len(jax.live_arrays()) <= before
    finally:
        gc.enable()
