"""Size of a rollout server's key/value pool, as sglang-jax's pools are laid out."""

from __future__ import annotations

from typing import Literal

from shared.models.config import ModelConfig
from shared.planning.training import ITEM_SIZES

_ALIGNED = 128
"""Numbers to which the engine rounds up a head's key or value, for the paged attention of TPUs; not on CPUs."""
_POOL_SHARE = 1 / 16  # of a CPU's memory


def row_size(model: ModelConfig) -> int:
    """Return the numbers of a key or value of one head."""
    return model.head_dim if model.latent is None else model.latent.qk_head_dim


def kv_token_bytes(model: ModelConfig, dtype: str, device: Literal["cpu", "tpu", "gpu"], tp_size: int = 1) -> int:
    """Return the bytes of one token's keys and values on each of `tp_size` devices.

    A device has at least one head of keys: with more devices than heads, heads are repeated.
    """
    row = row_size(model)
    row = row if device == "cpu" else -(-row // _ALIGNED) * _ALIGNED
    heads = max(1, model.num_key_value_heads // tp_size)
    return 2 * model.num_hidden_layers * heads * row * ITEM_SIZES[dtype]


def default_pool(model: ModelConfig, dtype: str, running: int, context_length: int, memory: int) -> int:
    """Return the pool's size in tokens on a CPU with `memory` bytes, if rollout.engine.max_total_tokens is not set.

    It has room for four times the running requests, as far as memory allows, so conversations stay cached between
    their turns.
    """
    fitting = int(memory * _POOL_SHARE) // kv_token_bytes(model, dtype, "cpu")
    return min(4 * running * context_length, max(fitting, 2 * context_length))
