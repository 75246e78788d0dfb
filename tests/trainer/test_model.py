"""Loading, sharding and forward pass against the float64 numpy reference."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.batches.batch import Batch, BatchLayout, micro_batches, row_weights
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import Scorer, objective, params_of
from services.trainer.learner.train_step import Learner
from services.trainer.models import construction, family
from services.trainer.models.initial_weights import leaves_of, random_leaves
from shared.algorithm_schema import GrpoSection
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.names import hf_name
from tests.support import decoder_reference, models
from tests.trainer.support import CONFIG, model_of, rows, write_shards

WEIGHTS = models.random_weights(CONFIG, seed=2)
ONE_LAYER = CONFIG | {"num_hidden_layers": 1}
OPTIMIZER = OptimizerOptions(1e-2, "constant", 0, 10, 0.9, 0.95, 0.0, 1.0)
LOSS = algorithm(GrpoSection(), 1, 16).loss


def load(folder: Path, mesh: jax.sharding.Mesh, **options) -> family.Model:
    shape = ModelConfig.read(folder)
    return family.build(shape, leaves_of(folder, shape, seed=0), mesh, **({"dtype": "float32"} | options))


def mesh(*shape: int) -> jax.sharding.Mesh:
    return family.make_mesh(shape, ("fsdp", "tp"))


def learner(model: family.Model) -> Learner:
    return Learner(params_of(model), make_optimizer(OPTIMIZER), objective(model, LOSS, 1.0))


def logprobs(model: family.Model, batch: Batch) -> np.ndarray:
    return Scorer(model, 1.0).logprobs(params_of(model), batch)


def expected(weights: models.Weights, config: dict, ids: np.ndarray) -> np.ndarray:
    table = decoder_reference.log_softmax(decoder_reference.logits(weights, config, ids))
    return table[np.arange(len(ids) - 1), ids[1:]]


def batches(n_micro: int = 1):
    some = rows(4)
    return some, micro_batches(some, row_weights(some, "token-mean", 1), BatchLayout((32,), 4 // n_micro, 0), n_micro)


def test_two_shards_on_a_2x2_mesh_equal_the_reference(tmp_path: Path):
    folder = write_shards(tmp_path / "hf", CONFIG, WEIGHTS)
    model = load(folder, mesh(2, 2))
    query = model.layers[0].attn.q_proj.w.get_value()
    assert query.sharding.spec == jax.sharding.PartitionSpec("fsdp", "tp", None)
    assert query.addressable_shards[0].data.size * 4 == query.size
    some, (batch,) = batches()
    found = logprobs(model, batch)
    for i, row in enumerate(sorted(some, key=lambda r: -len(r.ids))):
        np.testing.assert_allclose(found[i, : len(row.ids) - 1], expected(WEIGHTS, CONFIG, row.ids), atol=2e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e6},
        {"tie_word_embeddings": True},
        {"rope_theta": 1e6, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3},
    ],
)
def test_architecture_variants_equal_the_reference(overrides: dict):
    config = CONFIG | overrides
    weights = models.random_weights(config, seed=3)
    some, (batch,) = batches()
    found = logprobs(model_of(weights, config), batch)
    longest = max(some, key=lambda r: len(r.ids))
    np.testing.assert_allclose(found[0, : len(longest.ids) - 1], expected(weights, config, longest.ids), atol=2e-5)


def test_the_rope_defect_is_real_and_tunix_is_left_alone():
    """Tunix's own forward ignores rope_theta; ours does not, and patches nothing. When this fails, the work-around can
    go.
    """
    original = construction.qwen3.apply_rope
    ids = jax.numpy.arange(1, 25)[None]
    positions, causal = jax.numpy.arange(24)[None], jax.numpy.tril(jax.numpy.ones((24, 24), bool))[None]
    logits = [
        model_of(WEIGHTS, CONFIG | {"rope_theta": theta})(ids, positions, None, causal)[0] for theta in (1e4, 1e6)
    ]
    assert bool((logits[0] == logits[1]).all())
    assert construction.qwen3.apply_rope is original


def test_accumulated_step_equals_the_whole_batch_and_reports_the_whole_norm():
    whole, parts = (learner(model_of(WEIGHTS, ONE_LAYER)) for _ in range(2))
    a, b = whole.update(batches(1)[1]), parts.update(batches(2)[1])
    assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-4)
    assert a.statistics == pytest.approx(b.statistics, rel=1e-4)
    for name, value in whole.params.items():
        np.testing.assert_allclose(value, parts.params[name], atol=2e-4)


@pytest.mark.parametrize("remat", ["block", pytest.param("decoder", marks=pytest.mark.long)])
def test_rematerialization_changes_nothing(remat: str):
    _, (batch,) = batches()
    plain, remade = (learner(model_of(WEIGHTS, ONE_LAYER, remat=r)).update([batch]) for r in ("none", remat))
    assert (plain.loss, plain.grad_norm) == pytest.approx((remade.loss, remade.grad_norm), rel=1e-5)


def test_bfloat16_checkpoints_load_and_bfloat16_activations_stay_close(tmp_path: Path):
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in WEIGHTS.items()}
    model = load(models.write_hf(tmp_path / "hf", CONFIG, rounded), mesh(1, 1), dtype="bfloat16")
    assert {v.dtype.name for v in params_of(model).values()} == {"float32"}
    some, (batch,) = batches()
    found = logprobs(model, batch)
    longest = max(some, key=lambda r: len(r.ids))
    exact = expected({k: v.astype(np.float32) for k, v in rounded.items()}, CONFIG, longest.ids)
    assert np.abs(found[0, : len(exact)] - exact).max() < 0.3


def test_random_weights_depend_on_seed_and_name_only():
    shape = ModelConfig.parse(CONFIG)
    a, b, c = (random_leaves(shape, seed) for seed in (1, 1, 2))
    name, size = "layers.1.mlp.down_proj.kernel", (64, 32)
    assert np.array_equal(a(name, size), b(name, size))
    assert not np.array_equal(a(name, size), c(name, size))
    assert a(name, size).std() == pytest.approx(0.02 / 2, rel=0.1)
    assert (a("layers.0.attn.q_norm.w", (16,)) == 1).all()


def test_leaf_names_cover_the_model():
    names = {hf_name(name) for name in params_of(model_of(WEIGHTS, CONFIG))}
    assert names == WEIGHTS.keys()


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    lacking = {k: v for k, v in WEIGHTS.items() if "1.mlp.up_proj" not in k}
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(models.write_hf(tmp_path / "a", CONFIG, lacking), mesh(1, 1))
    wrong = WEIGHTS | {"model.norm.weight": np.ones(33, np.float32)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \[33\]"):
        load(models.write_hf(tmp_path / "b", CONFIG, wrong), mesh(1, 1))


def test_an_incomplete_download_is_named(tmp_path: Path):
    folder = write_shards(tmp_path / "hf", CONFIG, WEIGHTS)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002"):
        load(folder, mesh(1, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
    ],
)
def test_what_is_not_computed_here_is_refused(change: dict):
    with pytest.raises(ConfigError, match=next(iter(change)).replace("rope_scaling", "rope_type")):
        ModelConfig.parse(CONFIG | change)


def test_bad_meshes_and_folders_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="needs 64 devices"):
        mesh(8, 8)
    with pytest.raises(ConfigError, match="does not divide over tp=4"):
        model_of(WEIGHTS, CONFIG, mesh(1, 4))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str):
    folder = write_shards(tmp_path / "hf", CONFIG, WEIGHTS)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is no index of tensors"):
        leaves_of(folder, ModelConfig.parse(CONFIG), 0)
