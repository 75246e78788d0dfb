"""Optimizer steps compared with torch, transformers and PEFT in float64: losses, gradients and parameters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.batches.batch import BatchLayout, micro_batches, row_weights, supervised_row
from services.trainer.groups.group_buffer import ReadyGroup
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.learner.scoring import Scorer, divided, objective, params_of
from services.trainer.learner.train_step import Learner, applied
from services.trainer.models import family
from services.trainer.models.initial_weights import Leaves, leaves_of
from services.trainer.models.lora import LoraOptions, initial_adapter
from shared.algorithm_schema import GrpoSection
from shared.models import adapter, names
from shared.models.config import ModelConfig
from shared.types import Trajectory, WeightVersion
from tests.support import families, models
from tests.support.torch_client import Torch
from tests.trainer import test_branches
from tests.trainer.test_policy import CONFIG_1, OPTIONS, WEIGHTS
from volley_supervised.learner.imitation import supervised_loss

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
PROJECTIONS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
LORA = LoraOptions(4, 8.0, PROJECTIONS)
UNTRAINED = "e_score_correction_bias"
RATES = OptimizerOptions(1e-3, "cosine", 2, 10, 0.9, 0.95, 0.1, 0.5)
"""The schedule is in its warm-up and beyond, every step is clipped, and weights decay."""


def mesh(*shape: int) -> Any:
    return family.make_mesh(shape, ("fsdp", "tp"))


def of_torch(options: OptimizerOptions) -> dict[str, Any]:
    """Arguments of torch's optimizer and schedule."""
    given = {"lr": options.learning_rate, "betas": [options.b1, options.b2], "weight_decay": options.weight_decay}
    schedule = {"warmup": options.warmup_steps, "total": options.total_steps, "kind": options.schedule_type}
    return {"adamw": {**given, "eps": 1e-8}, "schedule": schedule, "max_grad_norm": options.max_grad_norm}


def by_file(leaves: Mapping[str, Any]) -> models.Weights:
    """Leaves of the trainer by the names of Hugging Face's and PEFT's files."""
    found = models.Weights()
    for leaf, value in leaves.items():
        array = np.asarray(value, np.float64)
        found |= dict([adapter.peft(leaf, array)]) if adapter.is_adapter(leaf) else names.to_files(leaf, array)
    return found


def moments(state: Mapping[str, Any]) -> models.Weights:
    """AdamW's mean gradients by leaf; Tunix has the model as a part of its own."""
    return {
        name.partition(".mu.")[2].removeprefix("model."): np.asarray(v, np.float64)
        for name, v in state.items()
        if ".mu." in name
    }


def gradients(before: models.Weights, after: models.Weights, b1: float) -> models.Weights:
    """The gradient of the step between, from mean' = b1 mean + (1 - b1) gradient."""
    return by_file({name: (value - b1 * before.get(name, 0.0)) / (1 - b1) for name, value in after.items()})


def part(found: Mapping[str, np.ndarray], prefix: str) -> models.Weights:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def apart(found: models.Weights, expected: models.Weights) -> float:
    """The largest |difference| / |expected| of a tensor; small tensors are compared with the whole."""
    assert found.keys() == expected.keys()
    whole = np.sqrt(sum(float((value**2).sum()) for value in expected.values()))
    return max(
        float(np.linalg.norm(found[name] - value) / max(np.linalg.norm(value), 1e-3 * whole))
        for name, value in expected.items()
    )


def episode(one: Trajectory) -> dict[str, Any]:
    """As it was recorded: every sequence's own tokens."""
    own = [{"parent": 0, "shared": 0, **_tokens(one)}]
    own += [{"parent": branch.parent, "shared": branch.shared, **_tokens(branch)} for branch in one.branches]
    return {"reward": one.reward, "sequences": own}


def _tokens(one: Any) -> dict[str, list[Any]]:
    ids, mask, logprobs = one.token_ids.tolist(), one.loss_mask.tolist(), one.logprobs.astype(float).tolist()
    return {"ids": ids, "mask": mask, "behaviour": logprobs}


def of_adapters(lora: LoraOptions | None, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for PEFT's model with these values."""
    if lora is None:
        return {}
    arrays = by_file(trained)
    modules = sorted({name.split(".", 2)[2].rsplit(".", 2)[0] for name in arrays})
    return {"arrays": arrays, "adapter": {"r": lora.rank, "lora_alpha": lora.alpha, "modules": modules}}


# Steps


SECTION = GrpoSection(beta=0.1, entropy_coef=0.01)
BRANCHED = replace(
    OPTIONS,
    algorithm=algorithm(SECTION, 1, 16),
    aggregation="sequence-mean-token-mean",
    optimizer=RATES,
    layout=BatchLayout((32,), 4, 0),
    rows_per_step=4,
)


def built(folder: Path, shape: tuple[int, int] = (1, 1), lora: LoraOptions | None = None) -> family.Model:
    described = ModelConfig.read(folder)
    leaves = leaves_of(folder, described, seed=0)
    leaves = initial_adapter(leaves, 0) if lora else leaves
    return family.build(described, leaves, mesh(*shape), dtype="float32", lora=lora)


def policy(folder: Path, reference: Path, options: PolicyOptions, **of_model: Any) -> Policy:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model, of_reference = built(folder, **of_model), params_of(built(reference))
    return Policy(model, options, config, {name: np.asarray(value) for name, value in of_reference.items()})


def steps_of_torch(
    torch: Torch, one: Policy, folder: Path, reference: Path, groups: Sequence[Sequence[ReadyGroup]]
) -> dict[str, np.ndarray]:
    """Parameters, losses and gradients of the same steps, computed by torch from the same weights and episodes."""
    options = one.options
    section = options.algorithm.section
    return torch.ask(
        "train",
        **of_adapters(one.model.lora, one._learner.trained),
        folder=str(folder),
        reference=str(reference),
        steps=[[[episode(t) for t in h.group.trajectories] for h in held] for held in groups],
        loss="ppo",
        temperature=options.temperature,
        beta=section.beta,
        entropy_coef=section.entropy_coef,
        aggregation=options.aggregation,
        **of_torch(options.optimizer),
    )


def compare_steps(
    one: Policy,
    groups: Sequence[Sequence[ReadyGroup]],
    known: Mapping[str, np.ndarray],
    tolerance: float = 1e-5,
    share: float = 0.0,
) -> None:
    """Train, and compare the losses, the gradient's norms, all gradients, and at the end the parameters.

    `tolerance` is of the difference of a tensor's gradient, relative to its norm. A `share` of the parameters may
    differ: the first step of Adam divides gradients that are all rounding by their size.
    """
    optimizer, before = one.options.optimizer, models.Weights()
    for number, held in enumerate(groups):
        made = one.step(held, WeightVersion(1, number))
        after = moments(one.contents().optimizer)
        found, expected = gradients(before, after, optimizer.b1), part(known, f"{number} gradient ")
        assert made.loss == pytest.approx(float(known[f"{number} loss"]), abs=1e-5)
        assert made.grad_norm == pytest.approx(float(known[f"{number} norm"]), rel=1e-5)
        assert apart(found, expected) < tolerance
        before = after
    compare_parameters(by_file(one.contents().params), part(known, "after "), 1e-2 * optimizer.learning_rate, share)


def compare_parameters(found: models.Weights, expected: models.Weights, atol: float, share: float = 0.0) -> None:
    """Compare all that torch has: DeepSeek's bias of experts is none of its parameters."""
    assert found.keys() - expected.keys() == {name for name in found if name.endswith(UNTRAINED)}
    differ = {name: int((np.abs(found[name] - value) > atol).sum()) for name, value in expected.items()}
    assert sum(differ.values()) <= share * sum(value.size for value in expected.values()), differ


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and another one as the reference of the KL penalty."""
    reference = models.random_weights(CONFIG_1, 7)
    return models.write_hf(tmp_path / "a", CONFIG_1, WEIGHTS), models.write_hf(tmp_path / "b", CONFIG_1, reference)


@pytest.mark.parametrize("layout", [BRANCHED.layout, test_branches.PACKED.layout])
def test_steps_on_branching_episodes_are_those_of_torch(layout: BatchLayout, torch: Torch, tmp_path: Path) -> None:
    own, groups = folders(tmp_path), [test_branches.held(1, 2), test_branches.held(3, 4)]
    one = policy(*own, replace(BRANCHED, layout=layout))
    compare_steps(one, groups, steps_of_torch(torch, one, *own, groups))


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM2.exists(), reason="volley model get smollm2 models/smollm2")
def test_a_step_of_smollm2_is_that_of_torch(torch: Torch) -> None:
    one, groups = policy(SMOLLM2, SMOLLM2, BRANCHED), [test_branches.held(1, 2)]
    compare_steps(one, groups, steps_of_torch(torch, one, SMOLLM2, SMOLLM2, groups), tolerance=1e-4, share=1e-4)


@pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.long)])
def test_three_steps_on_a_mesh_are_those_of_one_device(lora: LoraOptions | None, torch: Torch, tmp_path: Path) -> None:
    """fsdp 2 × tp 2, and both against torch. The reference of adapters is their base."""
    folder, other = folders(tmp_path)
    reference = other if lora is None else folder
    groups = [test_branches.held(2 * n + 1, 2 * n + 2) for n in range(3)]
    one, four = (policy(folder, reference, BRANCHED, shape=shape, lora=lora) for shape in ((1, 1), (2, 2)))
    known = steps_of_torch(torch, one, folder, reference, groups)
    compare_steps(one, groups, known)
    compare_steps(four, groups, known)
    a, b = (by_file(policy.contents().params) for policy in (one, four))
    compare_parameters(b, a, 1e-2 * RATES.learning_rate)


# Families, adapters


def sequences(ids: np.ndarray) -> list[list[dict[str, Any]]]:
    """One step on the mean of all tokens."""
    weights = [1.0 / (len(ids) - 1)] * len(ids)
    return [[{"ids": ids.tolist(), "weights": weights, "loss": "cross_entropy"}]]


def with_adapters(leaves: Leaves, name: str, size: tuple[int, ...]) -> np.ndarray:
    """Adapters whose B is not 0."""
    if not adapter.is_adapter(name):
        return leaves(name, size)
    rng = np.random.default_rng(list(name.encode()))
    return (0.1 * rng.standard_normal(size)).astype(np.float32)


SHORT = [("gemma3", None), ("qwen2", LORA)]


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        case if case in SHORT else pytest.param(*case, marks=pytest.mark.long)
        for case in itertools.product(families.NAMES, (None, LORA))
    ],
    ids=lambda value: value if isinstance(value, str) else "adapters" if value else "all",
)
def test_twenty_steps_of_a_family_are_those_of_torch(
    name: str, lora: LoraOptions | None, torch: Torch, tmp_path: Path
) -> None:
    """AdamW with warm-up, cosine, clipping and decay, of all parameters or of adapters."""
    case, n, options = families.case(name), 20, replace(RATES, warmup_steps=4, total_steps=20)
    folder = models.write_hf(tmp_path, case.written, case.weights)
    described = ModelConfig.read(folder)
    leaves = partial(with_adapters, leaves_of(folder, described, seed=0))
    model = family.build(described, leaves, mesh(1, 1), dtype="float32", lora=lora)
    trained, frozen = divided(params_of(model))
    known = torch.ask(
        "train",
        **of_adapters(lora, trained),
        folder=str(folder),
        steps=n * sequences(case.ids),
        **of_torch(options),
    )
    one = Learner(trained, make_optimizer(options), objective(model, supervised_loss, 1.0, "none"), frozen)
    rows, scorer = [supervised_row(case.ids.tolist(), [1] * len(case.ids))], Scorer(model, 1.0)
    (batch,) = micro_batches(rows, row_weights(rows, "token-mean", 1), BatchLayout((len(case.ids),), 1, 0), 1)
    before = models.Weights()
    for number in range(n):
        logprobs = scorer.logprobs(one.params, batch)[0, : len(case.ids) - 1]
        update, after = one.update([batch]), moments(one.optimizer_state())
        found = gradients(before, after, options.b1)
        found = {name: value for name, value in found.items() if not name.endswith(UNTRAINED)}
        np.testing.assert_allclose(logprobs, known[f"{number} logprobs 0"], atol=5e-5)
        assert (update.loss, update.grad_norm) == pytest.approx(
            (float(known[f"{number} loss"]), float(known[f"{number} norm"])), rel=1e-5
        )
        assert apart(found, part(known, f"{number} gradient ")) < 5e-5
        before = after
    compare_parameters(by_file(one.trained), part(known, "after "), 0.2 * options.learning_rate)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_twenty_steps_of_adamw_are_those_of_torch(kind: Any, torch: Torch) -> None:
    """Warm-up, schedule, clipping of gradients of all sizes, weight decay."""
    n, size, rng = 20, 1000, np.random.default_rng(0)
    options = replace(RATES, schedule_type=kind, warmup_steps=5, total_steps=n, max_grad_norm=3.0)
    given = rng.normal(size=(n, size)) * 10.0 ** rng.uniform(-3, 0.5, (n, 1)) * 10.0 ** rng.uniform(-3, 0, size)
    start, given = rng.normal(size=size).astype(np.float32), given.astype(np.float32)
    known = torch.ask("adamw", {"start": start, "gradients": given}, **of_torch(options))["after"]
    optimizer, params, worst = make_optimizer(options), {"a": jnp.asarray(start)}, 0.0
    state, step = optimizer.init(params), jax.jit(applied(optimizer))
    for gradient, expected in zip(given, known, strict=True):
        params, state = step(params, state, {"a": jnp.asarray(gradient)})
        worst = max(worst, np.abs(np.asarray(params["a"]) - expected).max())
    n_clipped = int((np.linalg.norm(given, axis=1) > options.max_grad_norm).sum())
    assert 3 < n_clipped < n - 3
    assert worst < 2e-6
