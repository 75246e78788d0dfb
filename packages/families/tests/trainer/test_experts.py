"""Experts that the engine has chosen: a layer against numpy in float64, where they lie in batches, and what they change
about the log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from services.trainer.batches.batch import Batch, BatchLayout, Row, arranged, assembled, by_row, policy_rows
from services.trainer.groups.group_buffer import GroupBuffer, ready_group
from services.trainer.learner.policy import Policy
from services.trainer.learner.scoring import Scorer, objective, params_of
from services.trainer.models.family import Model, build, make_mesh
from services.trainer.models.options import Remat
from shared.models.config import ModelConfig
from shared.queue.records import StreamEntry
from shared.routing import RoutingShape
from shared.run.progress import TicketProgress
from shared.types import Group, WeightVersion
from tests.support import decoder_reference, families, models
from tests.trainer.support import group
from tests.trainer.test_group_buffer import RULES
from tests.trainer.test_policy import OPTIONS, START
from volley_families.trainer import experts
from volley_supervised.learner.imitation import supervised_loss

CASE = families.case("qwen3-moe")
T, D, F, E, K = 7, 6, 5, 4, 2
SHAPE = RoutingShape(2, 6, 2)


def moe(dtype: str = "float32", remat: Remat = "none", case: families.FamilyCase = CASE) -> Model:
    described, mesh = ModelConfig.parse(case.written), make_mesh((1, 1), ("fsdp", "tp"))
    leaves = models.to_tunix(case.weights, case.config)
    return build(described, lambda name, _: leaves[name], mesh, dtype=dtype, remat=remat)


def layer(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = {"x": (T, D), "router": (D, E), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    return {name: rng.standard_normal(size) for name, size in sizes.items()}


def by_numpy(arrays: dict[str, np.ndarray], given: np.ndarray, *, norm: bool) -> np.ndarray:
    """float64 [T, D]; `given` int [T, K], of which -1 stands for the reference's own choice."""
    probabilities, own = decoder_reference.router(arrays["x"], arrays["router"].T, K)
    chosen = np.where(given >= 0, given, own)

    def of_expert(i: int, x: np.ndarray) -> np.ndarray:
        gate = x @ arrays["gate"][i]
        return (gate / (1 + np.exp(-gate)) * (x @ arrays["up"][i])) @ arrays["down"][i]

    return decoder_reference.mixed(arrays["x"], probabilities, chosen, of_expert, {"norm_topk_prob": norm})


def by_trainer(arrays: dict[str, Any], given: Any, *, norm: bool) -> tuple[jax.Array, jax.Array]:
    held = {name: nnx.Param(value) for name, value in arrays.items()}
    mlp = SimpleNamespace(
        router=SimpleNamespace(kernel=held["router"]),
        gate_proj=held["gate"],
        up_proj=held["up"],
        down_proj=held["down"],
        experts_per_tok=K,
        num_experts=E,
        norm_topk_prob=norm,
    )
    made, differs = experts.mixed(mlp, arrays["x"][None], None if given is None else jnp.asarray(given)[None])
    return made[0], differs[0]


def choices(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Two tokens to experts of the router's choice, named backwards; one without any named; others anywhere."""
    _, own = decoder_reference.router(arrays["x"], arrays["router"].T, K)
    given = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    given[:2], given[2] = own[:2, ::-1], -1
    return given


@pytest.mark.parametrize("norm", [True, False])
def test_a_layer_with_given_experts_is_that_of_numpy(norm: bool) -> None:
    rng = np.random.default_rng(3)
    arrays = layer(rng)
    given = choices(arrays, rng)
    single = {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}
    found, differs = by_trainer(single, given, norm=norm)
    np.testing.assert_allclose(found, by_numpy(arrays, given, norm=norm), atol=1e-4)
    _, own = decoder_reference.router(arrays["x"], arrays["router"].T, K)
    others = np.sort(given, -1) != np.sort(own, -1)
    np.testing.assert_array_equal(differs, others.any(-1) & (given[:, 0] >= 0))
    assert not np.asarray(differs)[:3].any()
    assert np.asarray(differs).any()
    plain, differs = by_trainer(single, None, norm=norm)
    np.testing.assert_allclose(plain, by_numpy(arrays, np.full_like(given, -1), norm=norm), atol=1e-4)
    assert not np.asarray(differs).any()


@pytest.mark.parametrize("norm", [True, False])
def test_the_gradient_flows_through_the_probabilities_of_given_experts(norm: bool) -> None:
    """Central differences of numpy's float64, of 12 numbers of each array: within 1e-3 of the largest."""
    rng = np.random.default_rng(4)
    arrays = layer(rng)
    given, weight = choices(arrays, rng), rng.standard_normal((T, D))
    single = {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}
    gradient = jax.grad(lambda at: jnp.sum(by_trainer(at, given, norm=norm)[0] * weight))(single)
    for name, array in arrays.items():
        largest = float(np.abs(gradient[name]).max())
        assert largest > 0.01, f"no gradient reaches {name}"
        for index in rng.choice(array.size, 12, replace=False):
            values = []
            for step in (1e-5, -1e-5):
                moved = array.copy()
                moved.flat[index] += step
                values.append((by_numpy({**arrays, name: moved}, given, norm=norm) * weight).sum())
            expected = (values[0] - values[1]) / 2e-5
            assert np.asarray(gradient[name]).flat[index] == pytest.approx(expected, abs=1e-3 * largest)


def row(ids: list[int], first: int, n_routed: int | None) -> Row:
    """Of a prompt of two tokens; its experts are numbered from `first`."""
    n = len(ids)
    mask = np.array([0, 0] + [1] * (n - 2), np.uint8)
    routed = None if n_routed is None else first + np.arange(n_routed * 2, dtype=np.uint8).reshape(n_routed, 1, 2)
    return Row(np.array(ids, np.int32), mask, np.zeros(n, np.float32), mask, np.zeros(n), routed=routed)


ROWS = [
    row([1, 2, 3, 4, 5], 10, 4),
    row([1, 2, 6, 7], 50, 3),
    row([8, 9, 5], 0, None),
    row([8, 9, 4, 3], 90, 2),
    row([1, 2, 9], 10, 2),
]


@pytest.mark.parametrize("layout", [BatchLayout((8,), 2, 0), BatchLayout((16,), 1, 0, tokens=16)])
def test_experts_lie_where_their_tokens_lie(layout: BatchLayout) -> None:
    """The last token has none, filler has none; a token is shared by sequences that send it to the same ones alone."""
    parts = arranged(ROWS, layout, 3)
    batches = assembled(ROWS, np.ones(len(ROWS)), parts, 0)
    assert {part.packed for part in parts} == {layout.tokens is not None}
    n_tokens = 0
    for batch, part in zip(batches, parts, strict=True):
        assert batch.routed is not None
        assert batch.routed.dtype == np.int16
        seen = np.zeros(part.shape, bool)
        for place in part.places:
            one = ROWS[place.sequence]
            seen[place.row, place.columns] = True
            expected = np.full((len(one.ids), 1, 2), -1)
            if one.routed is not None:
                expected[: len(one.routed)] = one.routed
            np.testing.assert_array_equal(batch.ids[place.row, place.columns], one.ids)
            np.testing.assert_array_equal(batch.routed[place.row, place.columns], expected)
        assert (batch.routed[~seen] == -1).all()
        n_tokens += int(seen.sum())
    assert n_tokens == (19 if layout.tokens is None else 18)


def test_a_step_without_experts_has_no_place_for_them() -> None:
    plain = [replace(one, routed=None) for one in ROWS]
    layout = BatchLayout((8,), 2, 0)
    assert all(batch.routed is None for batch in assembled(plain, np.ones(5), arranged(plain, layout, 3), 0))


def by_engine(ids: np.ndarray, routed: list[np.ndarray] | None = None) -> np.ndarray:
    """float64 [n - 1]: log-probabilities of ids[1:] in an engine whose bfloat16 rounds elsewhere than the trainer's."""
    table = decoder_reference.logits(CASE.weights, CASE.config, ids.tolist(), decoder_reference.bfloat16, routed)
    return decoder_reference.log_softmax(table[:-1])[np.arange(len(ids) - 1), ids[1:]]


def batch_of(ids: np.ndarray, routed: np.ndarray | None) -> tuple[list[Row], Any, list[Batch]]:
    ones = np.ones(len(ids), np.uint8)
    rows = [Row(ids, ones, np.zeros(len(ids), np.float32), ones, np.zeros(len(ids)), routed=routed)]
    layout = BatchLayout((64,), 1, 0)
    parts = arranged(rows, layout, 1)
    return rows, parts, assembled(rows, np.ones(1), parts, 0)


def test_in_bfloat16_the_trainer_is_nearer_to_the_engine_with_its_experts() -> None:
    """Because the engine's rounding sends some tokens to other experts than the trainer's; over 12 texts."""
    model, rng = moe(dtype="bfloat16"), np.random.default_rng(8)
    scorer, gaps, flips = Scorer(model, 1.0), {"replayed": [], "alone": []}, 0.0
    told = jax.jit(objective(model, supervised_loss, 1.0))
    for _ in range(12):
        ids, chosen = rng.integers(3, 96, 48).astype(np.int32), list[np.ndarray]()
        expected = by_engine(ids, chosen)
        routed = np.stack(chosen, axis=1)[:-1].astype(np.uint8)
        for name, given in (("replayed", routed), ("alone", None)):
            rows, parts, (batch,) = batch_of(ids, given)
            (scored,) = by_row([scorer.logprobs(params_of(model), batch)], rows, parts)
            gaps[name].append(np.abs(scored[1:] - expected))
            if given is not None:
                flips += told(params_of(model), batch)[1]["routing_diff"].value() or 0.0
    assert 0.0 < flips / 12 < 0.2
    replayed, alone = (np.concatenate(gaps[name]) for name in ("replayed", "alone"))
    assert replayed.mean() < alone.mean()
    assert replayed.max() < alone.max()


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_given_experts_change_what_follows_them_also_where_layers_are_computed_again(name: str) -> None:
    """DeepSeek's first layer is dense, and has no experts among the given ones."""
    case = families.case(name)
    model, own = moe(remat="decoder", case=case), case.experts
    assert own is not None
    assert model.described.routing is not None
    flipped = own[:-1].astype(np.uint8)
    n_experts = model.described.routing.n_experts
    flipped[20, 1] = [i for i in range(n_experts) if i not in own[20, 1]][: own.shape[-1]]
    loss = objective(model, supervised_loss, 1.0)
    step = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b)[0]))
    found = {}
    for given, routed in (("none", None), ("own", own[:-1]), ("flipped", flipped)):
        rows, parts, (batch,) = batch_of(case.ids, routed)
        (logprobs,) = by_row([Scorer(model, 1.0).logprobs(params_of(model), batch)], rows, parts)
        value, gradient = step(params_of(model), batch)
        assert all(np.isfinite(g).all() for g in gradient.values())
        assert value == pytest.approx(-logprobs[1:].sum(), rel=1e-5)
        found[given] = logprobs
    np.testing.assert_allclose(found["own"], found["none"], atol=1e-6)
    np.testing.assert_allclose(found["flipped"][:21], found["none"][:21], atol=1e-6)
    assert abs(found["flipped"][21] - found["none"][21]) > 1e-3


def routed_group(ticket: int, shape: RoutingShape = SHAPE, n: int = 15) -> Group:
    made, rng = group(ticket, str(START), seed=5), np.random.default_rng(ticket)
    per_token = [[rng.permutation(shape.n_experts)[: shape.per_token] for _ in range(shape.n_layers)] for _ in range(n)]
    routed = np.array(per_token).astype(shape.dtype)
    return replace(made, trajectories=tuple(replace(t, routed_experts=routed) for t in made.trajectories))


@pytest.mark.long
def test_a_step_tells_how_many_experts_differ_and_is_another_one_without_them() -> None:
    """Of groups that bring none the policy makes the step of its own choices; both from the wire."""
    groups = [[routed_group(t) for t in (1, 2, 3, 4)], [group(t, str(START), seed=5) for t in (1, 2, 3, 4)]]
    routed, plain = Policy(moe(), OPTIONS, CASE.config, None), Policy(moe(), OPTIONS, CASE.config, None)
    lines = [
        policy.step([ready_group(Group.decode(one.encode()), b"", "1-0") for one in its], START)
        for policy, its in zip((routed, plain), groups, strict=True)
    ]
    share = lines[0].more["routing_diff"]
    assert share is not None
    assert 0.5 < share <= 1.0
    assert "routing_diff" not in lines[1].more
    assert routed.checksum() != plain.checksum()


@pytest.mark.long
def test_what_filters_compare_is_computed_by_the_engine_s_experts() -> None:
    policy = Policy(moe(), OPTIONS, CASE.config, None)
    given, plain = (
        policy.logprob_diffs([ready_group(one, b"", "1-0")], START)
        for one in (routed_group(1), group(1, str(START), seed=5))
    )
    assert given != plain
    assert policy_rows(routed_group(1).trajectories[0], WeightVersion(1, 0))[0].routed is not None


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (None, "an episode has experts, but the model has none"),
        (RoutingShape(3, 6, 2), "experts of 2 layers, 2 a token, where the model has 3 and 2"),
        (RoutingShape(2, 5, 2), "expert 5 of a model with 5"),
        (SHAPE, None),
    ],
)
def test_experts_of_another_model_are_poison(shape: RoutingShape | None, named: str | None) -> None:
    buffer = GroupBuffer(TicketProgress(), ((1, 0),), replace(RULES, routing=shape))
    dropped = buffer.offer(StreamEntry("1-0", 1, routed_group(1).encode(), 1))
    assert (dropped and (dropped.reason, dropped.detail)) == (named and ("poison", named))
