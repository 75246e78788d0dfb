"""Adapters are served beside the base that the engine holds; the base is part of what weights are."""

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
from safetensors.numpy import save_file
from sgl_jax.srt.layers.linear import LinearBase

from services.rollout.engines.arrays.arrival import Arrival
from services.rollout.engines.sglang_jax.loading.checksum import checksum
from services.rollout.engines.sglang_jax.loading.layout import to_engine
from services.rollout.engines.sglang_jax.loading.staging import HeldBase, LoadedArrays, load_leaves
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.checkpoint import examine
from services.rollout.weights.updater import WeightUpdater
from shared.errors import Forbidden, WeightsError
from shared.models.adapter import a_name, b_name, weights_of
from shared.models.config import ModelConfig
from shared.models.weight_files import UNMERGED
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


def runner() -> SimpleNamespace:
    """Runner with the names and shapes of an engine's weights, and their layers, for `load_leaves`."""
    names = {"model.embed_tokens.embedding": (8, 8), "lm_head.embedding": (8, 8), "model.norm.scale": (8,)}
    layer = SimpleNamespace(self_attn=SimpleNamespace(), mlp=SimpleNamespace())
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    for tensor, value in WEIGHTS.items():
        if tensor.startswith("model.layers"):
            shape = value.T.shape if value.ndim == 2 else value.shape
            names[tensor.removesuffix(".weight") + (".weight" if value.ndim == 2 else ".scale")] = shape
            part, name = tensor.split(".")[3:5]
            if value.ndim == 2:
                with jax.set_mesh(mesh):
                    linear = LinearBase(
                        *shape, mesh, use_bias=False, params_dtype=jnp.float32, kernel_axes=(None, None)
                    )
                setattr(getattr(layer, part), name, linear)
    leaves, tree = jax.tree.flatten({name: jnp.zeros(shape) for name, shape in names.items()})
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer]))
    return SimpleNamespace(
        model=model, model_state_leaves=leaves, _model_state_def=tree, model_config=SimpleNamespace(head_dim=4)
    )


def load(weights: StagedWeights, base: HeldBase | None = None) -> LoadedArrays:
    found = load_leaves(runner(), weights, Arrival(lambda: None, is_complete=True), base)
    assert found.checksum == checksum(found.weights.arrays)
    return found


def names_of(one: SimpleNamespace) -> list[str]:
    return list(jax.tree.unflatten(one._model_state_def, one.model_state_leaves))


def test_the_engine_loads_the_base_once_and_adapters_beside_it(tmp_path: Path) -> None:
    folder, adapter = first(tmp_path)
    again = models.random_adapter(CONFIG, 2)
    second = models.write_adapter(tmp_path, "e000001-s000002", CONFIG, again, adapter)
    one, base = examine(folder, MODEL, "test"), None
    as_hf = {k: lambda v=v: v for k, v in WEIGHTS.items()}
    shapes = {name: value.shape for name, value in zip(names_of(runner()), runner().model_state_leaves, strict=True)}
    expected = dict(to_engine(as_hf, shapes, 4))
    for checkpoint, tree in ((folder, models.random_adapter(CONFIG, 1)), (second, again)):
        found = load(examine(checkpoint, MODEL, "test"), base)
        assert base is None or found.weights.leaves is base.leaves
        base = found.base
        shutil.rmtree(adapter.base.folder(tmp_path) / "params", ignore_errors=True)  # it is not read a second time
        for name, value in zip(sorted(names_of(runner())), found.weights.leaves, strict=True):
            np.testing.assert_array_equal(value, expected[name])
        for name in weights_of(tree):
            a, b, scale = found.weights.adapters[
                f"model.{name.replace('.attn.', '.self_attn.').rpartition('.')[0]}.weight"
            ]
            np.testing.assert_array_equal(a, tree[a_name(name)].reshape(-1, 2))
            np.testing.assert_array_equal(b, tree[b_name(name)].reshape(2, -1))
            assert scale == 2
    with pytest.raises(WeightsError, match=r"missing|No such file"):
        load(one)


def test_a_base_that_lost_a_bit_is_loaded_again(tmp_path: Path) -> None:
    folder, _ = first(tmp_path)
    held = load(examine(folder, MODEL, "test")).base
    assert held is not None
    flipped = [held.leaves[0].at[0].add(1), *held.leaves[1:]]
    again = load(examine(folder, MODEL, "test"), held._replace(leaves=flipped)).base
    assert again is not None
    assert again.checksum == held.checksum


def write_unmerged(folder: Path, tree: models.Weights, **given: np.ndarray) -> StagedWeights:
    models.write_hf(folder, CONFIG, WEIGHTS)
    save_file({**tree, **given}, folder / UNMERGED)
    return examine(folder, MODEL, "test", "t-1")


def test_adapters_in_a_hugging_face_folder_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint, _ = first(tmp_path)
    tree, scale = models.random_adapter(CONFIG, 1), np.float32(2)
    found, expected = load(write_unmerged(tmp_path / "hf", tree, scale=scale)), load(examine(checkpoint, MODEL, "test"))
    assert found.checksum == expected.checksum
    assert found.weights.adapters.keys() == expected.weights.adapters.keys()
    jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)
    models.write_hf(tmp_path / "base", CONFIG, WEIGHTS)
    assert load(examine(tmp_path / "base", MODEL, "test")).weights.adapters == {}
    with pytest.raises(WeightsError, match="has no number scale"):
        load(write_unmerged(tmp_path / "hf", tree))


def test_adapters_in_a_hugging_face_folder_are_part_of_its_digest_and_lie_in_it(tmp_path: Path) -> None:
    tree = models.random_adapter(CONFIG, 1)
    digest = write_unmerged(tmp_path / "hf", tree, scale=np.float32(2)).digest
    file = tmp_path / "hf" / UNMERGED
    file.rename(tmp_path / "elsewhere")
    assert examine(tmp_path / "hf", MODEL, "test", "t-1").digest != digest
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Forbidden):
        examine(tmp_path / "hf", MODEL, "test", "t-1")


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
    with pytest.raises((WeightsError, ValueError), match=r"not an adapter|half of an adapter"):
        load(examine(folder, MODEL, "test"))


def test_a_damaged_base_is_refused(tmp_path: Path) -> None:
    folder, adapter = first(tmp_path)
    file = max(adapter.base.folder(tmp_path).rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError, match="digest of"):
        load(examine(folder, MODEL, "test"))


async def test_adapters_of_another_base_are_refused_until_the_run_is_begun_anew(tmp_path: Path) -> None:
    engine = FakeEngine()
    updates = WeightUpdater(engine, tmp_path, MODEL, "test")
    folder, adapter = first(tmp_path)
    await updates.update(str(folder), None)
    other, theirs = first(tmp_path, "e000001-s000002", seed=5)
    assert theirs.base.digest != adapter.base.digest
    with pytest.raises(
        WeightsError, match=f"builds on base {theirs.base.digest}, but this server has {adapter.base.digest}"
    ):
        await updates.update(str(other), None)
    full = models.write_checkpoint(tmp_path, "e000001-s000003", CONFIG, WEIGHTS)
    with pytest.raises(WeightsError, match="builds on base nothing"):
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
    with pytest.raises(WeightsError, match="which is missing in"):
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
            load_leaves(engine, weights, Arrival(lambda: None, is_complete=True))
            pytest.fail("it was loaded")
        assert len(jax.live_arrays()) <= before
    finally:
        gc.enable()
