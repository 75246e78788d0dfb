"""Each loss of Tinker's interface against its formula in float64, and its gradient through the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from packages.tinker.tests.trainer.support import SHAPES, base, datum, passed
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.models.lora import LoraOptions
from shared.errors import InputError, NonFinite
from volley_tinker.server import batches, learner
from volley_tinker.server.engine import write_arrays
from volley_tinker.server.learner import Adam, Base, ClientModel
from volley_tinker.server.token_losses import ARRAYS, LOSSES, TokenBatch, token_loss

LORA = LoraOptions(4, 32.0, ("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return base(tmp_path_factory.mktemp("tinker"))


def reference(name: str, p: np.ndarray, batch: TokenBatch) -> float:
    q, a, w = (np.asarray(getattr(batch, one), np.float64) for one in ("behaviour", "advantages", "weights"))
    ratio = np.exp(np.clip(p - q, -20, 20))
    held = np.clip(ratio, np.asarray(batch.low, np.float64), np.asarray(batch.high, np.float64))
    per_token = {
        "cross_entropy": -p,
        "importance_sampling": -ratio * a,
        "ppo": -np.minimum(ratio * a, held * a),
        "cispo": -held * a * p,
        "dro": -(a * p - np.asarray(batch.beta, np.float64) / 2 * (p - q) ** 2),
    }[name]
    return float((per_token * w).sum())


@pytest.mark.parametrize("spread", [0.3, 30.0])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name: str, spread: float):
    """Log-ratios beyond 20 are clipped where the loss has a ratio, and are not in dro, as Tinker documents it."""
    rng = np.random.default_rng(1)
    p, arrays = -rng.random((3, 7)), {one: rng.normal(size=(3, 7)).astype(np.float32) for one in ARRAYS}
    arrays |= {"low": np.full((3, 7), 0.8, np.float32), "high": np.full((3, 7), 1.1, np.float32)}
    arrays["behaviour"] = (p + rng.normal(size=p.shape) * spread).astype(np.float32)
    arrays["weights"][:, 5:] = 0
    ids = np.zeros((3, 7), np.int32)
    batch = TokenBatch(ids, ids, **arrays, beta=np.full((3, 1), 0.07, np.float32))
    given: Any = p.astype(np.float32)
    given[:, 5:] = np.nan  # padding may hold anything
    loss, logprobs = token_loss(name)(TokenScores(given, given), batch)
    assert float(loss) == pytest.approx(reference(name, np.where(np.isnan(given), 0.0, p), batch), rel=1e-5)
    assert np.array_equal(np.asarray(logprobs), given, equal_nan=True)


def test_a_client_loss_is_two_passes(tiny: Base):
    """The gradient of any loss of log-probabilities is that of a cross_entropy with weights -dL/dlog p."""
    data = [datum(1, 9), datum(2, 5)]
    q = [np.full(9, -3.0), np.full(5, -4.0)]
    one, two = (ClientModel(tiny, SHAPES, LORA, 5) for _ in range(2))
    sampled = [datum(i + 1, len(x), logprobs=x, advantages=np.full(len(x), 0.5)) for i, x in enumerate(q)]
    found = one.run(passed(*sampled, loss="importance_sampling"))
    weights = [0.5 * np.exp(p - x) for p, x in zip(found.logprobs, q, strict=True)]
    two.run(passed(*(datum(i + 1, len(w), weights=w) for i, w in enumerate(weights))))
    assert one.step(Adam())["grad_norm:mean"] == pytest.approx(two.step(Adam())["grad_norm:mean"], rel=1e-5)
    assert [len(p) for p in found.logprobs] == [len(one.ids) for one in data]


def test_passes_add_up_and_targets_may_have_columns(tiny: Base):
    """Several passes before a step, and several targets of a token, are the sum of each alone."""
    ids = datum(3, 12)
    both = np.stack([ids.inputs["target_tokens"], ids.inputs["target_tokens"][::-1]], 1)
    padded = np.pad(both, ((0, 0), (0, 1)))  # a column of padding is not computed
    several = replace(SHAPES, tokens=128)
    whole, parts = (ClientModel(tiny, shapes, LORA, 5) for shapes in (several, SHAPES))
    made = whole.run(
        passed(
            batches.Datum(
                ids.ids, {"target_tokens": padded, "weights": np.pad(np.ones((12, 2), np.float32), ((0, 0), (0, 1)))}
            ),
            datum(4, 3),
        )
    )
    for k in range(2):
        one = parts.run(passed(batches.Datum(ids.ids, {"target_tokens": both[:, k]})))
        np.testing.assert_allclose(one.logprobs[0], made.logprobs[0][:, k], atol=1e-5)
    parts.run(passed(datum(4, 3)))
    assert whole.step(Adam())["grad_norm:mean"] == pytest.approx(parts.step(Adam())["grad_norm:mean"], rel=1e-5)
    assert made.logprobs[0].shape == (12, 3)
    assert not made.logprobs[0][:, 2].any()
    assert made.metrics["loss:sum"] == pytest.approx(-sum(float(p.sum()) for p in made.logprobs), rel=1e-5)


@pytest.mark.long
def test_clients_of_one_base_do_not_change_each_other(tiny: Base):
    alone, other, full = (ClientModel(tiny, SHAPES, lora, 7) for lora in (LORA, LORA, None))
    first = alone.checksum()
    for _ in range(2):
        other.run(passed(datum(5, 8)))
        full.run(passed(datum(5, 8)))
        other.step(Adam(learning_rate=0.1))
        full.step(Adam(learning_rate=0.1))
    assert alone.checksum() == first
    before = alone.run(passed(datum(5, 8))).logprobs[0]
    again = ClientModel(tiny, SHAPES, None, 0).run(passed(datum(5, 8))).logprobs[0]
    np.testing.assert_allclose(before, again, atol=1e-5)  # new adapters change nothing, and the base is as it was
    assert np.abs(full.run(passed(datum(5, 8))).logprobs[0] - again).max() > 0.1


def test_a_saved_state_continues_bit_for_bit(tmp_path: Path, tiny: Base):
    one = ClientModel(tiny, SHAPES, LORA, 5)
    one.run(passed(datum(6, 8)))
    one.step(Adam())
    file = tmp_path / "state.safetensors"
    write_arrays(file, one.state())
    two = ClientModel(tiny, SHAPES, LORA, 99, load_file(file))
    assert {k: v.shape for k, v in two.state().items()} == {k: v.shape for k, v in one.state().items()}
    for client in (one, two):
        client.run(passed(datum(7, 8)))
        client.step(Adam(grad_clip_norm=0.1, weight_decay=0.01))
    assert one.checksum() == two.checksum()


def test_a_step_is_that_of_torch_and_nothing_non_finite_gets_in(tiny: Base):
    """One step of AdamW in numpy: bias-corrected moments, decoupled decay."""
    client = ClientModel(tiny, SHAPES, LORA, 5)
    before, adam = client.params(), Adam(learning_rate=0.01, eps=1e-8, weight_decay=0.1)
    client.run(passed(datum(8, 8)))
    (name, value), *_ = ((k, v) for k, v in before.items() if k.endswith("_b"))
    gradient = np.asarray(client._gradient[name], np.float64)
    client.step(adam)
    expected = value - 0.01 * (gradient / (np.abs(gradient) + 1e-8) + 0.1 * value)
    np.testing.assert_allclose(client.params()[name], expected, atol=1e-6)
    kept = client.checksum()
    client.run(passed(datum(8, 8, weights=np.full(8, 3e38))))
    with pytest.raises(NonFinite):
        client.step(adam)
    assert client.checksum() == kept


@pytest.mark.parametrize(("dtype", "is_finite"), [("float32", True), ("bfloat16", False)])
def test_weights_that_only_the_published_dtype_cannot_hold_are_not_finite(dtype: str, is_finite: bool):
    of_one = [{"w": jnp.full(2, value, jnp.float32)} for value in (3.4e38, 0.0, 0.0, 0.0)]
    params, first, second, gradient = of_one
    check = jax.jit(learner._checked, static_argnames="dtype")
    settings = Adam(learning_rate=0.01, eps=1e-8).values()
    norm, found = check(params, first, second, jnp.zeros((), jnp.int32), gradient, settings, dtype=dtype)
    assert (float(norm), bool(found)) == (0.0, is_finite)


@pytest.mark.parametrize(
    "request_",
    [
        passed(),
        passed(datum(1, 9), loss="gspo"),
        passed(datum(1, 9), loss="ppo"),
        passed(datum(1, 49)),
        passed(datum(1, 9, weights=np.ones(8))),
        passed(datum(1, 9, advantages=np.ones(9))),
        passed(datum(1, 9, weights=np.full(9, np.nan))),
        passed(datum(1, 9), config={"beta": 1.0}),
        passed(batches.Datum(np.array([64], np.int32), {"target_tokens": np.array([1])})),
        passed(batches.Datum(np.array([1], np.int32), {"target_tokens": np.array([-1])})),
        passed(batches.Datum(np.array([1], np.int32), {"target_tokens": np.array([1.5])})),
        passed(batches.Datum(np.array([1], np.int32), {"target_tokens": np.zeros((1, 0), np.int64)})),
    ],
)
def test_what_a_loss_cannot_use_is_refused(request_: Any):
    with pytest.raises(InputError):
        batches.check(request_, SHAPES)
