"""Activations of a training step, in closed form.

The sum has the bytes that the backward pass needs for a token in a layer, and the largest of the short-lived parts. The
factors are those of the trainer's gradient function, and are linear in the sizes. XLA adds arrays of its own: in
bfloat16 a cast copy of all parameters on accelerators, and a float32 one of the output projection on CPUs, which
multiply in float32; over fsdp it gathers the output projection. `tests/trainer/test_memory.py` compares the sum with
XLA's allocations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.models.config import ModelConfig
from shared.models.parameters import parameters
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

    `splash` attention stores no scores. `adapts` trains adapters only. `mesh` has the size of each axis: `rows` are
    those of one shard of fsdp, and tp divides their values. `on_host`: the devices are this host's processors.
    """

    rows: int
    length: int
    dtype: str
    remat: str
    splash: bool = False
    adapts: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict[str, int])
    on_host: bool = False

    @property
    def tp(self) -> int:
        return self.mesh.get("tp", 1)

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
    one, n_layers, n = _token_bytes(model, batch), model.num_hidden_layers, batch.n_positions / batch.tp
    hidden, item = model.hidden_size, ITEM_SIZES[batch.dtype]
    whole = one.attention + one.feed_forward + one.scores
    if batch.remat == "none":
        stored, live = whole, max((16 + 2 * item) * hidden, one.attending - whole)
    elif batch.remat == "block":
        stored, live = one.inputs, max(one.attending, one.feeding)
    else:
        stored, live = item * hidden, one.inputs + max(one.attention + one.feeding + one.scores, one.attending)
    layers = n_layers * n * stored
    return int(_casts(model, batch) + layers + max(n * live, _of_logits(model, batch)))


def _casts(model: ModelConfig, batch: BatchSize) -> int:
    """Bytes of the parameters' copy in the activations' dtype; adapters have a base of that dtype.

    A CPU casts each matrix when it is used.
    """
    if batch.dtype == "float32" or batch.adapts or batch.on_host:
        return 0
    return ITEM_SIZES[batch.dtype] * sum(one.n_on_device(batch.mesh) for one in parameters(model).values())


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


def _of_logits(model: ModelConfig, batch: BatchSize) -> float:
    """Bytes of a chunk's logits in the backward pass, of the gathered output projection and of its gradient."""
    n_logits = batch.rows * min(_CHUNK, batch.length) * model.vocab_size
    projection = model.vocab_size * model.hidden_size / batch.tp
    is_cast = batch.on_host and batch.dtype != "float32"
    gradient = 0 if batch.adapts and not is_cast else _FLOAT32 * projection  # a cast projection is as large
    gathered = ITEM_SIZES[batch.dtype] * projection if batch.mesh.get("fsdp", 1) > 1 else 0
    return _FLOAT32 * _LOGITS * n_logits + gradient + gathered + 16 * batch.n_positions * model.hidden_size
