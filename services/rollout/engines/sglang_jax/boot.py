"""Start sglang-jax's scheduler from an EngineSpec, with the parts that Volley replaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from sgl_jax.srt.layers import embeddings, moe
from sgl_jax.srt.layers.attention import native_backend
from sgl_jax.srt.layers.linear import LinearBase
from sgl_jax.srt.layers.logits_processor import LogitsProcessor
from sgl_jax.srt.mem_cache import memory_pool
from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode
from sgl_jax.srt.models.registry import ModelRegistry
from sgl_jax.srt.server_args import ServerArgs

from services.rollout.engines.base import OPTIONS, EngineSpec
from services.rollout.engines.sglang_jax.link import EngineLink, Message
from services.rollout.engines.sglang_jax.loading.staging import zero_adapters
from services.rollout.engines.sglang_jax.scheduling.adapters import adapted
from services.rollout.engines.sglang_jax.scheduling.attention import BlockAttention, fitted_buffers
from services.rollout.engines.sglang_jax.scheduling.inputs import SamplingRows
from services.rollout.engines.sglang_jax.scheduling.products import (
    expert_products,
    float32_logits,
    linear_through_float32,
)
from services.rollout.engines.sglang_jax.scheduling.requests import no_guide
from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler
from shared import packages
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.serving import row_size, server_memory
from shared.process.host_memory import host_limit

PAGE_SIZE = 16
"""Tokens that the paged attention of TPUs reads at once."""
_SMALLEST_CPU_BATCH = 2
"""XLA for CPUs compiles a batch of one row badly: it copies the whole pool and converts every bfloat16 weight."""
_WATCHDOG_S = 900.0
_ENGINES_LINEAR = LinearBase.__call__
_ENGINES_BUFFERS = memory_pool._get_kv_zero_allocator
_MIB = 2**20


class _ThisProcess:
    """Stand-in for the engine's parent process: a signal to it ends this process, which closes the link."""

    @staticmethod
    def send_signal(_: int) -> None:
        os._exit(1)


def build_scheduler(
    spec: EngineSpec, link: EngineLink, version: str | None, runs_on: str | None = None
) -> RolloutScheduler:
    """Load the model (or only its shapes) and allocate the pool. Raises what the engine raises on a bad model.

    `runs_on` is the platform of this process, if it is not that of `spec` (see tools/lower).
    """
    further = packages.part("engine_classes", required=False) or ()
    ModelRegistry.models |= {one.__name__: one for one in further}
    _replace(LogitsProcessor, "_get_logits", float32_logits)
    _replace(embeddings.Llama3RotaryEmbedding, "_compute_cos_sin", _scaled_cos_sin)
    if spec.device == "cpu":
        _replace(native_backend, "NativeAttention", BlockAttention)
        _replace(LinearBase, "__call__", adapted(linear_through_float32))
        _replace(moe, "gmm", expert_products)
        row = row_size(ModelConfig.read(Path(spec.model_path)))
        _replace(memory_pool, "_get_kv_zero_allocator", fitted_buffers(_ENGINES_BUFFERS, row))
    else:
        _replace(LinearBase, "__call__", adapted(_ENGINES_LINEAR))
    if spec.device == "gpu":
        kernels = packages.part("gpu_kernels")
        _replace(native_backend, "NativeAttention", kernels.GpuAttention)
        _replace(moe, "gmm", kernels.grouped_products)
    if spec.dtype == "float32":  # by default TPUs round the operands to bfloat16, and GPUs to TF32
        jax.config.update("jax_default_matmul_precision", "highest")
    scheduler = RolloutScheduler(_server_args(spec, runs_on or spec.platform), link, version)
    scheduler.step.adapters = zero_adapters(scheduler.runner, spec.adapters)
    for owner in (scheduler, scheduler.tp_worker):
        _replace(owner, "parent_process", _ThisProcess())
    return scheduler


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace a part of sglang-jax that is there; its annotations name only its own."""
    assert hasattr(owner, name), f"sglang-jax has no {name}"
    setattr(owner, name, value)


def _scaled_cos_sin(rotary: Any, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary angles, float32 [n, head_dim / 2] each, with Llama 3's scaled frequencies.

    sglang-jax 0.1.0rc0 computes the scaled frequencies and then rotates by the unscaled ones.
    """
    angles = positions.astype(jnp.float32)[..., None] * rotary._compute_inv_freq(rotary.base)
    return jnp.cos(angles), jnp.sin(angles)


def describe(scheduler: RolloutScheduler, spec: EngineSpec) -> Message:
    config = scheduler.model_config
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.context_len,
        "max_total_tokens": scheduler.max_total_num_tokens,
        "max_running_requests": scheduler.max_running_requests,
        "options": _options(scheduler, spec),
        "eos_token_ids": sorted(int(i) for i in config.hf_eos_token_id or ()),
    }


def _options(scheduler: RolloutScheduler, spec: EngineSpec) -> list[str]:
    """Return which of `OPTIONS` are honoured: constraints need a package, and grammars a tokenizer."""
    if scheduler.guide_of is no_guide:
        return ["min_p"]
    return [name for name in OPTIONS if name != "grammar" or Path(spec.tokenizer or "/").is_file()]


def precompile(scheduler: RolloutScheduler, spec: EngineSpec) -> None:
    """Compile every listed shape with a batch of padding; other shapes compile on first use."""
    manager = scheduler.tp_worker.compilation_manager
    if spec.token_paddings is not None:
        for tokens in manager.token_buckets:
            _run_dummy(
                scheduler, ForwardMode.EXTEND, manager.max_padded_batch_size, tokens, manager.cache_loc_buckets[-1]
            )
    if spec.bs_paddings is not None:
        for size, cache_loc in zip(manager.bs_buckets, manager.cache_loc_buckets, strict=True):
            _run_dummy(scheduler, ForwardMode.DECODE, size, size, cache_loc)


def _run_dummy(scheduler: RolloutScheduler, mode: ForwardMode, size: int, tokens: int, cache_loc: int) -> None:
    manager = scheduler.tp_worker.compilation_manager
    batch: Any = manager._make_dummy_batch(size, tokens, mode, cache_loc, dp_size=1, per_dp_bs_size=size)
    scheduler.step(batch, SamplingRows(size))


def _server_args(spec: EngineSpec, runs_on: str) -> ServerArgs:
    """Build sglang-jax's arguments. Its paged attention is for TPUs; elsewhere Volley's has pages of one token."""
    least = _SMALLEST_CPU_BATCH if spec.device == "cpu" else 1
    running = max(spec.max_running_requests, least)
    bs = spec.bs_paddings or _default_bs(running, _SMALLEST_CPU_BATCH if spec.device == "cpu" else 8)
    tokens = spec.token_paddings or _default_tokens(spec)
    return ServerArgs(
        model_path=os.path.abspath(spec.model_path),
        skip_tokenizer_init=True,
        load_format="auto" if spec.load_weights else "dummy",
        device=runs_on,
        tp_size=spec.tp_size,
        dtype=spec.dtype,
        context_length=spec.context_length,
        max_running_requests=running,
        max_total_tokens=_pool(spec) if spec.max_total_tokens is None else spec.max_total_tokens,
        max_prefill_tokens=spec.max_prefill_tokens,
        chunked_prefill_size=spec.max_prefill_tokens,
        precompile_token_paddings=list(tokens),
        precompile_bs_paddings=sorted({max(size, least) for size in bs}),
        page_size=PAGE_SIZE if spec.device == "tpu" else 1,
        attention_backend=_attention_backend(spec),
        disable_hybrid_swa_memory=True,  # one pool for all layers: a prefix is cached whole, or not at all
        disable_precompile=True,
        disable_overlap_schedule=True,
        random_seed=0,
        watchdog_timeout=_WATCHDOG_S,
        log_level="warning",
    )


def _pool(spec: EngineSpec) -> int | None:
    """Choose the pool's size in tokens, so that a second copy of the weights fits too.

    None leaves it to the engine: the device reports no memory, as where `tools.lower` has none.
    Raises ConfigError if there is no room for one sequence.
    """
    model = ModelConfig.read(Path(spec.model_path))
    sizes = server_memory(
        model, spec.dtype, spec.device, spec.max_running_requests, spec.max_prefill_tokens, spec.tp_size
    )
    if spec.device == "cpu":
        return sizes.default_pool(spec.max_running_requests, spec.context_length, host_limit()[0])
    limits = [stats["bytes_limit"] for device in jax.local_devices() if (stats := device.memory_stats())]
    if not limits:
        return None
    pool = sizes.accelerator_pool(spec.max_running_requests, spec.context_length, min(limits))
    if pool < spec.context_length:
        raise ConfigError(
            f"a device of {min(limits) / _MIB:,.0f} MiB fits {max(0, pool):,} tokens of keys and values, less"
            f" than one sequence of rollout.engine.context_length={spec.context_length}: weights take"
            f" {sizes.weights / _MIB:,.0f} MiB, twice while a version arrives",
            "see `volley plan` for settings that fit",
        )
    return pool


def _attention_backend(spec: EngineSpec) -> str:
    """Paged attention on TPUs; with latent attention that of all heads, whose weights are those of the files."""
    if spec.device != "tpu":
        return "native"
    return "fa" if ModelConfig.read(Path(spec.model_path)).latent is None else "fa_mha"


def _default_bs(largest: int, smallest: int) -> tuple[int, ...]:
    """Return batch sizes by factors of four, so that a batch is padded to at most four times its size."""
    return tuple(sorted({size for i in range(9) if (size := smallest * 4**i) < largest} | {largest}))


def _default_tokens(spec: EngineSpec) -> tuple[int, ...]:
    """The engine's smallest (one token for each request that may run), then 256, 512, … up to the largest.

    On GPUs 256, 1024, …: XLA compiles a shape there in many seconds, because it tries several kernels for each product.
    """
    factor = 4 if spec.device == "gpu" else 2
    largest = spec.max_prefill_tokens
    smallest = min(spec.max_running_requests, largest)
    return tuple(
        sorted({smallest, largest} | {size for i in range(8) if smallest < (size := 256 * factor**i) < largest})
    )
