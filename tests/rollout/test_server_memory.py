"""Memory of a rollout server that `volley plan` estimates, against the arrays of an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.staged import StagedWeights
from shared import config
from shared.models.config import ModelConfig
from shared.planning.serving import ServerMemory, kv_token_bytes
from shared.published.chunks import ChunkFolder, cut, in_order
from shared.run.checkpoint_files import ManifestFile, ManifestLeaf
from tests.support import families, models
from tests.support.memory import most_resident
from tools.lower.engine import booted
from volley_launch.planning import host, server
from volley_launch.planning.devices import DeviceType, this_host
from volley_launch.planning.evaluation import PlannedDevices, evaluate

N_TOKENS = 2048
LARGE = models.tiny_config(vocab_size=2**16, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, head_dim=64)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])
def test_weights_and_pool_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """The engine that a TPU would have, on a CPU: its pool has rows of 128 numbers."""
    models.write_hf(tmp_path / "model", families.case(name).config)
    sizes = {"context_length": 256, "max_running_requests": 8, "max_prefill_tokens": 64, "max_total_tokens": N_TOKENS}
    spec = EngineSpec(str(tmp_path / "model"), load_weights=False, dtype="bfloat16", device="tpu", **sizes)
    runner = booted(spec).runner
    model = ModelConfig.read(tmp_path / "model")
    overrides = [f"rollout.engine.{key}={value}" for key, value in sizes.items()]
    run = config.load(
        ["configs/quickstart.yaml"], [*overrides, "model.dtype=bfloat16", "trainer.length_buckets=[256]"]
    ).config
    found = server.estimate(run, model, DeviceType("v5e", "tpu", 2**30))
    assert found.weights == pytest.approx(sum(leaf.nbytes for leaf in runner.model_state_leaves), rel=0.02)
    pool = sum(buffer.nbytes for buffer in jax.tree.leaves(runner.token_to_kv_pool.kv_buffer))
    assert found.token == kv_token_bytes(model, "bfloat16", "tpu")
    assert found.pool == pytest.approx(pool, rel=0.02)


def chunked(folder: Path, version: str, seed: int) -> StagedWeights:
    """A version of LARGE, as a trainer publishes it."""
    arrays = models.random_weights(LARGE, seed)
    leaves, chunks = in_order(ManifestLeaf(k, v.shape, str(v.dtype)) for k, v in arrays.items()), ChunkFolder(folder)
    parts = cut(leaves, {key: partial(np.asarray, value) for key, value in arrays.items()})
    files = tuple(ManifestFile(name := chunks.put(part), len(part), name) for part in parts)
    return StagedWeights(str(folder), version, version, "chunks", files=files, tree=tuple(leaves))


async def test_an_engine_takes_what_the_plan_says_while_it_decodes_and_loads_its_weights_again(tmp_path: Path) -> None:
    """Its process on a CPU, whose heads are half as wide as those that the engine allots for TPUs."""
    folder = models.write_hf(tmp_path / "model", LARGE)
    sizes = {"context_length": 256, "max_running_requests": 8, "max_prefill_tokens": 256, "max_total_tokens": 2**16}
    shapes = {"token_paddings": (256,), "bs_paddings": (8,)}
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    async with open_engine(EngineSpec(str(folder), load_weights=False, **sizes, **shapes)) as engine:
        for step in range(2):
            staged = await engine.stage(chunked(tmp_path / "chunks", version := f"e000001-s{step:06}", step))
            assert staged.checksum == (await engine.commit(version, "retract")).live.checksum
            await engine.generate(GenerateRequest("r", np.arange(200, dtype=np.int32), sampling))
        peak = most_resident(engine.info.pid)
    overrides = [f"rollout.engine.{key}={value}" for key, value in sizes.items()]
    overrides += [f"rollout.engine.precompile_{key}=[{value[0]}]" for key, value in shapes.items()]
    run = config.load(["configs/quickstart.yaml"], [*overrides, "trainer.length_buckets=[256]"]).config
    model = ModelConfig.read(folder)
    found = evaluate(run, model, PlannedDevices(this_host(), this_host())).host
    assert found is not None
    planned = found.server - host.service_bytes(model)
    assert 0.7 < peak / planned <= 1.1  # mostly 0.8; a loaded machine frees the weights before later


@pytest.mark.parametrize("device", ["cpu", "tpu", "gpu"])
def test_jax_knows_the_platform_of_an_engine_and_takes_no_other(device: Literal["cpu", "tpu", "gpu"]) -> None:
    platform = EngineSpec("model", device=device).platform
    assert xla_bridge.expand_platform_alias(platform) == [platform]


def test_the_pool_of_a_cpu_is_a_sixteenth_of_its_memory_at_most() -> None:
    sizes = ServerMemory(weights=0, step=0, token=1 << 10)
    assert sizes.default_pool(1000, 1000, 1 << 30) == 1 << 16
    assert sizes.default_pool(2, 1000, 1 << 30) == 8000
