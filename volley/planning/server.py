"""Memory of a rollout server with Volley's own engine, on each of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.planning.serving import default_pool, kv_token_bytes
from shared.planning.training import ITEM_SIZES
from shared.schema import RunConfig
from volley.planning.devices import DeviceType

_ENGINE_SHARE = 0.88
"""Share of a device that sglang-jax fills with weights and pool, if rollout.engine.max_total_tokens is not set."""
_LOGITS = 5
"""Float32 arrays of the logits of all running requests that exist at once, by libtpu's compiler; tp divides none."""


@dataclass(frozen=True, slots=True)
class ServerEstimate:
    """Bytes on each device of a rollout server.

    Attributes:
        weights: of the serving version.
        arriving: a second copy of the weights, while a new version is loaded beside the serving one.
        step: intermediate values of the largest prefill or decode.
        token: keys and values of one token in the pool.
        pool_tokens: size of the pool in tokens; 0 or less if there is no room for one.
        most_tokens: largest pool that leaves room for the rest.
        limit: bytes that the device has for all of it.
        context_length: tokens of the longest sequence.
    """

    weights: int
    arriving: int
    step: int
    token: int
    pool_tokens: int
    most_tokens: int
    limit: int
    context_length: int

    @property
    def pool(self) -> int:
        return self.token * max(0, self.pool_tokens)

    @property
    def total(self) -> int:
        return self.weights + self.arriving + self.step + self.pool

    @property
    def n_sequences(self) -> int:
        """Sequences of the full length that the pool holds at once."""
        return max(0, self.pool_tokens) // self.context_length


def estimate(config: RunConfig, model: ModelConfig, device: DeviceType) -> ServerEstimate:
    """Estimate the memory of one server of the run on such devices; on a CPU, that of all its processes together."""
    engine, dtype = config.rollout.engine, config.model.dtype
    on_cpu = device.platform == "cpu"
    tp_size = 1 if on_cpu else engine.tp_size
    weights = ITEM_SIZES[dtype] * sum(_on_device(model, tp_size))
    token, step = kv_token_bytes(model, dtype, device.platform, tp_size), _step(config, model, tp_size)
    most = (device.usable - 2 * weights - step) // token
    if engine.max_total_tokens is not None:
        pool = engine.max_total_tokens
    elif on_cpu:
        pool = default_pool(model, dtype, engine.max_running_requests, engine.context_length, device.memory)
    else:
        pool = (int(device.usable * _ENGINE_SHARE) - weights) // token
    return ServerEstimate(weights, weights, step, token, pool, most, device.usable, engine.context_length)


def _on_device(model: ModelConfig, tp_size: int) -> Iterator[int]:
    """Numbers of each parameter on a device: matrices are divided, norms and routers are not."""
    for name, shape in parameters(model).items():
        is_norm = len(shape.shape) == 1 and not name.endswith("_bias")
        parts = 1 if is_norm or "tp" not in shape.axes else tp_size
        if any(f".{kind}_" in name for kind in ("k", "v")) and ".attn." in name:
            parts = min(parts, model.num_key_value_heads)
        yield -(-shape.n // parts)


def _step(config: RunConfig, model: ModelConfig, tp_size: int) -> int:
    """Estimate the intermediate values of a step: those of a layer for the longest prefill, or logits."""
    engine, size = config.rollout.engine, ITEM_SIZES[config.model.dtype]
    inner = max(model.intermediate_size, model.num_attention_heads * model.head_dim)
    if model.experts is not None:
        inner = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
    layer = engine.max_prefill_tokens * size * (4 * model.hidden_size + 3 * -(-inner // tp_size))
    return max(layer, 4 * _LOGITS * engine.max_running_requests * model.vocab_size)
