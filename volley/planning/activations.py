"""Activations of a training step, in closed form.

The trainer traces its gradient function and counts the values that are live at once, which takes JAX and seconds. Here
the same sum is written out: the bytes that the backward pass needs for a token in a layer, and the largest of the
short-lived parts. The factors are those of the traced functions, which are linear in the sizes.
`tests/trainer/test_plan.py` compares both with XLA's allocations.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.models.config import ModelConfig
from shared.planning.training import ITEM_SIZES

_FLOAT32 = 4
_CHUNK = 64
"""Positions whose logits are computed at once, as in the trainer's `logprobs`."""
_LOGITS = 3
"""Arrays of a chunk's logits that are live at once in its backward pass."""
_BLOCK, _MOST_BLOCKS = 256, 8
"""Fewest queries of a block of attention, and most blocks, as in the trainer's `attention`."""
_SCORES = 17
"""Bytes per pair of a query and a key in the backward pass of a block of attention."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A micro-batch on one device: `rows` of `length` tokens, and how the model computes them.

    `splash` attention stores no scores. `adapts` trains adapters only.
    """

    rows: int
    length: int
    dtype: str
    remat: str
    splash: bool = False
    adapts: bool = False

    @property
    def n_positions(self) -> int:
        return self.rows * self.length

    @property
    def n_blocks(self) -> int:
        """Blocks of queries in which a row's attention is computed."""
        size = max(_BLOCK, -(-self.length // _MOST_BLOCKS))
        return -(-self.length // size)


@dataclass(frozen=True, slots=True)
class _TokenBytes:
    """Bytes of one token: stored by a layer's attention and feed-forward part, and live while each runs backward."""

    attention: float
    feed_forward: float
    scores: float
    inputs: float
    attending: float
    feeding: float


def activations(model: ModelConfig, batch: BatchSize) -> int:
    """Bytes that the largest micro-batch takes on a device between inputs and gradients."""
    one, n_layers, n = _token_bytes(model, batch), model.num_hidden_layers, batch.n_positions
    hidden, item = model.hidden_size, ITEM_SIZES[batch.dtype]
    casts = 0 if batch.dtype == "float32" or batch.adapts else item * _layer_numbers(model)
    whole = one.attention + one.feed_forward + one.scores
    if batch.remat == "none":
        stored = n_layers * (n * whole + casts)
        layer = n * max((16 + 2 * item) * hidden, one.attending - whole)
    elif batch.remat == "block":
        stored = n_layers * n * one.inputs
        layer = n * max(one.attending, one.feeding) + casts
    else:
        stored = n_layers * n * item * hidden
        layer = n * max(one.attention + one.feeding + one.scores + one.inputs, one.attending + one.inputs) + casts
    return int(stored + max(layer, _of_logits(model, batch)))


def _token_bytes(model: ModelConfig, batch: BatchSize) -> _TokenBytes:
    item, n_blocks = ITEM_SIZES[batch.dtype], batch.n_blocks
    latent = model.latent
    head = model.head_dim if latent is None else latent.qk_head_dim
    queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
    scores = 0 if batch.splash else model.num_attention_heads * batch.length
    of_queries = (12 + 2 * item + (2 if batch.splash else 0)) * queries
    of_keys = (12 + 2 * item) * keys
    sliced = 0 if batch.splash or n_blocks == 1 else item * keys
    attention = of_queries + of_keys + sliced * (n_blocks - 1)
    attending = of_queries + of_keys + sliced * n_blocks + _SCORES * scores / n_blocks
    return _TokenBytes(
        attention=attention,
        feed_forward=_feed_forward(model, item),
        scores=(9.2 + item) * scores if n_blocks == 1 else 0.0,
        inputs=(24 + 2 * item) * model.hidden_size,
        attending=attending,
        feeding=_feeding(model, item),
    )


def _feed_forward(model: ModelConfig, item: int) -> float:
    """Bytes of a token that the feed-forward part stores: the router's choice of experts, or the inner values."""
    experts = model.experts
    if experts is None:
        return 6 * item * model.intermediate_size
    router = 8 * experts.num_experts + 8 * experts.num_experts_per_tok
    chosen = _FLOAT32 * experts.num_experts * experts.num_experts_per_tok
    return router + chosen + 6 * item * experts.shared_size


def _feeding(model: ModelConfig, item: int) -> float:
    """Bytes of a token that are live in the backward pass of the feed-forward part: with experts, of one of them."""
    experts = model.experts
    inner = model.intermediate_size if experts is None else experts.moe_intermediate_size + experts.shared_size
    return 7.25 * item * inner + 4 * model.hidden_size + (0 if experts is None else _feed_forward(model, item))


def _layer_numbers(model: ModelConfig) -> int:
    """Numbers of a layer's matrices that are cast to the activations' dtype at once; of experts, one."""
    experts, hidden = model.experts, model.hidden_size
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    inner = model.intermediate_size if experts is None else experts.moe_intermediate_size + experts.shared_size
    return hidden * (heads + 3 * inner)


def _of_logits(model: ModelConfig, batch: BatchSize) -> int:
    """Bytes of a chunk's logits in the backward pass, and of the gradient of the output projection."""
    n_logits = batch.rows * min(_CHUNK, batch.length) * model.vocab_size
    gradient = 0 if batch.adapts else _FLOAT32 * model.vocab_size * model.hidden_size
    return _FLOAT32 * _LOGITS * n_logits + gradient + 16 * batch.n_positions * model.hidden_size
