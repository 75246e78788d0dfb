"""Optimizer steps through `tunix.rl.trainer.Trainer`. The one module, beside the model's, that knows Tunix.

Invariants: the Trainer is wrapped, never subclassed; it neither saves nor restores (no root folder); each call of
`update` is one optimizer step, however many micro-batches it has; the mesh is entered in the calling thread, because
JAX's mesh context is thread-local and inputs are silently not sharded without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl.trainer import Trainer
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import TrainingConfig

from services.trainer.algorithms.loss import Sums
from services.trainer.learner.batch import Batch
from services.trainer.learner.logprobs import TokenScores, token_scores
from services.trainer.models.qwen3 import Qwen3, float32_graph, head, hidden_states, leaf_name
from shared.errors import WeightsError

type Logger = MetricsLogger
type Loss = Callable[[TokenScores, Batch], tuple[jax.Array, Sums]]

_NEVER = 10**9
_ROW_AXES = ("fsdp",)
_ACCUMULATOR = "opt_state.acc_grads."


@dataclass(frozen=True, slots=True)
class Update:
    """Of one optimizer step: the whole batch's loss, its gradient's global norm before clipping, sums over
    its tokens.
    """

    loss: float
    grad_norm: float
    sums: Mapping[str, float]


class TunixLearner:
    """A model under training with one loss.

    Args:
        n_micro: micro-batches of every step; their gradients are averaged (see Batch.row_weight).
        logger: one for the whole process, because Tunix's loggers listen globally.
        sums: names of the sums the loss returns.

    The mesh is that of the model's parameters.
    """

    def __init__(
        self,
        model: Qwen3,
        optimizer: optax.GradientTransformation,
        loss: Loss,
        *,
        sums: Sequence[str],
        temperature: float,
        n_micro: int,
        logger: Logger,
    ) -> None:
        mesh = model.embedder.input_embedding.get_value().sharding.mesh
        self._model, self._mesh, self._n_micro, self._sums = model, mesh, n_micro, tuple(sums)
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*_ROW_AXES))
        config = TrainingConfig(
            eval_every_n_steps=_NEVER,
            gradient_accumulation_steps=n_micro if n_micro > 1 else None,
            data_sharding_axis=_ROW_AXES,
            metrics_prefix="trainer",
        )
        with mesh:
            self._trainer = Trainer(model, optimizer, config, custom_checkpoint_metadata_fn=dict, metrics_logger=logger)
        self._trainer.with_loss_fn(model_loss(loss, temperature), has_aux=True)
        self._trainer.with_gen_model_input_fn(_as_keywords)
        self._trainer.with_rl_metrics_to_log({name: _combined(name) for name in self._sums})
        self._trainer.is_managed_externally = True
        graph = nnx.split(model)[0]
        self._score, self._score_plain = (jax.jit(_scorer(graph, t)) for t in (temperature, 1.0))
        self._are_finite = jax.jit(_are_finite, static_argnames="published")
        self._score_exactly = jax.jit(_exact_scorer(model))

    def update(self, batches: Sequence[Batch]) -> Update:
        """One optimizer step on exactly `n_micro` micro-batches; blocks until it is done."""
        assert len(batches) == self._n_micro
        with self._mesh:
            self._trainer.train(batches)
        return self._last_update()

    def params(self) -> dict[str, jax.Array]:
        """The parameters by leaf name, on their devices."""
        return flat(nnx.state(self._model, nnx.Param))

    def optimizer_state(self) -> dict[str, jax.Array]:
        """All state of the optimizer, step counts included, by name; without the gradient accumulator, which is zero
        between steps.
        """
        state = flat(nnx.state(self._trainer.optimizer, nnx.optimizer.OptState))
        return {name: value for name, value in state.items() if not name.startswith(_ACCUMULATOR)}

    def non_finite(self, published: str) -> list[str]:
        """Names of parameters, and of parts of the optimizer's state, that hold a NaN or an infinity, also if it is
        only the rounding of parameters to the dtype `published` that makes one. One reduction on the devices.
        """
        params, state = self.params(), self.optimizer_state()
        with self._mesh:
            finite = np.asarray(self._are_finite(list(params.values()), list(state.values()), published=published))
        names = [*params, *(f"optimizer {name}" for name in state)]
        return [name for name, ok in zip(names, finite, strict=True) if not ok]

    def load_params(self, values: Mapping[str, Any]) -> None:
        """Puts back what `params` gave, bit by bit."""
        nnx.update(self._model, replaced(nnx.state(self._model, nnx.Param), values))

    def load_optimizer_state(self, values: Mapping[str, Any]) -> None:
        """Puts back what `optimizer_state` gave, bit by bit, between two steps. Raises WeightsError if it is that of
        another optimizer.
        """
        optimizer = self._trainer.optimizer
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        expected = self.optimizer_state()
        if {k: v.shape for k, v in expected.items()} != {k: np.shape(v) for k, v in values.items()}:
            raise WeightsError(
                "the checkpoint holds the state of another optimizer",
                "was trainer.train_micro_batch_size or the model changed?",
            )
        between = {name: jnp.zeros_like(value) for name, value in flat(state).items() if name.startswith(_ACCUMULATOR)}
        nnx.update(optimizer, replaced(state, between | dict(values)))

    def snapshot(self, values: Mapping[str, Any] | None = None) -> Any:
        """The present parameters, or given ones, for `logprobs`; later updates do not reach them."""
        state = nnx.state(self._model)
        return jax.tree.map(lambda x: x, state) if values is None else replaced(state, values)

    def logprobs(self, batch: Batch, params: Any = None) -> np.ndarray:
        """float32 [B, T]: log-probabilities of `batch.targets` under a snapshot, or under the present parameters."""
        ids, targets = (jax.device_put(x, self._rows) for x in (batch.ids, batch.targets))
        with self._mesh:
            return np.asarray(self._score(nnx.state(self._model) if params is None else params, ids, targets))

    def probe(self, ids: np.ndarray) -> tuple[np.ndarray, float]:
        """float32 [n-1]: log-probabilities of ids[1:] (int32 [n]) given what is before them, at temperature 1, computed
        in float32 from the parameters as rounded to the model's dtype; and the mean |difference| of the model's own
        arithmetic from them.
        """
        state, inputs, targets = nnx.state(self._model), ids[None, :-1], ids[None, 1:]
        with self._mesh:
            exact, own = (
                np.asarray(score(state, inputs, targets))[0] for score in (self._score_exactly, self._score_plain)
            )
        with np.errstate(invalid="ignore"):  # of weights that compute no numbers, it is none
            return exact, float(np.abs(own - exact).mean())

    def _last_update(self) -> Update:
        # The Trainer hands metrics to its logger one step late, to overlap input and output; this is the buffer they
        # wait in.
        buffer = self._trainer._prev_buffered_train_metrics
        assert buffer is not None
        losses = [float(x) for x in jax.device_get(buffer.losses)]
        sums = {name: float(_combined(name)(jax.device_get(buffer.additional_metrics[name][0]))) for name in self._sums}
        return Update(float(np.mean(losses)), self._grad_norm(), sums)

    def _grad_norm(self) -> float:
        state: Any = self._trainer.optimizer.opt_state
        inner = state.inner_opt_state if self._n_micro > 1 else state
        return float(inner[0].norm.get_value())


def make_logger() -> Logger:
    """The process's one logger; it only keeps what it is given."""
    return MetricsLogger()


def model_loss(loss: Loss, temperature: float) -> Callable[[Qwen3, Batch], tuple[jax.Array, Sums]]:
    """The loss as a function of the model, for differentiation."""

    def of_model(model: Qwen3, batch: Batch) -> tuple[jax.Array, Sums]:
        scores = token_scores(hidden_states(model, batch.ids), head(model), batch.targets, temperature, entropy=True)
        return loss(scores, batch)

    return of_model


def flat(state: Any) -> dict[str, jax.Array]:
    """An nnx state as {name: array}."""
    return {leaf_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def replaced(state: Any, values: Mapping[str, Any]) -> Any:
    """The same nnx state with other values, each placed where the old one lies."""
    filled = [
        (path, v.replace(jax.device_put(values[leaf_name(path)], v.get_value().sharding)))
        for path, v in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(filled)


def _scorer(graph: Any, temperature: float) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    def score(params: Any, ids: jax.Array, targets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return token_scores(hidden_states(model, ids), head(model), targets, temperature, entropy=False).logprobs

    return score


def _are_finite(params: list[jax.Array], state: list[jax.Array], *, published: str) -> jax.Array:
    """bool [number of arrays]."""
    return jnp.stack(
        [jnp.isfinite(x.astype(published)).all() & jnp.isfinite(x).all() for x in params]
        + [jnp.isfinite(x).all() for x in state]
    )


def _exact_scorer(model: Qwen3) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """Of parameters as they are published, which is in the model's dtype; everything else is float32."""
    score, dtype = _scorer(float32_graph(model), 1.0), jnp.finfo(model.config.dtype)

    def published(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)  # a cast there and back is optimized away

    def score_exactly(params: Any, ids: jax.Array, targets: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return score(jax.tree.map(published, params), ids, targets)

    return score_exactly


def _combined(name: str) -> Callable[[Any], Any]:
    """How a statistic of micro-batches becomes that of the step."""
    return np.max if name.endswith("_max") else np.sum


def _as_keywords(batch: Batch) -> dict[str, Batch]:
    return {"batch": batch}
