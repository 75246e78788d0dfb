"""Every family in the trainer, against the log-probabilities of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from services.trainer.batches.batch import BatchLayout, Row, micro_batches, row_weights
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import Scorer, objective, params_of
from services.trainer.learner.train_step import Learner
from services.trainer.models import family
from services.trainer.models.initial_weights import leaves_of, random_leaves
from services.trainer.models.lora import LoraOptions
from shared.errors import ConfigError
from shared.models import names
from shared.models.config import ModelConfig
from tests.support import decoder_reference, families, imaginary_family, models
from volley_supervised.learner.imitation import supervised_loss

OPTIMIZER = OptimizerOptions(1e-2, "constant", 0, 10, 0.9, 0.95, 0.0, 1.0)


def load(folder: Path, dtype: str = "float32", mesh: tuple[int, int] = (1, 1), *, random: bool = False) -> family.Model:
    described = ModelConfig.read(folder)
    leaves = leaves_of(folder, described, seed=0, random=random)
    return family.build(described, leaves, family.make_mesh(mesh, ("fsdp", "tp")), dtype=dtype)


def rows_of(ids: np.ndarray) -> list[Row]:
    ones = np.ones(len(ids), np.uint8)
    return [Row(ids, ones, np.zeros(len(ids), np.float32), ones, np.zeros(len(ids)))]


def logprobs(model: family.Model, ids: np.ndarray) -> np.ndarray:
    """float32 [n - 1]; two rows, for a mesh that divides them."""
    batch = micro_batches(2 * rows_of(ids), np.ones(2), BatchLayout((48,), 2, 0), 1)[0]
    return Scorer(model, 1.0).logprobs(params_of(model), batch)[0, : len(ids) - 1]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama-scaled", "qwen3-moe", "gemma2") else pytest.param(name, marks=pytest.mark.long)
        for name in families.NAMES
    ],
)
def test_the_trainer_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    case = families.case(name)
    folder = models.write_hf(tmp_path / "hf", case.written, case.weights)
    model = load(folder)
    np.testing.assert_allclose(logprobs(model, case.ids), case.logprobs, atol=1e-5)
    named = {(names.of_expert(name) or (name,))[0] for name in case.weights}
    assert {names.hf_name(leaf) for leaf in params_of(model)} == named


@pytest.mark.parametrize(
    "name", [name if name == "deepseek-v3" else pytest.param(name, marks=pytest.mark.long) for name in families.NAMES]
)
def test_gradients_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """By the norm of each tensor's gradient; DeepSeek's bias of experts is no parameter in torch."""
    case = families.case(name)
    model, rows = load(models.write_hf(tmp_path / "hf", case.written, case.weights)), rows_of(case.ids)
    batch = micro_batches(rows, row_weights(rows, "token-mean", 1), BatchLayout((48,), 1, 0), 1)[0]
    gradient = jax.jit(jax.grad(lambda params: objective(model, supervised_loss, 1.0)(params, batch)[0]))
    found = {
        name: float(np.linalg.norm(part))
        for leaf, value in gradient(params_of(model)).items()
        for name, part in names.to_files(leaf, np.asarray(value)).items()
        if not leaf.endswith("router_bias")
    }
    assert found.keys() == case.gradient_norms.keys()
    for key, norm in case.gradient_norms.items():
        assert found[key] == pytest.approx(norm, rel=2e-4, abs=1e-6), key


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma2"])
def test_activations_in_bfloat16_stay_close(name: str, tmp_path: Path) -> None:
    case = families.case(name)
    found = logprobs(load(models.write_hf(tmp_path / "hf", case.written, case.weights), "bfloat16"), case.ids)
    assert 1e-4 < np.abs(found - case.logprobs).max() < 0.3


def test_biases_are_sharded_with_their_heads(tmp_path: Path) -> None:
    case = families.case("qwen2")
    model = load(models.write_hf(tmp_path / "hf", case.written, case.weights), mesh=(2, 2))
    assert model.layers[0].attn.q_bias.get_value().sharding.spec == jax.sharding.PartitionSpec("tp")
    np.testing.assert_allclose(logprobs(model, case.ids), case.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama-tied", "qwen3-moe", "gemma2", "gemma3")),
        "qwen2",
    ],
)
def test_a_step_changes_every_parameter_and_no_bias_appears(name: str, tmp_path: Path) -> None:
    case = families.case(name)
    model = load(models.write_hf(tmp_path / "hf", case.written, case.weights))
    learner = Learner(params_of(model), make_optimizer(OPTIMIZER), objective(model, supervised_loss, 1.0))
    rows = rows_of(case.ids)
    before = {leaf: np.asarray(value) for leaf, value in learner.params.items()}
    batches = micro_batches(rows, row_weights(rows, "token-mean", 1), BatchLayout((48,), 1, 0), 1)
    first = learner.update(batches)
    assert first.loss == pytest.approx(-case.logprobs.mean(), rel=1e-4)
    after = learner.params
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[leaf], after[leaf]) for leaf in before)
    exact, noise = Scorer(model, 1.0).probe(learner.params, case.ids)
    assert np.isfinite(exact).all()
    assert noise.max() < 1e-5
    assert learner.update(batches).loss < first.loss


def test_decay_leaves_alone_what_gets_no_gradient(tmp_path: Path) -> None:
    """The bias of DeepSeek's router is a buffer in transformers, which no optimizer sees."""
    case = families.case("deepseek-v3")
    model = load(models.write_hf(tmp_path / "hf", case.written, case.weights))
    optimizer = make_optimizer(replace(OPTIMIZER, weight_decay=0.1))
    learner = Learner(params_of(model), optimizer, objective(model, supervised_loss, 1.0))
    before = {leaf: np.asarray(value) for leaf, value in learner.params.items()}
    rows = rows_of(case.ids)
    learner.update(micro_batches(rows, row_weights(rows, "token-mean", 1), BatchLayout((48,), 1, 0), 1))
    kept = {leaf for leaf, value in learner.params.items() if np.array_equal(value, before[leaf])}
    assert kept == {leaf for leaf in before if leaf.endswith("router_bias")} != set()


@pytest.mark.long
def test_experts_are_divided_over_the_mesh(tmp_path: Path) -> None:
    case = families.case("qwen3-moe")
    model = load(models.write_hf(tmp_path / "hf", case.written, case.weights), mesh=(2, 2))
    up = model.layers[0].mlp.up_proj.get_value()
    assert up.sharding.shard_shape(up.shape) == (3, 48, 16)
    np.testing.assert_allclose(logprobs(model, case.ids), case.logprobs, atol=1e-5)


def test_adapters_of_experts_alone_are_refused() -> None:
    described, mesh = ModelConfig.parse(families.case("qwen3-moe").written), family.make_mesh((1, 1), ("fsdp", "tp"))
    with pytest.raises(ConfigError, match="names no projection"):
        family.abstract(described, "float32", "none", mesh, LoraOptions(2, 4.0, ("up_proj", "down_proj")))


def test_random_weights_of_a_family_with_biases_begin_without_them(tmp_path: Path) -> None:
    folder = models.write_hf(tmp_path / "hf", families.case("qwen2").written)
    assert not np.asarray(load(folder, random=True).layers[1].attn.k_bias.get_value()).any()


def test_random_norms_begin_as_those_that_change_nothing() -> None:
    for name, about in (("gemma2", 0.0), ("qwen2", 1.0)):
        leaf = random_leaves(ModelConfig.parse(families.case(name).written), seed=0)
        assert (leaf("layers.0.post_attention_layernorm.w", (5,)) == np.full(5, about)).all()


def test_weights_of_another_family_are_refused(tmp_path: Path) -> None:
    case = families.case("qwen2")
    lacking = {name: value for name, value in case.weights.items() if not name.endswith(".bias")}
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(models.write_hf(tmp_path / "hf", case.written, lacking))


def test_a_new_family_needs_no_code_in_the_trainer(tmp_path: Path) -> None:
    with imaginary_family.added(tmp_path):
        config = ModelConfig.parse(imaginary_family.CONFIG).to_hf()
        weights = models.random_weights(config, 4)
        model, ids = load(models.write_hf(tmp_path / "hf", config, weights)), families.case("gemma2").ids
        expected = decoder_reference.score(weights, config, ids[:1].tolist(), ids[1:].tolist())
        np.testing.assert_allclose(logprobs(model, ids), expected, atol=1e-5)
