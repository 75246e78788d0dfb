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
from shared.planning.serving import ITEM_SIZES

_FLOAT32 = 4
_LEAST_CHUNK, _CHUNK_LOGITS = 64, 2**24
"""Positions whose logits are computed at once, and logits of more of them, as in the trainer's `logprobs`."""
_LOGITS = 3
"""Arrays of a chunk's logits that are live at once in its backward pass."""
_TILE, _MOST_TILES, _TILE_ELSEWHERE = 128, 16, 512
"""Queries and keys of a tile of attention, as in the trainer's `attention`."""
_SCORES = 16
"""Bytes per pair of a query and a key in the backward pass of a tile."""


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
    def tile(self) -> int:
        """Queries, and keys, of a tile of attention."""
        most = max(_TILE, -(-self.length // _MOST_TILES)) if self.on_host else _TILE_ELSEWHERE
        return min(most, self.length)


@dataclass(frozen=True, slots=True)
class _TokenBytes:
    """Bytes of one token: stored by a layer's attention and feed-forward part, and live while each runs backward."""

    attention: float
    feed_forward: float
    inputs: float
    attending: float
    feeding: float


def activations(model: ModelConfig, batch: BatchSize) -> int:
    """Bytes that the largest micro-batch takes on a device between inputs and gradients."""
    one, n_layers, n = _token_bytes(model, batch), model.num_hidden_layers, batch.n_positions / batch.tp
    hidden, item = model.hidden_size, ITEM_SIZES[batch.dtype]
    whole = one.attention + one.feed_forward
    if batch.remat == "none":
        stored, live = whole, max((16 + 2 * item) * hidden, one.attending - whole)
    elif batch.remat == "block":
        stored, live = one.inputs, max(one.attending, one.feeding)
    else:
        stored, live = item * hidden, one.inputs + max(one.attention + one.feeding, one.attending)
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
    item, latent = ITEM_SIZES[batch.dtype], model.latent
    head = model.head_dim if latent is None else latent.qk_head_dim
    queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
    stored = (8 + 2 * item) * (queries + keys) + _FLOAT32 * model.num_attention_heads
    added = (4 + 3 * item) * queries + (8 + 4 * item) * keys  # gradients, and operands of products the other way round
    scores = 0 if batch.splash else _SCORES * model.num_attention_heads * batch.tile**2 / batch.length
    return _TokenBytes(
        attention=stored,
        feed_forward=_feed_forward(model, item),
        inputs=(24 + 2 * item) * model.hidden_size,
        attending=stored + added + scores,
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
    chunk = max(_LEAST_CHUNK, _CHUNK_LOGITS // (batch.rows * model.vocab_size))
    n_logits = batch.rows * min(chunk, batch.length) * model.vocab_size
    projection = model.vocab_size * model.hidden_size / batch.tp
    is_cast = batch.on_host and batch.dtype != "float32"
    gradient = 0 if batch.adapts and not is_cast else _FLOAT32 * projection  # a cast projection is as large
    gathered = ITEM_SIZES[batch.dtype] * projection if batch.mesh.get("fsdp", 1) > 1 else 0
    return _FLOAT32 * _LOGITS * n_logits + gradient + gathered + 16 * batch.n_positions * model.hidden_size
