"""Passes and optimizer steps of a client's adapters of rank 4 against PEFT's in torch, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.tinker.tests.trainer.support import SHAPES, base, datum, passed
from services.trainer.models.lora import LoraOptions
from tests.support.torch_client import Torch
from tests.trainer.test_torch import PROJECTIONS, apart, by_file, of_adapters, part
from volley_tinker.server.learner import Adam, ClientModel

LORA = LoraOptions(4, 32.0, PROJECTIONS)
STEPS, RATE, CLIP = 4, 3e-3, 800.0


def data(step: int) -> list[tuple[str, int, int, dict[str, np.ndarray]]]:
    """Loss, seed, number of tokens and arrays of each datum of a step: two passes of two."""
    rng, made = np.random.default_rng(step), []
    for i, loss in enumerate(["cross_entropy", "cross_entropy", *2 * [("importance_sampling", "ppo")[step % 2]]]):
        n = int(rng.integers(5, 30))
        arrays = {"weights": rng.choice([0.0, 1.0, 0.5, -0.3], n)}
        if loss != "cross_entropy":
            arrays = {"logprobs": -4.2 + 0.3 * rng.standard_normal(n), "advantages": rng.standard_normal(n)}
        made.append((loss, 10 * step + i, n, {name: value.astype(np.float32) for name, value in arrays.items()}))
    return made


def as_sequence(loss: str, seed: int, n: int, arrays: dict[str, np.ndarray]) -> dict[str, object]:
    ids = np.random.default_rng(seed).integers(0, 64, n + 1).tolist()
    names = {"weights": "weights", "advantages": "advantages", "logprobs": "behaviour"}
    given = {names[name]: [0.0, *value.astype(float).tolist()] for name, value in arrays.items()}
    return {"weights": [1.0] * (n + 1), "ids": ids, "loss": loss, **given}


def test_passes_and_steps_are_those_of_peft(torch: Torch, tmp_path: Path) -> None:
    """Log-probabilities, losses, gradients added over passes, and adapters after each of four steps' optimizer."""
    client = ClientModel(base(tmp_path, n_layers=2), SHAPES, LORA, 5)
    known = torch.ask(
        "train",
        **of_adapters(LORA, client.params()),
        folder=str(tmp_path / "model"),
        steps=[[as_sequence(*one) for one in data(step)] for step in range(STEPS)],
        adamw={"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-12, "weight_decay": 0.1},
        schedule={"warmup": 0, "total": STEPS, "kind": "linear"},
        max_grad_norm=CLIP,
    )
    norms = [float(known[f"{step} norm"]) for step in range(STEPS)]
    for step in range(STEPS):
        given, losses = data(step), 0.0
        for half in (given[:2], given[2:]):
            made = client.run(passed(*(datum(seed, n, **arrays) for _, seed, n, arrays in half), loss=half[0][0]))
            losses += made.metrics["loss:sum"]
            start = given.index(half[0])
            for i, logprobs in enumerate(made.logprobs, start):
                np.testing.assert_allclose(logprobs, known[f"{step} logprobs {i}"], atol=1e-5)
        assert losses == pytest.approx(float(known[f"{step} loss"]), rel=1e-5)
        scale = min(1.0, CLIP / norms[step])
        found = {name: value * scale for name, value in by_file(client._gradient).items()}
        assert apart(found, part(known, f"{step} gradient ")) < 1e-5
        rate = RATE * (1 - step / STEPS)
        norm = client.step(Adam(rate, weight_decay=0.1, grad_clip_norm=CLIP))["grad_norm:mean"]
        assert norm == pytest.approx(norms[step], rel=1e-5)
    assert min(norms) < CLIP < max(norms)
    after = by_file(client.params())
    for name, value in part(known, "after ").items():
        np.testing.assert_allclose(after[name], value, atol=1e-2 * RATE, err_msg=name)
