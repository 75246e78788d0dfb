"""What a model says of given tokens: log-probabilities for objectives, for references and for the probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.learner.batch import Batch
from services.trainer.learner.logprobs import Entropy, TokenScores, token_scores
from services.trainer.learner.train_step import ROW_AXES, Objective, Params
from services.trainer.models.family import Model, float32_graph, head, hidden_states, leaf_name

type Loss = Callable[[TokenScores, Batch], tuple[jax.Array, Statistics]]
type Bound = Callable[[Mapping[str, Any]], Model]


def params_of(model: Model) -> Params:
    """The model's parameters by leaf name, on their devices."""
    return {leaf_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def bound_to(model: Model, graph: Any = None) -> Bound:
    """A function that gives the model (or another `graph` of the same state) with other parameters, traced ones too."""
    own, state = nnx.split(model)
    leaves = [(path, variable) for path, variable in nnx.to_flat_state(state)]
    graph = own if graph is None else graph

    def bound(params: Mapping[str, Any]) -> Model:
        return nnx.merge(graph, nnx.from_flat_state([(path, v.replace(params[leaf_name(path)])) for path, v in leaves]))

    return bound


def put_into(model: Model, params: Params) -> None:
    """Makes the parameters the model's own."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.from_flat_state([(path, v.replace(params[leaf_name(path)])) for path, v in leaves]))


def objective(model: Model, loss: Loss, temperature: float, entropy: Entropy = "value") -> Objective:
    """The loss as a function of the parameters, for differentiation."""
    bound = bound_to(model)

    def of_params(params: Params, batch: Batch) -> tuple[jax.Array, Statistics]:
        now = bound(params)
        return loss(token_scores(hidden_states(now, batch.ids), head(now), batch.targets, temperature, entropy), batch)

    return of_params


class Scorer:
    """Compiled once for each shape; the mesh is that of the model's parameters."""

    def __init__(self, model: Model, temperature: float) -> None:
        self._mesh = model.embedder.input_embedding.get_value().sharding.mesh
        self._rows = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._score, self._score_plain = (jax.jit(_scorer(bound_to(model), t)) for t in (temperature, 1.0))
        self._score_exactly = jax.jit(_exact_scorer(model))

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """float32 [B, T]: log-probabilities of `batch.targets`."""
        ids, targets = (jax.device_put(x, self._rows) for x in (batch.ids, batch.targets))
        with self._mesh:
            return np.asarray(self._score(params, ids, targets))

    def probe(self, params: Params, ids: np.ndarray) -> tuple[np.ndarray, float]:
        """float32 [n-1]: log-probabilities of ids[1:] (int32 [n]) given what is before them, at temperature 1, computed
        in float32 from the parameters as rounded to the model's dtype; and the mean |difference| of the model's own
        arithmetic from them.
        """
        inputs, targets = ids[None, :-1], ids[None, 1:]
        with self._mesh:
            exact, own = (
                np.asarray(score(params, inputs, targets))[0] for score in (self._score_exactly, self._score_plain)
            )
        with np.errstate(invalid="ignore"):  # of weights that compute no numbers, it is none
            return exact, float(np.abs(own - exact).mean())


def _scorer(bound: Bound, temperature: float) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    def score(params: Params, ids: jax.Array, targets: jax.Array) -> jax.Array:
        model = bound(params)
        return token_scores(hidden_states(model, ids), head(model), targets, temperature, "none").logprobs

    return score


def _exact_scorer(model: Model) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """Of parameters as they are published, which is in the model's dtype; everything else is float32."""
    score, dtype = _scorer(bound_to(model, float32_graph(model)), 1.0), jnp.finfo(model.config.dtype)

    def published(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)  # a cast there and back is optimized away

    def score_exactly(params: Params, ids: jax.Array, targets: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return score(jax.tree.map(published, params), ids, targets)

    return score_exactly
