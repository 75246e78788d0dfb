"""Optimizer steps on named parameters. The models are Tunix's; nothing here knows which.

Invariants: each call of `update` is one optimizer step, however many micro-batches it has: their losses and gradients
are added, because the denominators of the whole step come with the batch. Parameters and the optimizer's state are
replaced by a step, and their old arrays are given up; what has to outlive it is copied (`snapshot`). The mesh is
entered in the calling thread, because JAX's mesh context is thread-local and inputs are silently not sharded without
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from services.trainer.models.sharding import place, placed_tree, replicated
from shared.errors import WeightsError

type Params = dict[str, jax.Array]
"""Arrays by the name of their leaf."""
type Objective = Callable[[Params, Batch], tuple[jax.Array, Statistics]]
"""The loss of a micro-batch, float32 scalar, and what else it tells."""

ROW_AXES = ("fsdp",)
_STATE = "opt_state"
_ACCUMULATED = f"{_STATE}.inner_{_STATE}."
"""What older checkpoints of several micro-batches have in its place, beside the accumulator."""


@dataclass(frozen=True, slots=True)
class Update:
    """Of one optimizer step: the whole batch's loss, its gradient's global norm before clipping, and the statistics of
    its tokens by name (None where nothing was there to count).
    """

    loss: float
    grad_norm: float
    statistics: Mapping[str, float | None]


class Learner:
    """Parameters under training with one objective.

    Args:
        params: on their devices; taken over.
        optimizer: the first element of its state holds the last gradient's `norm` (see make_optimizer).
        frozen: other parameters of the objective, which stay as they are.
    """

    def __init__(
        self,
        params: Params,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        frozen: Params | None = None,
    ) -> None:
        self.mesh = next(iter(params.values())).sharding.mesh
        self._shapes = set[tuple[int, ...]]()
        self._rows = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._params, self._frozen = params, frozen or {}
        with self.mesh:
            self._state = jax.tree.map(self._on_mesh, optimizer.init(params))
        like = jax.tree.map(lambda x: x.sharding, params)
        everywhere = replicated(self.mesh)
        self._like, self._kept = (everywhere, like), (like, jax.tree.map(lambda x: x.sharding, self._state))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._are_finite = jax.jit(_are_finite, static_argnames="published", out_shardings=everywhere)
        self.under(optimizer, objective)

    def under(self, optimizer: optax.GradientTransformation, objective: Objective) -> None:
        """What follows is trained by these; parameters and the optimizer's state, which must be of one tree, stay."""
        self._shapes.clear()
        self._gradient = jax.jit(gradient(objective), out_shardings=self._like)
        self._apply = jax.jit(applied(optimizer), donate_argnums=(0, 1), out_shardings=self._kept)

    @property
    def params(self) -> Params:
        """All parameters of the objective, on their devices, until the next update."""
        return self._frozen | self._params

    @property
    def trained(self) -> Params:
        """Those of them that are under training."""
        return self._params

    @property
    def n_shapes(self) -> int:
        """Shapes of micro-batches that were compiled for."""
        return len(self._shapes)

    @property
    def frozen(self) -> Params:
        """The others, which stay as they are."""
        return self._frozen

    def update(self, batches: Sequence[Batch], *, apply: bool = True) -> Update:
        """One optimizer step; blocks until it is done. Without `apply` it is only measured."""
        total: Any = None
        losses, told = list[Any](), list[Any]()
        self._shapes |= {batch.ids.shape for batch in batches}
        with self.mesh:
            for batch in batches:
                (loss, found), gradient = self._gradient(self._params, self._frozen, self.placed(batch))
                total = gradient if total is None else self._add(total, gradient)
                losses.append(loss)
                told.append(found)
            if apply:
                self._params, self._state = self._apply(self._params, self._state, total)
            norm = self._state[0].norm if apply else optax.global_norm(total)
            losses, told, norm = jax.device_get((losses, told, norm))
        of_step = statistics.values(statistics.joined(told))
        return Update(float(np.sum(losses)), float(norm), of_step)

    def placed(self, batch: Batch) -> Batch:
        """The batch on the devices, its rows divided over them."""
        return placed_tree(batch, self._rows)

    def _on_mesh(self, x: jax.Array) -> jax.Array:
        """A scalar that lies on one device alone, on all of them."""
        return x if x.ndim else place(np.asarray(x), replicated(self.mesh))

    def optimizer_state(self) -> dict[str, jax.Array]:
        """All state of the optimizer, step counts included, by name."""
        return {_name(path): value for path, value in jax.tree_util.tree_flatten_with_path(self._state)[0]}

    def load_params(self, values: Mapping[str, Any]) -> None:
        """Puts back what `trained` gave, bit by bit."""
        self._params = placed_as(self._params, values)

    def load_optimizer_state(self, values: Mapping[str, Any]) -> None:
        """Puts back what `optimizer_state` gave, bit by bit. Raises WeightsError if it is that of another optimizer."""
        expected, values = self.optimizer_state(), _present_names(values)
        if {k: v.shape for k, v in expected.items()} != {k: np.shape(v) for k, v in values.items()}:
            raise WeightsError("the checkpoint holds the state of another optimizer", "was the model changed?")
        leaves, tree = jax.tree.flatten(self._state)
        made = placed_as(expected, values)
        assert len(made) == len(leaves)
        self._state = jax.tree.unflatten(tree, [made[name] for name in expected])

    def non_finite(self, published: str) -> list[str]:
        """Names of parameters, and of parts of the optimizer's state, that hold a NaN or an infinity, also if it is
        only the rounding of parameters to the dtype `published` that makes one. One reduction on the devices.
        """
        params, state = self._params, self.optimizer_state()
        with self.mesh:
            finite = np.asarray(self._are_finite(list(params.values()), list(state.values()), published=published))
        names = [*params, *(f"optimizer {name}" for name in state)]
        return [name for name, ok in zip(names, finite, strict=True) if not ok]


def gradient(objective: Objective) -> Callable[[Params, Params, Batch], tuple[tuple[jax.Array, Statistics], Params]]:
    """Loss, statistics and the gradient by the parameters under training, of these, of the frozen ones, and a batch."""

    def of_trained(params: Params, frozen: Params, batch: Batch) -> tuple[jax.Array, Statistics]:
        return objective(frozen | params, batch)

    return jax.value_and_grad(of_trained, has_aux=True)


def snapshot(params: Params) -> Params:
    """The parameters as they are now; later updates do not reach them."""
    return {name: jnp.copy(value) for name, value in params.items()}


def placed_as(like: Mapping[str, jax.Array], values: Mapping[str, Any]) -> Params:
    """The values by the names of `like`, each with the dtype, and where the old one lies."""
    return {name: place(values[name], old.sharding, old.dtype) for name, old in like.items()}


def applied(optimizer: optax.GradientTransformation) -> Callable[[Params, Any, Params], tuple[Params, Any]]:
    """Parameters and the optimizer's state after a step, of those before it and the gradient."""

    def apply(params: Params, state: Any, gradient: Params) -> tuple[Params, Any]:
        updates, state = optimizer.update(gradient, state, params)
        applied: Any = optax.apply_updates(params, updates)
        return applied, state

    return apply


def _present_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state under its present names: steps of several micro-batches once had it inside another."""
    inner = {
        f"{_STATE}.{name.removeprefix(_ACCUMULATED)}": v for name, v in values.items() if name.startswith(_ACCUMULATED)
    }
    return inner or {name: value for name, value in values.items() if name.startswith(f"{_STATE}.")}


def _name(path: Sequence[Any]) -> str:
    """(2, 0, .mu, "final_norm.w") -> opt_state.2.0.mu.final_norm.w"""
    parts = [getattr(key, next(a for a in ("key", "idx", "name") if hasattr(key, a))) for key in path]
    return ".".join([_STATE, *map(str, parts)])


def _are_finite(params: list[jax.Array], state: list[jax.Array], *, published: str) -> jax.Array:
    """bool [number of arrays]."""
    return jnp.stack(
        [jnp.isfinite(x.astype(published)).all() & jnp.isfinite(x).all() for x in params]
        + [jnp.isfinite(x).all() for x in state]
    )
