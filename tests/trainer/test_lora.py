"""Adapters: the effective weights, one optimizer step, checkpoints that hold nothing else, and what becomes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from services.trainer.backend.assembly import merged
from services.trainer.backend.policy import PolicyBackend
from services.trainer.batches.batch import BatchLayout, micro_batches, row_weights, supervised_row
from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.policy import Policy
from services.trainer.learner.scoring import Scorer, divided, objective, params_of
from services.trainer.learner.train_step import Learner
from services.trainer.models import family
from services.trainer.models.lora import LoraOptions, initial_adapter
from services.trainer.models.options import ModelOptions
from shared.errors import Fenced, WeightsError
from shared.models import adapter
from shared.models.config import ModelConfig
from shared.models.names import from_hf, hf_name
from shared.run import checkpoint_files
from shared.run import state as states
from shared.run.checkpoint_files import Probe
from shared.run.state import initial_state
from shared.types import WeightVersion
from tests.support import decoder_reference, families, models
from tests.trainer.support import model_of
from tests.trainer.test_policy import CONFIG_1, OPTIONS, START, WEIGHTS, held, params, ppo_options
from volley_supervised.learner.imitation import supervised_loss

LORA = LoraOptions(4, 8.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
SHAPE = ModelConfig.parse(CONFIG_1)


def base_leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
    return from_hf(name, WEIGHTS[hf_name(name)], size)


def adapted(leaves=None, dtype: str = "float32", mesh: tuple[int, int] = (1, 1)) -> family.Model:
    leaves = leaves or initial_adapter(base_leaf, 0)
    return family.build(SHAPE, leaves, family.make_mesh(mesh, ("fsdp", "tp")), dtype=dtype, lora=LORA)


def random_adapter(name: str, size: tuple[int, ...]) -> np.ndarray:
    """B is not 0."""
    if not adapter.is_adapter(name):
        return base_leaf(name, size)
    return (0.1 * np.random.default_rng(len(name) + sum(name.encode())).standard_normal(size)).astype(np.float32)


def merged_weights(tree: dict[str, Any]) -> models.Weights:
    """Float64, as PEFT defines it and with its names, under Hugging Face's."""
    found = {name: value.astype(np.float64) for name, value in WEIGHTS.items()}
    peft = dict(adapter.peft(name, np.asarray(v, np.float64)) for name, v in tree.items() if adapter.is_adapter(name))
    for name in list(peft):
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = peft[name], peft[name.replace("lora_A", "lora_B")]
            found[f"{module}.weight"] += LORA.alpha / LORA.rank * b @ a
    return found


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_the_probe_is_that_of_the_merged_weights(mesh: tuple[int, int]) -> None:
    model = adapted(random_adapter, mesh=mesh)
    probe = Policy(model, OPTIONS, CONFIG_1, None).contents().probe
    assert probe is not None
    exact = decoder_reference.score(
        merged_weights(params_of(model)), CONFIG_1, probe.input_ids[:1], probe.input_ids[1:]
    )
    plain = decoder_reference.score(WEIGHTS, CONFIG_1, probe.input_ids[:1], probe.input_ids[1:])
    np.testing.assert_allclose(probe.logprobs, exact, atol=3e-5)
    assert np.abs(plain - exact).max() > 1e-2
    assert 0 < np.mean(probe.noise) <= np.max(probe.noise) < 2e-5


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("llama-tied", "gemma2", "gemma3")), "qwen2"]
)
def test_every_family_has_adapters_of_its_projections(name: str, tmp_path: Path) -> None:
    case = families.case(name)
    described, mesh = ModelConfig.parse(case.written), family.make_mesh((1, 1), ("fsdp", "tp"))

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        return from_hf(name, case.weights[hf_name(name)], size)

    def some(name: str, size: tuple[int, ...]) -> np.ndarray:
        return random_adapter(name, size) if adapter.is_adapter(name) else leaf(name, size)

    model = family.build(described, some, mesh, dtype="float32", lora=LORA)
    tree = {name: np.asarray(value) for name, value in params_of(model).items()}
    base = {name: value for name, value in tree.items() if not adapter.is_adapter(name)}
    effective = adapter.merged_arrays(base, {k: v for k, v in tree.items() if k not in base}, LORA.scale)
    plain = family.build(described, lambda name, _: effective[name], mesh, dtype="float32")
    from tests.trainer.test_families import logprobs

    np.testing.assert_allclose(logprobs(model, case.ids), logprobs(plain, case.ids), atol=2e-5)
    assert len(tree) - len(base) == 2 * 7 * described.num_hidden_layers
    assert np.abs(logprobs(model, case.ids) - case.logprobs).max() > 1e-3


@pytest.mark.long
def test_one_optimizer_step_is_that_of_the_effective_weights_by_the_chain_rule() -> None:
    """dA = s · dW Bᵀ and dB = s · Aᵀ dW, where dW is the gradient of a full model with the effective weights; then
    AdamW's first step in float64. The full model's gradient is compared with numpy's elsewhere.
    """
    options = replace(OPTIONS, optimizer=replace(OPTIONS.optimizer, max_grad_norm=1e9))
    one = Policy(adapted(random_adapter), options, CONFIG_1, None)
    before = {k: v.astype(np.float64) for k, v in params(one).items()}
    assert all(adapter.is_adapter(name) for name in before)
    effective = {k: v.astype(np.float32) for k, v in merged_weights(params_of(adapted(random_adapter))).items()}
    full = Policy(model_of(effective, CONFIG_1), options, CONFIG_1, reference_of_base())
    groups = held(1, 2, 3, 4)
    found, expected = one.step(groups, START), full.step(groups, START)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    # AdamW's first moment after one step is (1 - b1) · gradient.
    gradient = {
        name.removeprefix("opt_state.2.0.mu."): np.asarray(value, np.float64) / (1 - options.optimizer.b1)
        for name, value in full.contents().optimizer.items()
        if ".mu." in name
    }
    after, squares = params(one), 0.0
    for weight in adapter.weights_of(before):
        a, b, dw = before[adapter.a_name(weight)], before[adapter.b_name(weight)], gradient[weight]
        outs = b.ndim - 1
        da = LORA.scale * np.tensordot(dw, b, (range(dw.ndim - outs, dw.ndim), range(1, b.ndim)))
        db = LORA.scale * np.tensordot(a, dw, (range(a.ndim - 1), range(a.ndim - 1)))
        for name, was, d in ((adapter.a_name(weight), a, da), (adapter.b_name(weight), b, db)):
            squares += (d**2).sum()
            moved = was - options.optimizer.learning_rate * d / (np.abs(d) + 1e-8)
            sure = np.abs(d) > 1e-6  # of a gradient near 0 the sign is a matter of rounding
            np.testing.assert_allclose(after[name][sure], moved[sure], atol=2e-5)
            assert sure.mean() > 0.5
    assert found.grad_norm == pytest.approx(np.sqrt(squares), rel=1e-3)


def reference_of_base() -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in params_of(model_of(WEIGHTS, CONFIG_1)).items()}


def test_only_adapters_have_optimizer_state_and_the_base_does_not_move() -> None:
    one = Policy(adapted(), OPTIONS, CONFIG_1, None)
    base = {k: np.asarray(v) for k, v in one.base().items()}
    first = one.step(held(1, 2, 3, 4), START)
    assert first.kl == pytest.approx(0, abs=1e-9)  # the reference is the base, and B was 0
    contents = one.contents()
    moments = [name for name in contents.optimizer if ".mu." in name]
    assert len(moments) == len(contents.params)
    assert all(adapter.is_adapter(name) for name in (*moments, *contents.params))
    assert all(np.array_equal(base[name], value) for name, value in one.base().items())
    assert one.step(held(5, 6, 7, 8), WeightVersion(1, 1)).kl > 0


def test_the_base_of_bfloat16_is_held_as_it_is_published() -> None:
    model = adapted(random_adapter, dtype="bfloat16")
    one = Policy(model, replace(OPTIONS, published_dtype="bfloat16"), CONFIG_1, None)
    contents = one.contents()
    assert {str(v.dtype) for v in one.base().values()} == {"bfloat16"}
    assert {str(v.dtype) for v in contents.params.values()} == {"float32"}
    assert contents.master is None
    assert contents.probe is not None
    np.testing.assert_allclose(contents.probe.logprobs, of_the_loss(one, contents.params, contents.probe), atol=1e-5)


def of_the_loss(policy: Policy, tree: models.Weights, probe: Probe) -> np.ndarray:
    """Log-probabilities of the policy that bfloat16 losses use: base and adapters rounded, their sum not."""
    base = {k: np.asarray(v) for k, v in policy.base().items()}
    used = {k: np.asarray(v).astype(ml_dtypes.bfloat16) for k, v in tree.items()}
    effective = models.merged(base, used, LORA.scale)
    return decoder_reference.score(effective, CONFIG_1, probe.input_ids[:1], probe.input_ids[1:])


def test_a_merge_keeps_changes_that_bfloat16_cannot_hold() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 32)).astype(ml_dtypes.bfloat16)
    a, b = rng.uniform(-0.1, 0.1, (64, 4)).astype(np.float32), np.full((4, 32), 1e-4, np.float32)
    change = adapter.merge(weight, a, b, 2.0) - weight.astype(np.float32)
    np.testing.assert_allclose(change, 2.0 * a @ b, atol=1e-6)


@pytest.mark.long
def test_the_critic_of_adapters_shares_their_base() -> None:
    one = Policy(adapted(), ppo_options(), CONFIG_1, None)
    one.step(held(1, 2, 3, 4), START)
    names = [name for name in one.contents().optimizer if name.startswith("critic.params.")]
    assert "critic.params.value_head" in names
    assert all(adapter.is_adapter(name) for name in names if not name.endswith("value_head"))


@pytest.fixture
def folders(tmp_path: Path) -> CheckpointFolders:
    found = CheckpointFolders(tmp_path / "run" / "checkpoints", "run", 2, OrbaxArrays())
    found.fence(1)
    return found


def backend(folders: CheckpointFolders, folder: Path) -> PolicyBackend:
    models.write_hf(folder, CONFIG_1, WEIGHTS)
    options = ModelOptions(folder, "float32", "none", (1, 1), ("fsdp", "tp"), 0, lora=LORA)
    return PolicyBackend(options, SHAPE, OPTIONS, folders)


def test_checkpoints_hold_adapters_and_the_base_lies_once(folders: CheckpointFolders, tmp_path: Path) -> None:
    (folders.root / checkpoint_files.BASE / "of-one-that-crashed").mkdir(parents=True)
    one = backend(folders, tmp_path / "model")
    assert one.restore() is None
    one.build()
    state = initial_state(0).starting_epoch(1, keep_reference=False)
    first = one.start(state)
    manifest = checkpoint_files.read_manifest(first)
    assert manifest.kind == "adapter"
    assert manifest.adapter is not None
    assert [path.name for path in (folders.root / checkpoint_files.BASE).iterdir()] == [manifest.adapter.base.digest]
    one.step(held(1, 2, 3, 4), START)
    second = one.save(replace(state, step=1, low=4), state.version)
    straight = one.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    one.save(replace(state, step=2, low=8), WeightVersion(1, 1))

    folders.fence(2)
    again = backend(folders, tmp_path / "model")
    resumed = again.restore()
    assert resumed is not None
    again.build()
    again.start(resumed.starting_epoch(2, keep_reference=False))
    again.rewind(WeightVersion(1, 1))
    assert replace(again.step(held(5, 6, 7, 8), WeightVersion(1, 1))) == straight
    relabelled = checkpoint_files.read_manifest(folders.root / "e000002-s000002")
    assert relabelled.adapter == manifest.adapter

    read = folders.restored(WeightVersion(1, 1))
    full = merged(read, folders.base_of(read))
    assert full.params.keys() == params_of(model_of(WEIGHTS, CONFIG_1)).keys()
    assert states.verify(second)[0].adapter == manifest.adapter


def test_a_base_that_is_damaged_or_of_others_is_refused(folders: CheckpointFolders, tmp_path: Path) -> None:
    one = backend(folders, tmp_path / "model")
    one.restore()
    one.build()
    folder = one.start(initial_state(0).starting_epoch(1, keep_reference=False))
    found = checkpoint_files.read_manifest(folder).adapter
    assert found is not None
    file = max(found.base.folder(folders.root).rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = backend(folders, tmp_path / "model")
    again.restore()
    with pytest.raises(WeightsError, match=f"base {found.base.digest}: digest of"):
        again.build()
    path = folder / checkpoint_files.MANIFEST
    path.write_text(path.read_text(encoding="utf-8").replace(found.base.digest, "0" * 64), encoding="utf-8")
    with pytest.raises(WeightsError, match="digest of the base"):
        checkpoint_files.read_manifest(folder)


def test_an_older_trainer_makes_no_base(folders: CheckpointFolders) -> None:
    folders.fence(2)
    with pytest.raises(Fenced):
        folders.save_base(WeightVersion(1, 0), {"final_norm.w": np.ones(3, np.float32)})


def test_adapters_that_do_not_fit_are_named() -> None:
    base = {"w": np.ones((3, 2), np.float32)}
    a, b = np.ones((3, 1), np.float32), np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(
        adapter.merged_arrays(base, {"w_lora_a": a, "w_lora_b": b}, 0.5)["w"], base["w"] + 0.5
    )
    for wrong in ({"w_lora_a": a}, {"v_lora_a": a, "v_lora_b": b}, {"w_lora_a": a, "w_lora_b": b.T}, {"w": a}):
        with pytest.raises(ValueError, match=r"not an adapter"):
            adapter.merged_arrays(base, wrong, 1.0)


def test_a_mesh_divides_adapters_as_their_weights() -> None:
    model = adapted(mesh=(2, 2))
    spec = jax.sharding.PartitionSpec
    found = {
        name: value.sharding.spec for name, value in params_of(model).items() if name.startswith("layers.0.attn.q")
    }
    assert found["layers.0.attn.q_proj.w_lora_b"] == spec(None, "tp", None)
    assert found["layers.0.attn.q_proj.w_lora_a"][1] is None


PEFT = json.loads((Path(__file__).parents[1] / "fixtures" / "lora" / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", [name if name == "qwen2" else pytest.param(name, marks=pytest.mark.long) for name in PEFT]
)
def test_forward_and_an_optimizer_step_are_those_of_torch_and_peft(name: str) -> None:
    """In float64: log-probabilities with an adapter, the gradient's norm, and the adapter after AdamW with decay."""
    case, known = families.case(name), PEFT[name]
    described, tree = ModelConfig.parse(case.written), models.random_adapter(case.config, 1, 2)

    def leaf(name: str, size: tuple[int, ...]) -> np.ndarray:
        return tree[name] if adapter.is_adapter(name) else from_hf(name, case.weights[hf_name(name)], size)

    mesh, lora = family.make_mesh((1, 1), ("fsdp", "tp")), replace(LORA, rank=2)
    model = family.build(described, leaf, mesh, dtype="float32", lora=lora)
    trained, frozen = divided(params_of(model))
    options = OptimizerOptions(1e-2, "constant", 0, 10, 0.9, 0.95, 0.1, 1e9)
    learner = Learner(trained, make_optimizer(options), objective(model, supervised_loss, 1.0, "none"), frozen)
    rows = [supervised_row(case.ids.tolist(), [1] * len(case.ids))]
    (batch,) = micro_batches(rows, row_weights(rows, "token-mean", 1), BatchLayout((48,), 1, 0), 1)
    found = Scorer(model, 1.0).logprobs(learner.params, batch)[0, : len(case.ids) - 1]
    np.testing.assert_allclose(found, known["logprobs"], atol=2e-5)
    assert np.abs(found - case.logprobs).max() > 0.1
    update = learner.update([batch])
    assert update.loss == pytest.approx(-np.mean(known["logprobs"]), rel=1e-5)
    assert update.grad_norm == pytest.approx(known["grad_norm"], rel=1e-4)
    after = dict(adapter.peft(leaf, np.asarray(value)) for leaf, value in learner.trained.items())
    assert after.keys() == known["after"].keys()
    for key, value in after.items():
        np.testing.assert_allclose(value.ravel()[::7], known["after"][key], atol=1e-4)
