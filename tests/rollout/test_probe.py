"""What the probe must find, in either dtype: planted in models of several shapes, numerically and on
the real engine.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from services.rollout.engines.base import EngineSpec
from services.rollout.engines.probe import check_probe
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.staged import StagedWeights
from shared.errors import WeightsError
from tests.support import decoder_reference, models
from tests.support.models import Weights

LENGTH = 64
Config = dict[str, Any]
SHAPES: dict[str, Config] = {
    "tied": {
        "head_dim": 64,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 96,
        "intermediate_size": 96,
    },
    "peaked": {"num_hidden_layers": 6, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 64},
    "flat": {"num_hidden_layers": 5, "rope_theta": 1e6, "intermediate_size": 64},
}


def model(name: str, seed: int = 1) -> tuple[Config, Weights]:
    """Peaked: log-probabilities of -15 to -70; flat: as before any training, all near -log(vocabulary)."""
    config = models.tiny_config(**SHAPES[name], tie_word_embeddings=name != "peaked")
    weights = models.random_weights(config, seed)
    if name == "peaked":
        weights["lm_head.weight"] *= 4
    if name == "flat":
        weights = {key: value if "norm" in key else value * (0.02 / value.std()) for key, value in weights.items()}
    return config, weights


def probe_ids(config: Config) -> list[int]:
    return ((np.arange(LENGTH) * 7919 + 11) % config["vocab_size"]).tolist()


def score(weights: Weights, config: Config, keep: decoder_reference.Round | None = None) -> np.ndarray:
    ids = probe_ids(config)
    return decoder_reference.score(weights, config, ids[:1], ids[1:], **({"keep": keep} if keep else {}))


def rounded(weights: Weights) -> Weights:
    return {key: decoder_reference.bfloat16(value.astype(np.float64)) for key, value in weights.items()}


def swapped_layers(weights: Weights, config: Config, other: Weights) -> Weights:
    """The last two."""
    a, b = (f"layers.{config['num_hidden_layers'] - n}." for n in (1, 2))
    return {key: weights[key.replace(a, b) if a in key else key.replace(b, a)] for key in weights}


def stale_leaf(weights: Weights, config: Config, other: Weights) -> Weights:
    key = "model.layers.1.self_attn.v_proj.weight"
    return weights | {key: other[key]}


def stale_rows(weights: Weights, config: Config, other: Weights) -> Weights:
    """An eighth of the vocabulary."""
    key, n = "model.embed_tokens.weight", config["vocab_size"] // 8
    return weights | {key: np.concatenate([weights[key][:-n], other[key][-n:]])}


def transposed(weights: Weights, config: Config, other: Weights) -> Weights:
    key = "model.layers.0.mlp.up_proj.weight"
    assert weights[key].shape[0] == weights[key].shape[1]
    return weights | {key: np.ascontiguousarray(weights[key].T)}


DAMAGES = [swapped_layers, stale_leaf, stale_rows, transposed]


def keeping(dtype: str) -> decoder_reference.Round | None:
    return decoder_reference.bfloat16 if dtype == "bfloat16" else None


@cache
def told_by_the_trainer(name: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The right weights' log-probabilities, and by how much rounding moves each of them."""
    config, weights = model(name)
    expected = score(rounded(weights) if dtype == "bfloat16" else weights, config)
    return expected, noise_of(weights, config, expected, dtype)


def noise_of(weights: Weights, config: Config, expected: np.ndarray, dtype: str) -> np.ndarray:
    own = np.abs(score(weights, config, keeping(dtype)) - expected)
    return np.hypot(own, np.median(own)).astype(np.float32)


def judge(name: str, dtype: str, weights: Weights, config: Config) -> None:
    """As an engine that computes with `weights` and `config` is judged by what the trainer says of the right ones."""
    expected, noise = told_by_the_trainer(name, dtype)
    check_probe(score(weights, config, keeping(dtype)).astype(np.float32), expected.astype(np.float32), noise, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_planted_damage_is_refused_in_either_dtype(name: str, dtype: str) -> None:
    config, weights = model(name)
    other = model(name, seed=2)[1]
    judge(name, dtype, weights, config)
    for damage in DAMAGES:
        with pytest.raises(WeightsError, match="fingerprint"):
            judge(name, dtype, damage(weights, config, other), config)
    with pytest.raises(WeightsError, match="fingerprint"):
        judge(name, dtype, weights, config | {"rope_theta": 1e6 if config["rope_theta"] < 1e6 else 1e4})


def swapped_gains(weights: Weights) -> Weights:
    names = {"q_norm": "k_norm", "k_norm": "q_norm"}
    return {key: weights[".".join(names.get(part, part) for part in key.split("."))] for key in weights}


@pytest.mark.parametrize("name", ["tied", "peaked"])
def test_exchanged_gains_of_queries_and_keys_are_refused(name: str) -> None:
    """They enter the scores only by their difference between the two halves of a head; where they hardly differ,
    float32 tells.
    """
    config, weights = model(name)
    with pytest.raises(WeightsError, match="fingerprint"):
        judge(name, "float32", swapped_gains(weights), config)


@pytest.mark.parametrize("name", SHAPES)
def test_a_change_below_the_rounding_is_seen_in_float32_only(name: str) -> None:
    """One part in 3,000 of every weight, as after a step of training; in bfloat16 it is for the checksum to find."""
    config, weights = model(name)
    rng = np.random.default_rng(0)
    older = {
        key: value * (1 + 3e-4 * rng.choice([-1, 1], value.shape)).astype(np.float32) for key, value in weights.items()
    }
    judge(name, "bfloat16", older, config)
    with pytest.raises(WeightsError, match="fingerprint"):
        judge(name, "float32", older, config)


def test_adapters_that_were_rounded_with_their_base_are_refused() -> None:
    """A step of training moves weights by less than bfloat16 resolves; the probe's reference does not round it away."""
    config, weights = model("tied")
    tree = models.random_adapter(config, 1)
    tree = {name: value * (1e-3 if name.endswith("_lora_b") else 1.0) for name, value in tree.items()}
    base = models.to_tunix(rounded(weights), config)
    merged = models.merged(base, tree, 2.0)
    expected = score(merged, config)
    noise = np.full(expected.shape, 1e-6, np.float32)
    check_probe(expected.astype(np.float32), expected, noise, "float32")
    with pytest.raises(WeightsError, match="fingerprint"):
        check_probe(score(rounded(merged), config), expected, noise, "float32")


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_refused(wrong: float) -> None:
    for noise in (None, np.full(2, 0.1, np.float32)):
        with pytest.raises(WeightsError, match="fingerprint"):
            check_probe(np.array([-1.0, wrong], np.float32), np.array([-1.0, -2.0], np.float32), noise, "bfloat16")


def test_probes_of_earlier_versions_are_judged_by_a_fixed_bound() -> None:
    expected = np.full(15, -6.0, np.float32)
    check_probe(expected + 0.15, expected, None, "bfloat16")
    check_probe(expected + 5e-4, expected, None, "float32")


@pytest.mark.parametrize("outlier", [0.6, 15.0])
def test_no_few_tokens_decide(outlier: float) -> None:
    """Trained models have tokens that rounding moves many times as far as the others."""
    expected, noise = np.full(63, -6.0, np.float32), np.full(63, 0.05, np.float32)
    found = expected + noise
    found[[3, 40]] += outlier
    check_probe(found, expected, noise, "bfloat16")
    with pytest.raises(WeightsError, match="fingerprint"):
        check_probe(expected + 3 * noise, expected, noise, "bfloat16")


def test_probes_without_noise_are_refused_beyond_the_fixed_bound() -> None:
    expected = np.full(15, -6.0, np.float32)
    with pytest.raises(WeightsError, match="fingerprint"):
        check_probe(expected + 0.25, expected, None, "bfloat16")


@pytest.mark.long
async def test_the_real_engine_in_bfloat16_refuses_what_is_planted(tmp_path: Path) -> None:
    """64 tokens in four batches of 16: the later ones attend to what the earlier ones wrote."""
    config, weights = model("tied")
    expected = score(rounded(weights), config)
    noise = noise_of(weights, config, expected, "bfloat16")
    sizes = {"max_running_requests": 16, "context_length": 128, "max_prefill_tokens": 64, "max_total_tokens": 512}
    spec = EngineSpec(str(models.write_hf(tmp_path / "model", config)), load_weights=False, dtype="bfloat16", **sizes)
    ids = np.array(probe_ids(config), np.int32)

    def staged(name: str, weights: Weights) -> StagedWeights:
        halved = {key: value.astype(ml_dtypes.bfloat16) for key, value in weights.items()}
        folder = models.write_hf(tmp_path / name, config, halved)
        return StagedWeights(
            str(folder), name, kind="hf", probe_ids=ids, probe_logprobs=expected.astype(np.float32), probe_noise=noise
        )

    other = model("tied", seed=2)[1]
    async with open_engine(spec) as engine:
        await engine.stage(staged("right", weights))
        damages: list[Callable[[Weights, Config, Weights], Weights]] = DAMAGES
        for damage in damages:
            with pytest.raises(WeightsError, match="on the probe of 63 tokens"):
                await engine.stage(staged(damage.__name__, damage(weights, config, other)))
