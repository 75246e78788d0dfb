"""Splash attention, by JAX's interpreter of kernels: values and gradients against float64 numpy and against attention
in blocks; and where it is taken.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.batches.batch import Batch, BatchLayout, micro_batches, supervised_row
from services.trainer.learner.scoring import objective, params_of
from services.trainer.models import attention
from services.trainer.models.attention import Packing, ScoreOptions
from services.trainer.models.family import make_mesh
from services.trainer.models.splash import splash_kernels
from shared.errors import ConfigError
from tests.support import models
from tests.trainer.support import model_of
from volley_families.trainer import splash
from volley_families.trainer.splash import SplashKernels
from volley_supervised.learner.imitation import supervised_loss

K, H = 2, 8
PLAIN, GEMMA = ScoreOptions(), ScoreOptions(scale=0.3, softcap=1.5, window=70)
AXES = ("fsdp", "tp")
ONE, TWO, FOUR = ((shape, AXES) for shape in ((1, 1), (1, 2), (2, 2)))


def packed(length: int, n_rows: int, seed: int, *, shared: bool) -> Batch:
    """Prompts with several answers each, two of which begin alike; or sequences that share nothing."""
    rng = np.random.default_rng(seed)
    rows, prompt = [], rng.integers(1, 90, length // 6)
    for number in range(3 * n_rows):
        own = np.concatenate([prompt[: length // 12], rng.integers(1, 90, length // 10)]) if shared else prompt[:0]
        for _ in range(2):
            answer = rng.integers(1, 90, rng.integers(length // 12, length // 7))
            ids = np.concatenate([own, [number], answer])
            n_prompt = len(own) + 1 if shared else 0
            rows.append(supervised_row(ids, [0] * n_prompt + [1] * (len(ids) - n_prompt)))
    layout = BatchLayout((length,), n_rows, 0, tokens=n_rows * length, shards=n_rows)
    return micro_batches(rows, np.ones(len(rows)), layout, 1)[0]


def attended(
    parts: dict[str, np.ndarray], given: np.ndarray, mask: np.ndarray, options: ScoreOptions
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """float64: what attention gives [B, T, N, H], and the gradients of its sum weighed by `given`."""
    q, n = parts["q"], parts["q"].shape[2] // K
    k, v = (np.repeat(parts[name], n, axis=2) for name in "kv")
    scale = options.scale or 1 / np.sqrt(H)
    scores = scale * np.einsum("bthx,bshx->bhts", q, k)
    capped = options.softcap * np.tanh(scores / options.softcap) if options.softcap else scores
    weights = np.where(mask[:, None], np.exp(capped - capped.max()), 0)
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bthx,bshx->bhts", given, v)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)) * scale
    if options.softcap:
        of_scores *= 1 - np.tanh(scores / options.softcap) ** 2
    gradients = {
        "q": np.einsum("bhts,bshx->bthx", of_scores, k),
        "k": np.einsum("bhts,bthx->bshx", of_scores, q),
        "v": np.einsum("bhts,bthx->bshx", weights, given),
    }
    for name in "kv":
        gradients[name] = gradients[name].reshape(*parts[name].shape[:3], n, H).sum(3)
    return np.einsum("bhts,bshx->bthx", weights, v), gradients


def mask_of(length: int, packing: Packing | None, window: int | None) -> np.ndarray:
    """bool [B, T, T]; a window is counted among those that are seen without it."""
    i, j = np.arange(length)[:, None], np.arange(length)
    found = (j <= i)[None] if packing is None else (j <= i) & (i < packing.visible_until[:, None, :])
    return found & (found[..., ::-1].cumsum(-1)[..., ::-1] <= (window or length))


@pytest.mark.parametrize(
    ("rows", "length", "n_heads", "options", "mesh"),
    [
        ("plain", 256, 4, GEMMA, ONE),
        ("shared", 384, 4, GEMMA, TWO),
        pytest.param("plain", 256, 4, PLAIN, ONE, marks=pytest.mark.long),
        pytest.param("packed", 256, 2, PLAIN, ONE, marks=pytest.mark.long),
        pytest.param("shared", 384, 6, PLAIN, ONE, marks=pytest.mark.long),
        pytest.param("plain", 384, 4, GEMMA, FOUR, marks=pytest.mark.long),
        pytest.param("shared", 1536, 8, GEMMA, FOUR, marks=pytest.mark.long),
    ],
)
def test_values_and_gradients_are_those_of_the_formula_and_of_blocks(
    rows: str, length: int, n_heads: int, options: ScoreOptions, mesh: Any
):
    rng = np.random.default_rng(length)
    packing = None if rows == "plain" else packed(length, 2, length, shared=rows == "shared").packing
    until, positions = (
        (None, np.arange(length)[None]) if packing is None else (packing.visible_until, packing.positions)
    )
    parts = {name: rng.normal(size=(2, length, n, H)) for name, n in zip("qkv", (n_heads, K, K), strict=True)}
    given = rng.normal(size=parts["q"].shape)
    expected, gradients = attended(parts, given, mask_of(length, packing, options.window), options)
    low = {name: jnp.float32(value) for name, value in parts.items()}

    def total(attend: Any, low: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = attend(low["q"], low["k"], low["v"], until, options, positions)
        return jnp.sum(found * given), found

    by_splash = partial(splash.attend, mesh=make_mesh(*mesh), interpret=True)
    for attend in (by_splash, attention.attend):
        (_, found), of_parts = jax.jit(jax.value_and_grad(partial(total, attend), has_aux=True))(low)
        np.testing.assert_allclose(found, expected, atol=3e-6)
        for name, value in of_parts.items():
            np.testing.assert_allclose(value, gradients[name], rtol=1e-5, atol=2e-5)


def test_packed_sequences_share_prompts_where_they_are_meant_to_and_leave_blocks_empty():
    """What the others rest on."""
    shared, apart = (mask_of(384, packed(384, 2, 384, shared=one).packing, None) for one in (True, False))
    assert shared.sum(1).max() > 384 // 2 > 384 // 6 > apart.sum(1).max()  # of a token, how many see it
    assert not apart.reshape(2, 3, 128, 3, 128).any((2, 4))[:, 2, 0].any()


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_is_trained_alike_by_both(is_packed: bool, monkeypatch: pytest.MonkeyPatch):
    """Loss and gradients of a step, rematerialized, on a mesh of both axes."""
    monkeypatch.setattr(splash, "attend", partial(splash.attend, interpret=True))
    config = models.tiny_config(vocab_size=96, hidden_size=32, intermediate_size=32, head_dim=16, num_hidden_layers=1)
    weights, mesh = models.random_weights(config, 0), make_mesh(*FOUR)
    if is_packed:
        batch = packed(128, 2, 0, shared=True)
    else:
        rng = np.random.default_rng(0)
        rows = [supervised_row(rng.integers(1, 96, n), [0] * 3 + [1] * (n - 3)) for n in (30, 128)]
        batch = micro_batches(rows, np.ones(2), BatchLayout((128,), 2, 0), 1)[0]
    found = []
    for by_splash in (True, False):
        kernels = SplashKernels(mesh) if by_splash else None
        model = model_of(weights, config, mesh, splash=kernels, remat="decoder")
        assert all(hasattr(layer.attn, "splash") == by_splash for layer in model.layers)
        gradient = jax.jit(jax.value_and_grad(objective(model, supervised_loss, 1.0), has_aux=True))
        text = gradient.lower(params_of(model), batch).as_text(debug_info=True)
        assert ("splash_mha_dkv" in text) == by_splash
        (loss, _), of_params = gradient(params_of(model), batch)
        found.append((float(loss), of_params))
    (one, ours), (other, theirs) = found
    assert one == pytest.approx(other, rel=1e-5)
    for name, value in theirs.items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_it_is_taken_on_tpus_where_it_can_be_and_refused_where_it_cannot():
    mesh = make_mesh((2, 1), AXES)
    assert splash_kernels("auto", mesh, "tpu") == splash_kernels("splash", mesh, "tpu") == SplashKernels(mesh)
    assert splash_kernels("blocks", mesh, "tpu") is None
    assert splash_kernels("auto", mesh, "cpu") is None
    with pytest.raises(ConfigError, match="kernels for TPUs, and the trainer's devices are of the platform cpu"):
        splash_kernels("splash", mesh, "cpu")
    assert SplashKernels(mesh).fits((4, 384, 2, 64))
    assert not SplashKernels(mesh).fits((4, 400, 2, 64))
    assert not SplashKernels(mesh).fits((1, 384, 2, 64))
