"""Memory of a rollout server on each of its devices, as sglang-jax lays it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.schema import RunConfig

type Platform = Literal["cpu", "tpu", "gpu"]

ITEM_SIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
_ALIGNED = 128
"""Numbers to which the engine rounds up a head's key or value, for the paged attention of TPUs; not on CPUs."""
_POOL_SHARE = 1 / 16  # of a CPU's memory
_MOST_CACHED = 16
"""Size of an accelerator's pool at most, as a multiple of what the running requests take."""
_ENGINE_SHARE = 0.88
"""Share of a device that sglang-jax fills with weights and pool at most."""
_SPARE, _LEAST_SPARE = 0.1, 2**30
"""Share and bytes of a device that stay free at least: fragments, workspaces, and trials of kernels by the compiler."""
_LOGITS, _CPU_LOGITS = 5, 7
"""Float32 arrays of the logits of all running requests that exist at once, by libtpu's compiler; tp divides none. XLA
for CPUs has more, beside the values of a layer.
"""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes on each device of a rollout server.

    Attributes:
        weights: one copy of them; a second one exists while a version arrives.
        step: intermediate values of the largest prefill or decode.
        token: keys and values of one token in the pool.
    """

    weights: int
    step: int
    token: int

    def largest_pool(self, memory: int, *, full: bool = False) -> int:
        """Tokens of the largest pool on an accelerator with `memory` bytes; 0 or less if there is no room for one.

        With `full`, no memory is spared.
        """
        filled = int(memory * _ENGINE_SHARE) - self.weights
        spare = 0 if full else max(int(memory * _SPARE), _LEAST_SPARE)
        return min(filled, memory - spare - 2 * self.weights - self.step) // self.token

    def accelerator_pool(self, running: int, context_length: int, memory: int) -> int:
        """Tokens of an accelerator's pool if rollout.engine.max_total_tokens is not set: all that fits and helps."""
        return min(self.largest_pool(memory), _MOST_CACHED * running * context_length)

    def needed(self, pool: int) -> int:
        """Bytes of an accelerator whose largest pool has `pool` tokens."""
        kept = self.weights + self.token * pool
        total = kept + self.weights + self.step
        return int(max(kept / _ENGINE_SHARE, total / (1 - _SPARE), total + _LEAST_SPARE)) + 1

    def default_pool(self, running: int, context_length: int, memory: int, share: float = _POOL_SHARE) -> int:
        """Tokens of the pool if rollout.engine.max_total_tokens is not set: on a CPU, and on a shared GPU.

        The pool has room for four times the running requests, as far as `share` of the memory allows, so conversations
        stay cached between their turns.
        """
        fitting = int(memory * share) // self.token
        return min(4 * running * context_length, max(fitting, 2 * context_length))


def server_memory(
    model: ModelConfig,
    dtype: str,
    device: Platform,
    running: int,
    prefill: int,
    tp_size: int = 1,
) -> ServerMemory:
    """Estimate a server's memory.

    Args:
        running: most running requests.
        prefill: most tokens of a prefill.
        tp_size: devices of the server; on a CPU its parts are counted together.
    """
    parts = 1 if device == "cpu" else tp_size
    return ServerMemory(
        weights=ITEM_SIZES[dtype] * sum(_on_device(model, parts)),
        step=_step(model, dtype, running, prefill, parts, on_cpu=device == "cpu"),
        token=kv_token_bytes(model, dtype, device, parts),
    )


def of_run(config: RunConfig, model: ModelConfig, device: Platform) -> ServerMemory:
    """Estimate the memory of a server of the run."""
    engine = config.rollout.engine
    running, prefill = engine.max_running_requests, engine.max_prefill_tokens
    return server_memory(model, config.model.dtype, device, running, prefill, engine.tp_size)


def row_size(model: ModelConfig) -> int:
    """Return the numbers of a key or value of one head."""
    return model.head_dim if model.latent is None else model.latent.qk_head_dim


def kv_token_bytes(model: ModelConfig, dtype: str, device: Platform, tp_size: int = 1) -> int:
    """Return the bytes of one token's keys and values on each of `tp_size` devices.

    A device has at least one head of keys: with more devices than heads, heads are repeated.
    """
    row = row_size(model)
    row = row if device == "cpu" else -(-row // _ALIGNED) * _ALIGNED
    heads = max(1, model.num_key_value_heads // tp_size)
    return 2 * model.num_hidden_layers * heads * row * ITEM_SIZES[dtype]


def _on_device(model: ModelConfig, tp_size: int) -> Iterator[int]:
    """Numbers of each parameter on a device: matrices are divided, norms and routers are not."""
    for name, shape in parameters(model).items():
        is_norm = len(shape.shape) == 1 and not name.endswith("_bias")
        parts = 1 if is_norm or "tp" not in shape.axes else tp_size
        if any(f".{kind}_" in name for kind in ("k", "v")) and ".attn." in name:
            parts = min(parts, model.num_key_value_heads)
        yield -(-shape.n // parts)


def _step(model: ModelConfig, dtype: str, running: int, prefill: int, tp_size: int, *, on_cpu: bool) -> int:
    """Estimate the intermediate values of a step: those of a layer for the longest prefill, or logits; a CPU has both.

    A CPU computes the products of bfloat16 in float32.
    """
    inner = max(model.intermediate_size, model.num_attention_heads * model.head_dim)
    if model.experts is not None:
        inner = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
    item = 4 if on_cpu else ITEM_SIZES[dtype]
    layer = prefill * item * (4 * model.hidden_size + 3 * -(-inner // tp_size))
    if on_cpu:
        return layer + 4 * _CPU_LOGITS * running * model.vocab_size
    return max(layer, 4 * _LOGITS * running * model.vocab_size)
