"""Log-probabilities of given tokens, for objectives, references and the probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from services.trainer.algorithms.terms.logprobs import Entropy, TokenScores, token_scores
from services.trainer.algorithms.terms.statistics import Statistics, mean
from services.trainer.batches.batch import Batch
from services.trainer.learner.train_step import ROW_AXES, Params, PolicyLearner, placed_as, snapshot
from services.trainer.models.attention import Packing
from services.trainer.models.decoder import hidden_states, routed_states
from services.trainer.models.family import Model, float32_graph, head, leaf_name
from services.trainer.models.sharding import place, placed_tree, replicated
from shared.models import adapter

type Loss = Callable[[TokenScores, Batch], tuple[jax.Array, Statistics]]
type Bound = Callable[[Mapping[str, Any]], Model]
type Score = Callable[[Params, jax.Array, jax.Array, Packing | None, jax.Array | None], jax.Array]
HOST = "pinned_host"
"""JAX's name, on every platform, of host memory that devices can read."""


def params_of(model: Model) -> Params:
    """Return the model's parameters by leaf name, on their devices."""
    return {leaf_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def bound_to(model: Model, graph: Any = None) -> Bound:
    """Return a function that makes the model with other parameters, which may be traced.

    With `graph` it makes that graph instead, of the same state without adapters.
    """
    own, state = nnx.split(model)
    leaves = list(nnx.to_flat_state(state))
    if graph is not None:
        leaves = [(path, variable) for path, variable in leaves if not adapter.is_adapter(leaf_name(path))]
    graph = own if graph is None else graph

    def bound(params: Mapping[str, Any]) -> Model:
        return nnx.merge(graph, nnx.from_flat_state([(path, v.replace(params[leaf_name(path)])) for path, v in leaves]))

    return bound


def put_into(model: Model, params: Params) -> None:
    """Set the model's parameters."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.from_flat_state([(path, v.replace(params[leaf_name(path)])) for path, v in leaves]))


def objective[R](
    model: Model,
    loss: Callable[[TokenScores, Batch], tuple[R, Statistics]],
    temperature: float,
    entropy: Entropy = "value",
) -> Callable[[Params, Batch], tuple[R, Statistics]]:
    """Make the loss, or another function of the tokens' scores, a function of the parameters."""
    bound = bound_to(model)

    def of_params(params: Params, batch: Batch) -> tuple[R, Statistics]:
        now = bound(params)
        hidden, differing = routed_states(now, batch.ids, batch.packing, batch.routed)
        value, statistics = loss(_scored(now, hidden, batch.targets, temperature, entropy), batch)
        if batch.routed is not None:
            statistics = {**statistics, "routing_diff": mean(differing, batch.mask * (batch.routed[:, :, 0, 0] >= 0))}
        return value, statistics

    return of_params


class Scorer:
    """Scores tokens; compiled once for each shape, on the mesh of the model's parameters."""

    def __init__(self, model: Model, temperature: float) -> None:
        self._mesh = model.embedder.input_embedding.get_value().sharding.mesh
        self._rows = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._score, self._score_plain, self._score_exactly = (
            jax.jit(score, out_shardings=replicated(self._mesh))
            for score in (*(_scorer(bound_to(model), t) for t in (temperature, 1.0)), _exact_scorer(model))
        )
        self._scores_exactly = jax.jit(_exact_scores(model, temperature, "value"), out_shardings=replicated(self._mesh))
        is_exact = model.config.dtype == jnp.float32 and self._mesh.devices.flat[0].platform == "cpu"
        self._computes_exactly = is_exact and model.lora is None and model.described.routing is None

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Compute float32 [B, T]: log-probabilities of `batch.targets`."""
        inputs = placed_tree((batch.ids, batch.targets, batch.packing, batch.routed), self._rows)
        with self._mesh:
            return np.asarray(self._score(params, *inputs))

    def compare(self, params: Params, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score `batch.targets`, as `logprobs`, in float32 from the parameters as published, and in the model's dtype.

        Returns:
            float32 [B, T] each: exact log-probabilities, the model's own, and the exact entropies in nats.
        """
        inputs = placed_tree((batch.ids, batch.targets, batch.packing, batch.routed), self._rows)
        with self._mesh:
            exact, entropy = map(np.asarray, self._scores_exactly(params, *inputs))
        return exact, exact if self._computes_exactly else self.logprobs(params, batch), entropy

    def probe(self, params: Params, ids: np.ndarray) -> tuple[np.ndarray, float]:
        """Score ids[1:] (int32 [n]) given the ids before them, at temperature 1.

        Returns:
            float32 [n-1]: log-probabilities, computed in float32 from the parameters as rounded to the model's dtype;
            and the mean |difference| of the model's own arithmetic from them.
        """
        inputs, targets = ids[None, :-1], ids[None, 1:]
        with self._mesh:
            exact = own = np.asarray(self._score_exactly(params, inputs, targets, None, None))[0]
            if not self._computes_exactly:
                own = np.asarray(self._score_plain(params, inputs, targets, None, None))[0]
        with np.errstate(invalid="ignore"):  # NaN if the weights compute non-finite numbers
            return exact, float(np.abs(own - exact).mean())


def _scorer(bound: Bound, temperature: float) -> Score:
    scores = _scores(bound, temperature, "none")
    return lambda *given: scores(*given).logprobs


def _scores(bound: Bound, temperature: float, entropy: Entropy) -> Callable[..., TokenScores]:
    def score(
        params: Params, ids: jax.Array, targets: jax.Array, packing: Packing | None, routed: jax.Array | None
    ) -> TokenScores:
        model = bound(params)
        return _scored(model, hidden_states(model, ids, packing, routed), targets, temperature, entropy)

    return score


def _scored(model: Model, hidden: jax.Array, targets: jax.Array, temperature: float, entropy: Entropy) -> TokenScores:
    softcap = model.described.logit_softcap
    return token_scores(hidden, head(model), targets, temperature, entropy, softcap=softcap)


def without_adapters(params: Params) -> Params:
    """Return the base model's parameters: shared arrays, and adapters of zeros."""
    return {name: jnp.zeros_like(value) if adapter.is_adapter(name) else value for name, value in params.items()}


class Reference:
    """A frozen policy.

    Args:
        values: its parameters by leaf name; None takes the learner's present ones. With adapters the reference is their
            base, shared with the learner.
        offload: keep it in host memory between its passes; the values are the same, bit for bit.
    """

    def __init__(
        self, learner: PolicyLearner, values: Mapping[str, Any] | None = None, *, offload: bool = False
    ) -> None:
        present = learner.params
        self._on_devices = {name: value.sharding for name, value in present.items()}
        if learner.frozen:
            self._params = without_adapters(present)
        elif offload:
            hosts = {name: sharding.with_memory_kind(HOST) for name, sharding in self._on_devices.items()}
            from_ = present if values is None else values
            self._params = {name: place(from_[name], hosts[name], value.dtype) for name, value in present.items()}
        else:
            self._params = snapshot(present) if values is None else placed_as(present, values)

    def params(self) -> Params:
        """Parameters on the devices; offloaded ones are copied for one pass."""
        return {name: jax.device_put(value, self._on_devices[name]) for name, value in self._params.items()}


def divided(params: Params) -> tuple[Params, Params]:
    """Split parameters into trained and frozen: adapters and their base, or, without adapters, all and none."""
    adapters = {name: value for name, value in params.items() if adapter.is_adapter(name)}
    return (adapters, {k: v for k, v in params.items() if k not in adapters}) if adapters else (params, {})


def _merged(params: Params, scale: float) -> Params:
    """Merge adapters in float32, as `shared.models.adapter.merged` does with published ones."""
    made = {name: value.astype(jnp.float32) for name, value in params.items() if not adapter.is_adapter(name)}
    for name in adapter.weights_of(params):
        made[name] += scale * jnp.tensordot(params[adapter.a_name(name)], params[adapter.b_name(name)], 1)
    return made


def _exact_scorer(model: Model) -> Score:
    """Make an exact scorer at temperature 1."""
    scores = _exact_scores(model, 1.0, "none")
    return lambda *given: scores(*given).logprobs


def _exact_scores(model: Model, temperature: float, entropy: Entropy) -> Callable[..., TokenScores]:
    """Make a scorer that rounds parameters to the model's dtype, as published, and computes in float32.

    It takes the arguments of `Score`.
    """
    bound, dtype = bound_to(model, float32_graph(model)), jnp.finfo(model.config.dtype)
    score, scale = _scores(bound, temperature, entropy), model.lora.scale if model.lora else 0.0

    def published(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)  # a cast there and back is optimized away

    def score_exactly(
        params: Params, ids: jax.Array, targets: jax.Array, packing: Packing | None, routed: jax.Array | None
    ) -> TokenScores:
        with jax.default_matmul_precision("highest"):
            return score(jax.tree.map(published, _merged(params, scale)), ids, targets, packing, routed)

    return score_exactly
