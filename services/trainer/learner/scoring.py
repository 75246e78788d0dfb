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
_N_NUDGED, _NUDGES = 2, 3.2
"""Passes with nudged norms, and how many such nudges all roundings of a pass amount to (1.5 to 4.5 in bfloat16)."""


def params_of(model: Model) -> Params:
    """Return the model's parameters by leaf name, on their devices."""
    return {leaf_name(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def bound_to(model: Model, graph: Any = None) -> Bound:
    """Return a function that makes the model with other parameters, which may be traced.

    With `graph` it makes that graph of the same state instead.
    """
    own, state = nnx.split(model)
    leaves = list(nnx.to_flat_state(state))

    def bound(params: Mapping[str, Any]) -> Model:
        state = nnx.from_flat_state([(path, v.replace(params[leaf_name(path)])) for path, v in leaves])
        return nnx.merge(own if graph is None else graph, state)

    return bound


def published_by(model: Model) -> Bound:
    """Return a function as `bound_to` does, whose model computes with the parameters as they are published.

    Projections cast theirs to the model's dtype; vectors, which norms use in float32, are rounded to it here.
    """
    bound, dtype = bound_to(model), model.config.dtype
    return lambda params: bound(with_rounded_vectors(params, dtype))


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
    bound = published_by(model)

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
        self.mesh = model.embedder.input_embedding.get_value().sharding.mesh
        self._dtype, self._added_to_norms = model.config.dtype, float(model.described.family.norms_add_one)
        self._rows = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._score, self._score_plain, self._score_exactly = (
            jax.jit(score, out_shardings=replicated(self.mesh))
            for score in (*(_scorer(published_by(model), t) for t in (temperature, 1.0)), _exact_scorer(model))
        )

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Compute float32 [B, T]: log-probabilities of `batch.targets`."""
        with self.mesh:
            return np.asarray(self._score(params, *self.placed(batch)))

    def placed(self, batch: Batch) -> tuple[Any, ...]:
        """Put what `Score` reads of a batch on the devices, sharded by rows."""
        return placed_tree((batch.ids, batch.targets, batch.packing, batch.routed), self._rows)

    def probe(self, params: Params, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score ids[1:] (int32 [n]) given the ids before them, at temperature 1.

        Returns:
            float32 [n-1] each: log-probabilities, computed in float32 from the parameters as rounded to the model's
            dtype; and by how much each of them moves when the same parameters are computed with other roundings, as a
            standard deviation in nats (see `_noise`).
        """
        inputs, targets = ids[None, :-1], ids[None, 1:]
        published = {k: v.astype(jnp.float32) if v.ndim == 1 else v for k, v in self._published(params).items()}

        def score(used: Params) -> np.ndarray:
            return np.asarray(self._score_exactly(used, inputs, targets, None, None))[0]

        with self.mesh, np.errstate(invalid="ignore", over="ignore"):  # if the weights compute non-finite numbers
            exact = score(published)
            nudged = np.stack([score(self._nudged(published, i)) - exact for i in range(_N_NUDGED)])
            if self._dtype == jnp.float32:
                return exact, _noise(_NUDGES * nudged)
            own = np.asarray(self._score_plain(params, inputs, targets, None, None)) - exact
            times = np.abs(own).mean() / max(np.abs(nudged).mean(), np.finfo(np.float32).tiny)
            return exact, _noise(np.vstack([own, times * nudged]))

    def _published(self, params: Params) -> Params:
        return with_rounded_vectors(params, self._dtype)

    def _nudged(self, params: Params, seed: int) -> Params:
        """Move the factors of all norms at random by what rounding them could, as if their outputs were rounded."""
        rng, unit = np.random.default_rng(seed), float(jnp.finfo(self._dtype).eps) / 2
        norms = {name: value for name, value in params.items() if value.ndim == 1 and "norm" in name}
        moved = {k: v + unit * rng.uniform(-1, 1, v.shape) * (v + self._added_to_norms) for k, v in norms.items()}
        return {**params, **moved}


def _noise(draws_KT: np.ndarray) -> np.ndarray:
    """Estimate each token's standard deviation, float32 [T], from a few draws.

    Rounding moves tokens very unequally in trained models, whose activations have outliers; so each token has its own.
    The median of all counts as one more draw, because a few draws may all be small by chance.
    """
    typical = np.median(np.abs(draws_KT))
    return np.sqrt((np.square(draws_KT).sum(0) + typical**2) / (len(draws_KT) + 1)).astype(np.float32)


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


def with_rounded_vectors(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Round vectors of parameters to `dtype`, as they are published."""
    return {name: rounded(value, dtype) if value.ndim == 1 else value for name, value in params.items()}


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round an array to `dtype` and keep its own; the gradient passes unchanged (a straight-through estimator)."""
    if x.dtype == dtype:
        return x
    kept = jnp.finfo(dtype)
    # A cast there and back would be optimized away.
    return x + jax.lax.stop_gradient(jax.lax.reduce_precision(x, kept.nexp, kept.nmant) - x)


def _exact_scorer(model: Model) -> Score:
    """Make an exact scorer at temperature 1."""
    scores = exact_scores(model, 1.0, "none")
    return lambda *given: scores(*given).logprobs


def exact_scores(model: Model, temperature: float, entropy: Entropy) -> Callable[..., TokenScores]:
    """Make a scorer that rounds matrices to the model's dtype, as published, and computes in float32.

    It takes the arguments of `Score`; vectors are used as they are (see `with_rounded_vectors`).
    """
    score = _scores(bound_to(model, float32_graph(model)), temperature, entropy)
    dtype = model.config.dtype

    def score_exactly(
        params: Params, ids: jax.Array, targets: jax.Array, packing: Packing | None, routed: jax.Array | None
    ) -> TokenScores:
        published = {name: value if value.ndim == 1 else rounded(value, dtype) for name, value in params.items()}
        with jax.default_matmul_precision("highest"):
            return score(published, ids, targets, packing, routed)

    return score_exactly
