"""The engine with its model split over four devices: the same tokens as on one, through every way weights change."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engines.base import Engine, EngineSpec, GenerateRequest, GenerateResult
from services.rollout.engines.base import SamplingParams as Sampling
from services.rollout.engines.probe import check_probe
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.staged import LoadedWeights
from services.rollout.weights.checkpoint import examine
from shared.errors import ConfigError, WeightsError
from shared.models.config import ModelConfig
from shared.run.checkpoint_files import Adapter, Probe
from tests.rollout.server import CONTEXT, MAX_PREFILL, MAX_RUNNING, POOL, RolloutProcess, running_server
from tests.support import decoder_reference, models

TP = 4
CONFIG = models.tiny_config()  # 4 heads, 2 of keys and values: each of these is held twice
MODEL = ModelConfig.parse(CONFIG)
SIZES = {
    "context_length": CONTEXT,
    "max_running_requests": MAX_RUNNING,
    "max_prefill_tokens": MAX_PREFILL,
    "max_total_tokens": POOL,
    "token_paddings": (64,),
    "bs_paddings": (16,),
}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    folder = models.write_hf(tmp_path / "model", CONFIG)
    async with open_engine(EngineSpec(str(folder), load_weights=False, tp_size=TP, **SIZES)) as engine:
        yield engine


async def generated(engine: Engine, prompts: Sequence[list[int]], n: int = 16) -> list[GenerateResult]:
    sampling = Sampling(max_new_tokens=n, temperature=0.0, ignore_eos=True)
    asked = [GenerateRequest(f"r{i}", np.array(prompt, np.int32), sampling) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(*map(engine.generate, asked))


async def serve(engine: Engine, folder: Path, mode: str = "retract") -> LoadedWeights:
    """Stages and commits; what is staged, what serves then and what an audit finds later are the same arrays."""
    found = examine(folder, MODEL, "test")
    loaded = await engine.stage(found)
    committed = await engine.commit(found.version, mode)
    audited = await engine.audit()
    for live in (committed.live, audited):
        assert (live.version, live.checksum) == (found.version, loaded.checksum)
    assert audited.logprobs is not None
    assert found.probe_logprobs is not None
    check_probe(audited.logprobs, found.probe_logprobs, found.probe_noise, "float32")
    return loaded


def probe_of(weights: models.Weights, prompt: list[int]) -> Probe:
    expected = decoder_reference.score(weights, CONFIG, prompt[:1], prompt[1:])
    return Probe(tuple(prompt), tuple(expected.tolist()))


async def test_a_model_split_over_four_devices_is_that_of_one(
    engine: Engine, server: RolloutProcess, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Two versions, one of them committed under running requests, one with an array of another version, which is
    refused while the second serves on, and adapters. `server` has the same weights on one device.
    """
    ours = {}
    for seed in (21, 22):
        version = server.new_version()
        server.publish(version, seed)
        weights, probe = server.weights[version], probe_of(server.weights[version], prompts[0])
        ours[version] = models.write_checkpoint(tmp_path, version, CONFIG, weights, probe=probe)
    first, second = ours
    await serve(engine, ours[first])
    running = asyncio.create_task(generated(engine, prompts, 60))
    while (await engine.status()).output_tokens < 10 * len(prompts):
        await asyncio.sleep(0.01)
    await engine.pause()  # else a fast engine is done before the second version is staged
    await serve(engine, ours[second])
    await engine.resume()
    for prompt, answer in zip(prompts, await running, strict=True):
        assert [span.version for span in answer.versions] == [first, second]
        assert same_as_reference(prompt, answer, server.weights) <= 1e-4
    server.post("/update_weights", {"manifest": str(server.root / "pushed" / second / "manifest.json")})
    await equal(engine, server, prompts)
    wrong = {**server.weights[second], "model.layers.1.self_attn.v_proj.weight": wrong_values(server, first)}
    third = server.new_version()
    probe = probe_of(server.weights[second], prompts[0])
    with pytest.raises(WeightsError, match="fingerprint"):
        await serve(engine, models.write_checkpoint(tmp_path, third, CONFIG, wrong, probe=probe))
    assert (await engine.audit()).version == second
    await serve_adapters(engine, prompts, tmp_path)


def wrong_values(server: RolloutProcess, version: str) -> np.ndarray:
    return server.weights[version]["model.layers.1.self_attn.v_proj.weight"]


def same_as_reference(prompt: list[int], answer: GenerateResult, weights: dict[str, models.Weights]) -> float:
    """The largest |log p - reference|, each token under the version that claims it."""
    ids, worst = answer.output_ids.tolist(), 0.0
    for span in answer.versions:
        before, sampled = [*prompt, *ids[: span.start]], ids[span.start : span.end]
        expected = decoder_reference.score(weights[span.version], CONFIG, before, sampled)
        worst = float(np.maximum(worst, np.abs(expected - answer.logprobs[span.start : span.end]).max()))
    return worst


async def serve_adapters(engine: Engine, prompts: list[list[int]], root: Path) -> None:
    """Two, of one base: the engine merges each into the base, split as the model is."""
    base = models.random_weights(CONFIG, 23)
    adapter = Adapter(2, 4.0, models.write_base(root, CONFIG, base))
    for step in (1, 2):
        tree, version = models.random_adapter(CONFIG, step), f"e000009-s{step:06d}"
        merged = models.merged(models.to_tunix(base, CONFIG), tree, adapter.scale)
        probe = probe_of(merged, prompts[0])
        await serve(engine, models.write_adapter(root, version, CONFIG, tree, adapter, probe))
        (answer,) = await generated(engine, prompts[1:2])
        assert same_as_reference(prompts[1], answer, {version: merged}) <= 1e-4


@pytest.mark.parametrize(
    ("tp_size", "change", "named"),
    [
        (3, {}, "tp_size=3 does not divide num_attention_heads=4"),
        (4, {"intermediate_size": 130}, "tp_size=4 does not divide intermediate_size=130"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            "tp_size=4 and num_key_value_heads=6: one must divide",
        ),
    ],
)
async def test_a_model_that_does_not_divide_is_refused(
    tmp_path: Path, tp_size: int, change: dict[str, int], named: str
) -> None:
    folder = models.write_hf(tmp_path / "model", CONFIG | change)
    with pytest.raises(ConfigError, match=named):
        async with open_engine(EngineSpec(str(folder), load_weights=False, tp_size=tp_size)):
            pass


_CHECKSUMS = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from services.rollout.engines.sglang_jax.loading.checksum import checksum

mesh = jax.make_mesh((1, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
rng = np.random.default_rng(0)
for shape, dtype, spec in (
    ((8, 12), "float32", P(None, "tensor")), ((8, 3), "bfloat16", P("tensor")), ((16,), "float32", P("tensor")),
    ((5,), "bfloat16", P()), ((4, 3, 8), "int8", P("tensor", None, None)),
):
    values = np.asarray(jax.numpy.asarray(rng.integers(-99, 99, shape), dtype))
    whole = jax.device_put(values)
    split = jax.device_put(values, NamedSharding(mesh, spec))
    words = values.view(f"uint{8 * values.itemsize}").astype(np.uint32)
    mixed = words + np.arange(values.size, dtype=np.uint32).reshape(shape) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    expected = np.sum(mixed ^ (mixed >> 16), dtype=np.uint32)
    import hashlib
    assert checksum([split]) == checksum([whole]) == hashlib.sha256(expected.tobytes()).hexdigest()[:32], shape
    other = values.copy()
    other.flat[-1] += 1
    assert checksum([jax.device_put(other, NamedSharding(mesh, spec))]) != checksum([whole])
"""


def test_a_checksum_is_that_of_the_whole_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever devices hold which part; the expected one is numpy's."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={TP}")
    done = subprocess.run([sys.executable, "-c", _CHECKSUMS], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_server_over_four_devices_takes_every_version(prompts: list[list[int]], tmp_path: Path) -> None:
    """By catching up and by a push while it answers; biases of keys and values are repeated with their heads."""
    config = models.tiny_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    with running_server(tmp_path, config, f"rollout.engine.tp_size={TP}") as split:
        assert split.error(prompts[0], split.generate(prompts[0], 16)) <= 1e-4
        running = split.start(prompts[1], 100)
        version = split.new_version()
        split.publish(version, 1)
        split.post("/update_weights", {"manifest": str(split.root / "pushed" / version)})
        assert split.error(prompts[1], running.result()) <= 1e-4
        answer = split.generate(prompts[2], 16, temperature=0.7, sampling_seed=5)
        assert split.get("/weights")["current"] == version
        again = split.generate(prompts[2], 16, temperature=0.7, sampling_seed=5)
        assert answer["output_ids"].tolist() == again["output_ids"].tolist()


async def equal(engine: Engine, server: RolloutProcess, prompts: Sequence[list[int]]) -> None:
    """Greedy ids are equal, log-probabilities within 1e-5."""
    for prompt, split in zip(prompts, await generated(engine, prompts), strict=True):
        whole = server.generate(prompt, 16)
        assert split.output_ids.tolist() == whole["output_ids"].tolist()
        np.testing.assert_allclose(split.logprobs, whole["meta_info"]["output_token_logprobs"], atol=1e-5)
