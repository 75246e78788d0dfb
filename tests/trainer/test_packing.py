"""Several sequences in a row: who sees whom, that nothing leaks, and that losses and gradients are those of a sequence
a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import (
    Batch,
    BatchLayout,
    Row,
    arranged,
    assembled,
    by_row,
    efficiency,
    row_weights,
    supervised_row,
)
from services.trainer.batches.packing import MicroBatch, RowShapes
from services.trainer.learner.scoring import Scorer, objective, params_of
from services.trainer.learner.train_step import Params
from services.trainer.models import attention
from services.trainer.models.family import Model, make_mesh
from shared import algorithm_schema as schema
from shared.algorithm_base import PolicyGradientSection
from shared.errors import DecodeError
from tests.support import families, models
from tests.trainer import test_actor, test_policy
from tests.trainer.support import CONFIG, model_of
from volley_algorithms import sections
from volley_supervised.learner.imitation import supervised_loss

LENGTH = 64
PACKED = BatchLayout((LENGTH,), 1, 0, tokens=LENGTH)
START, HELD, POLICY = test_policy.START, test_policy.held, test_policy.policy


def ragged(seed: int, vocab: int = 96, longest: int = 32) -> list[Row]:
    """Groups of one to five episodes of the same prompt, of several turns; one without a token that counts, one as long
    as can be, and two prompts that begin alike.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, vocab, rng.integers(1, 15)).astype(np.int32) for _ in range(4)]
    prompts.append(np.concatenate([prompts[0], prompts[1]])[:15])
    made = []
    for prompt in prompts:
        for _ in range(rng.integers(1, 6)):
            answer = rng.integers(1, vocab, rng.integers(1, longest - len(prompt) + 1)).astype(np.int32)
            mask = np.concatenate([np.zeros(len(prompt)), np.ones(len(answer))]).astype(np.uint8)
            mask[len(prompt) + 2 : len(prompt) + 4] = 0
            made.append(row(np.concatenate([prompt, answer]), mask, rng))
    made[1] = replace(made[1], mask=np.zeros_like(made[1].mask))
    return [*made, row(rng.integers(1, vocab, LENGTH).astype(np.int32), np.ones(LENGTH, np.uint8), rng)]


def row(ids: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> Row:
    def numbers(middle: float) -> np.ndarray:
        return np.where(mask, middle + 0.3 * rng.standard_normal(len(ids)), 0).astype(np.float32)

    tables = {name: numbers(-4.5) for name in ("reference", "old", "values", "returns")}
    return Row(ids, mask, numbers(-4.5), mask, mask * rng.standard_normal(), **tables)


def both(rows: Sequence[Row]) -> list[tuple[list[MicroBatch], list[Batch]]]:
    """A sequence a row, and packed."""
    weights = row_weights(rows, "sequence-mean-token-mean", 1)
    made = []
    for layout in (BatchLayout((LENGTH,), len(rows), 0), PACKED):
        parts = arranged(rows, layout, 1)
        made.append((parts, assembled(rows, weights, parts, 0)))
    return made


CRITIC = "ppo's critic"
OF_SEQUENCES = ("gspo", "tis by sequence", "mis by geometric mean", CRITIC)
SECTIONS: dict[str, PolicyGradientSection | None] = {
    "grpo": schema.GrpoSection(beta=0.1, entropy_coef=0.01),
    "drgrpo": sections.DrGrpoSection(name="drgrpo"),
    "rloo": sections.RlooSection(name="rloo", sampler_is="sequence", sampler_rs="geometric"),
    "dapo": sections.DapoSection(name="dapo"),
    "gspo-token": sections.GspoSection(name="gspo-token"),
    "cispo": sections.CispoSection(name="cispo"),
    "reinforce_plus_plus": sections.ReinforcePlusPlusSection(name="reinforce_plus_plus"),
    "ppo": schema.PpoSection(name="ppo"),
    "supervised": None,
}
ids_of_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=12)
sequences = st.lists(st.tuples(ids_of_tokens, st.integers(0, 12)), min_size=1, max_size=12)


@settings(max_examples=20, deadline=None)
@given(sequences, st.integers(1, 2))
def test_a_token_sees_what_is_before_it_in_its_sequence_and_nothing_else(given_: Any, shards: int):
    rows = [supervised_row(ids, [0] * min(n, len(ids)) + [1] * (len(ids) - n)) for ids, n in given_]
    layout = BatchLayout((16, 24), shards, 9, tokens=50, shards=shards)
    parts = arranged(rows, layout, 0)
    assert sorted(place.sequence for part in parts for place in part.places) == list(range(len(rows)))
    for part, batch in zip(parts, assembled(rows, np.ones(len(rows)), parts, 9), strict=True):
        assert part.shape[0] % shards == 0
        assert part.shape[0] * part.shape[1] <= 50
        seen = np.asarray(
            attention.seen(0, *(2 * batch.ids.shape[1:]), batch.packing.visible_until, batch.packing.positions, None)
        )
        counted = np.zeros(part.shape)
        for place in part.places:
            own, at = rows[place.sequence], (place.row, place.columns)
            assert batch.ids[at].tolist() == own.ids.tolist()
            assert batch.packing.positions[at].tolist() == list(range(len(own.ids)))
            for t, column in enumerate(place.columns):
                assert np.flatnonzero(seen[place.row, column]).tolist() == place.columns[: t + 1].tolist()
            here = own.mask[1:] > 0
            before = (place.row, place.columns[:-1][here])
            counted[before] += 1
            assert batch.targets[before].tolist() == own.ids[1:][here].tolist()
            assert len(set(batch.packing.sequences[before].tolist())) <= 1
        assert np.array_equal(counted, batch.mask)


def test_what_is_asked_before_several_answers_is_computed_once():
    prompt, rng = list(range(1, 31)), np.random.default_rng(0)
    rows = [supervised_row([*prompt, *rng.integers(40, 90, 4)], [0] * 30 + [1] * 4) for _ in range(6)]
    (part,) = arranged(rows, PACKED, 0)
    assert part.n_tokens == 29 + 6 * 5
    assert arranged(rows, PACKED, 0)[0].places[5].columns.tolist() == part.places[5].columns.tolist()


def test_nine_in_ten_positions_hold_a_token_and_shapes_are_few():
    layout = BatchLayout((256, 512, 1024, 2048), 1, 0, tokens=4096)
    assert [RowShapes((8,), 8 * n, 1).at_once(8)[:-1] for n in (1, 4, 40)] == [[1], [4, 1], [40, 10, 2]]
    found, shapes = [], set()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(5.5, 0.8, 96), 8, 2048).astype(int)
        parts = arranged([supervised_row(rng.integers(1, 99, n), [1] * n) for n in lengths], layout, 0)
        found.append(efficiency(parts)["packing_efficiency"])
        shapes |= {part.shape for part in parts}
    assert min(found) >= 0.9
    assert len(shapes) <= 3 + 3 + 2 + 2


def test_rows_are_as_long_as_pays_and_cut_to_what_they_hold():
    layout = BatchLayout((32, 64, 1024), 1, 0, tokens=4096)
    parts = arranged([supervised_row([i + 1] * 30, [1] * 30) for i in range(5)], layout, 0)
    assert [part.shape for part in parts] == [(2, 32), (2, 32), (1, 32)]
    parts = arranged([supervised_row([i + 1] * 20, [1] * 20) for i in range(10)], replace(layout, tokens=256), 0)
    assert [part.shape for part in parts] == [(1, 64)] * 3 + [(1, 32)]
    with pytest.raises(DecodeError, match="exceeds the longest bucket, 1024"):
        arranged([supervised_row([1] * 1025, [1] * 1025)], layout, 0)


GEMMA = families.case("gemma2").config
"""Sees seven tokens in every other layer, of rows that are longer."""


@cache
def of(family: str) -> tuple[Model, Scorer, Params]:
    config = CONFIG if family == "qwen3" else GEMMA
    model = model_of(models.random_weights(config, seed=1), config)
    return model, Scorer(model, 1.0), params_of(model)


def logprobs(rows: Sequence[Row], parts: Sequence[MicroBatch], family: str = "qwen3") -> list[np.ndarray]:
    _, score, params = of(family)
    batches = assembled(rows, np.ones(len(rows)), parts, 0)
    return by_row([score.logprobs(params, batch) for batch in batches], rows, parts)


def test_a_changed_sequence_changes_no_other_by_a_single_bit():
    rows = ragged(3)
    parts = arranged(rows, PACKED, 0)
    before = logprobs(rows, parts)
    changed = rows[4]
    other = np.where(np.arange(len(changed.ids)) > changed.own_from, 95 - changed.ids, changed.ids)
    after = logprobs([*rows[:4], replace(changed, ids=other.astype(np.int32)), *rows[5:]], parts)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(a, b) == (i != 4)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_log_probabilities_are_those_of_a_sequence_a_row(family: str):
    rows = ragged(5)
    (alone, _), (together, _) = both(rows)
    assert sum(part.n_tokens for part in together) < sum(len(one.ids) for one in rows)
    for a, b in zip(logprobs(rows, alone, family), logprobs(rows, together, family), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
def test_the_gradient_through_sliding_windows_is_that_of_a_sequence_a_row():
    (_, alone), (_, together) = both(ragged(5))
    model, _, params = of("gemma2")
    gradient = jax.jit(jax.grad(lambda p, batch: objective(model, supervised_loss, 1.0)(p, batch)[0]))
    a, b = (
        jax.tree.map(lambda *parts: sum(parts), *(gradient(params, one) for one in way)) for way in (alone, together)
    )
    for name in params:
        scale = np.abs(a[name]).max()
        np.testing.assert_allclose(b[name] / scale, a[name] / scale, atol=1e-5, err_msg=name)


def scattered(table: np.ndarray, parts: Sequence[MicroBatch], into: Sequence[MicroBatch]) -> list[np.ndarray]:
    """What stands in the places of `parts`, one micro-batch, in the places of `into`."""
    made = [np.zeros(part.shape, np.float32) for part in into]
    where = {place.sequence: (i, place) for i, part in enumerate(into) for place in part.places}
    for place in parts[0].places:
        i, other = where[place.sequence]
        made[i][other.row, other.columns] = table[place.row, place.columns]
    return made


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_SEQUENCES else pytest.param(name, marks=pytest.mark.long)
        for name in [*test_actor.FORMS, "supervised", CRITIC]
    ],
)
def test_every_loss_and_its_gradient_are_those_of_a_sequence_a_row(name: str):
    """As functions of what the model says of each token."""
    rows = ragged(7)
    (alone, one_each), (together, packed) = both(rows)
    said = (-4.5 + 0.3 * np.random.default_rng(0).standard_normal(one_each[0].ids.shape)).astype(np.float32)
    value, gradient, told = total(name, [said], one_each)
    again, of_packed, told_again = total(name, scattered(said, alone, together), packed)
    assert again == pytest.approx(value, rel=1e-5, abs=1e-7)
    close = 1e-3 if name == CRITIC else 1e-5  # its explained variance is a difference of sums of squares
    assert statistics.values(told_again) == pytest.approx(statistics.values(told), rel=close, abs=1e-7)
    for a, b in zip(by_row(gradient, rows, alone), by_row(of_packed, rows, together), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def total(name: str, said: Sequence[np.ndarray], batches: Sequence[Batch]) -> tuple[float, list[np.ndarray], Any]:
    def loss(found: jax.Array, batch: Batch) -> tuple[jax.Array, Any]:
        if name == CRITIC:
            return Ppo(schema.PpoSection(name="ppo"), 1, 16).value_loss(found, batch)
        scores = TokenScores(found, jnp.sin(found))
        section = test_actor.FORMS.get(name)
        return supervised_loss(scores, batch) if section is None else algorithm(section, 1, 16).loss(scores, batch)

    found = [
        jax.value_and_grad(loss, has_aux=True)(jnp.asarray(one), batch)
        for one, batch in zip(said, batches, strict=True)
    ]
    told = statistics.joined([jax.device_get(aux) for (_, aux), _ in found])
    return sum(float(value) for (value, _), _ in found), [np.asarray(g) for _, g in found], told


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_step_of_the_whole_policy_is_that_of_a_sequence_a_row(name: str):
    """Scores, advantages, critic and gradient; and again bit for bit."""
    options = test_policy.ppo_options(beta=0.1) if name == "ppo" else test_policy.OPTIONS
    packed = replace(options, layout=BatchLayout((32,), 1, 0, tokens=32))
    alone, together, again = (POLICY(one) for one in (options, packed, packed))
    a, b, c = (one.step(HELD(1, 2, 3, 4), START) for one in (alone, together, again))
    assert (b.loss, b.grad_norm, b.kl) == pytest.approx((a.loss, a.grad_norm, a.kl), rel=1e-5, abs=1e-6)
    shown = ("computed_tokens", "packing_efficiency", "compiled_shapes")
    assert {k: v for k, v in b.more.items() if k not in shown} == pytest.approx(
        {k: v for k, v in a.more.items() if k not in shown}, rel=1e-4, abs=1e-6
    )
    assert b.more["packing_efficiency"] == 1.0 == b.more["compiled_shapes"]
    assert b == c
    state = [{**one.contents().params, **one.contents().optimizer} for one in (alone, together, again)]
    for key, value in state[0].items():
        assert np.array_equal(state[1][key], state[2][key])
        if ".mu." in key:
            np.testing.assert_allclose(state[1][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama-scaled", "qwen2", "qwen3-moe", "gemma3", "mistral-windowed", "deepseek-v3"])
def test_every_family_turns_by_the_positions_in_the_sequence(family: str, tmp_path):
    from services.trainer.batches.batch import micro_batches
    from tests.trainer.test_families import load

    case = families.case(family)
    model = load(models.write_hf(tmp_path / "hf", case.written, case.weights))
    rows = [supervised_row(ids, [1] * len(ids)) for ids in (case.ids[:5], case.ids, case.ids[:9])]
    layout = BatchLayout((64,), 1, 0, tokens=64)
    parts = arranged(rows, layout, 0)
    scored = [Scorer(model, 1.0).logprobs(params_of(model), b) for b in micro_batches(rows, np.ones(3), layout, 0)]
    found = by_row(scored, rows, parts)
    for one in found:
        np.testing.assert_allclose(one[1:], case.logprobs[: len(one) - 1], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_the_gradient_of_every_algorithm_is_that_of_a_sequence_a_row(name: str):
    """Through the model, in float32: within 1e-5 of the gradient's size."""
    model, rows = model_of(models.random_weights(CONFIG, seed=1), CONFIG), ragged(11)
    section = SECTIONS[name]
    loss = supervised_loss if section is None else algorithm(section, 1, 16).loss
    found = []
    for _, batches in both(rows):
        gradient = jax.jit(jax.value_and_grad(objective(model, loss, 0.9, "gradient"), has_aux=True))
        made = [gradient(params_of(model), batch) for batch in batches]
        found.append(jax.tree.map(lambda *x: np.sum(np.stack(x), 0), *[(value, g) for (value, _), g in made]))
    (value, whole), (again, of_packed) = found
    assert again == pytest.approx(value, rel=1e-5, abs=1e-6)
    norm = np.sqrt(sum(float(np.square(g).sum()) for g in whole.values()))
    apart = np.sqrt(sum(float(np.square(g - of_packed[k]).sum()) for k, g in whole.items()))
    assert apart <= 1e-5 * norm


@pytest.mark.long
def test_packed_rows_divide_over_the_mesh():
    rows, weights = ragged(5), models.random_weights(CONFIG, seed=1)
    layout = BatchLayout((LENGTH,), 2, 0, tokens=2 * LENGTH, shards=2)
    parts = arranged(rows, layout, 0)
    model = model_of(weights, CONFIG, make_mesh((2, 2), ("fsdp", "tp")))
    scored = [Scorer(model, 1.0).logprobs(params_of(model), b) for b in assembled(rows, np.ones(len(rows)), parts, 0)]
    together = arranged(rows, PACKED, 0)
    for a, b in zip(by_row(scored, rows, parts), logprobs(rows, together), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
