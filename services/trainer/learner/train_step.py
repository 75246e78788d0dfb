"""Optimizer steps on named parameters, for any model.

Invariants: each call of `update` is one optimizer step over any number of micro-batches: their losses and gradients are
added, because each batch has the denominators of the whole step. A step donates the old arrays of parameters and
optimizer state; copy those that must outlive it (`snapshot`). The mesh is entered in the calling thread: JAX's mesh
context is thread-local, and without it inputs are silently not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from services.trainer import activity
from services.trainer.algorithms.terms import statistics
from services.trainer.algorithms.terms.statistics import Statistics
from services.trainer.batches.batch import Batch
from services.trainer.models.sharding import place, placed_tree, replicated
from shared.errors import WeightsError
from shared.process.host_memory import release_freed

type Params = dict[str, jax.Array]
"""Arrays by the name of their leaf."""
type Objective = Callable[[Params, Batch], tuple[jax.Array, Statistics]]
"""Loss of a micro-batch, float32 scalar, and its statistics."""

ROW_AXES = ("fsdp",)
_LARGE_BYTES = 16 * 2**20
"""Gradients of which a step gives the pages back; those of a small model would only be mapped again by the next."""
_STATE = "opt_state"


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer step over the whole batch.

    `grad_norm` is the gradient's global norm before clipping. A statistic is None if no token counts.
    """

    loss: float
    grad_norm: float
    statistics: Mapping[str, float | None]


class Learner:
    """Parameters under training with one objective.

    Args:
        params: on their devices; donated to the learner.
        optimizer: the first element of its state holds the last gradient's `norm` (see make_optimizer).
        frozen: other parameters of the objective, not trained.
    """

    def __init__(
        self,
        params: Params,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        frozen: Params | None = None,
    ) -> None:
        self.mesh = next(iter(params.values())).sharding.mesh
        self._on_host = self.mesh.devices.flat[0].platform == "cpu"
        self._shapes = set[tuple[int, ...]]()
        self._rows = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._params, self._frozen = params, frozen or {}
        with self.mesh:
            self._state = jax.tree.map(self._on_mesh, optimizer.init(params))
        like = jax.tree.map(lambda x: x.sharding, params)
        everywhere = replicated(self.mesh)
        self._like, self._kept = (everywhere, like), (like, jax.tree.map(lambda x: x.sharding, self._state))
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self.configure(optimizer, objective)

    def configure(self, optimizer: optax.GradientTransformation, objective: Objective) -> None:
        """Train the next steps by these; parameters and state stay. The state's tree must be the same."""
        self._shapes.clear()
        self._gradient = jax.jit(gradient(objective), out_shardings=self._like)
        self._apply = jax.jit(applied(optimizer), donate_argnums=(0, 1), out_shardings=self._kept)

    @property
    def params(self) -> Params:
        """All parameters of the objective, on their devices, until the next update."""
        return self._frozen | self._params

    @property
    def trained(self) -> Params:
        """Trained parameters."""
        return self._params

    @property
    def n_shapes(self) -> int:
        """Number of compiled micro-batch shapes."""
        return len(self._shapes)

    @property
    def frozen(self) -> Params:
        """Parameters that are not trained."""
        return self._frozen

    def update(self, batches: Sequence[Batch], *, apply: bool = True) -> Update:
        """Take one optimizer step and wait for it. Without `apply`, only measure it.

        Each micro-batch is launched while the one before it is computed, and not earlier: its gradient takes memory. On
        CPUs it waits until the gradient before is added, so that there are two at most.
        """
        total: Any = None
        losses, parts = list[Any](), list[Any]()
        self._shapes |= {batch.ids.shape for batch in batches}
        with self.mesh:
            for batch in batches:
                (loss, found), gradient = self._gradient(self._params, self._frozen, self.placed(batch))
                total = gradient if total is None else self._add(total, gradient)
                del gradient
                losses.append(loss)
                parts.append(found)
                if self._on_host:
                    jax.block_until_ready(total)
                elif len(losses) > 1:
                    jax.block_until_ready(losses[-2])
                activity.note()
            if apply:
                self._params, self._state = self._apply(self._params, self._state, total)
            norm = self._state[0].norm if apply else optax.global_norm(total)
            losses, parts, norm = jax.device_get((losses, parts, norm))
        del total
        if sum(value.nbytes for value in self._params.values()) >= _LARGE_BYTES:
            release_freed()  # the gradients' pages: what follows has arrays of other sizes
        of_step = statistics.values(statistics.joined(parts))
        return Update(float(np.sum(losses)), float(norm), of_step)

    def compile(self, batch: Batch, n_micro: int) -> None:
        """Compile what a step of `n_micro` micro-batches like this one runs; no value changes."""
        params = self._params
        with self.mesh:
            self._gradient.lower(params, self._frozen, self.placed(batch)).compile()
            self._apply.lower(params, self._state, params).compile()
            if n_micro > 1:
                self._add.lower(params, params).compile()

    def placed(self, batch: Batch) -> Batch:
        """Put the batch on the devices, sharded by rows."""
        return placed_tree(batch, self._rows)

    def _on_mesh(self, x: jax.Array) -> jax.Array:
        """Replicate a scalar that is on one device."""
        return x if x.ndim else place(np.asarray(x), replicated(self.mesh))

    def optimizer_state(self) -> dict[str, jax.Array]:
        """Optimizer state by name, step counts included."""
        return {_name(path): value for path, value in jax.tree_util.tree_flatten_with_path(self._state)[0]}

    def load_params(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `trained`, bit for bit."""
        self._params = placed_as(self._params, values)

    def load_frozen(self, values: Mapping[str, Any]) -> None:
        """Replace some of the values of `frozen`."""
        self._frozen = self._frozen | placed_as({name: self._frozen[name] for name in values}, values)

    def load_optimizer_state(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `optimizer_state`, bit for bit. Raises WeightsError if names or shapes differ."""
        expected = self.optimizer_state()
        values = {name: value for name, value in values.items() if name.startswith(f"{_STATE}.")}
        if {k: v.shape for k, v in expected.items()} != {k: np.shape(v) for k, v in values.items()}:
            raise WeightsError(
                "the checkpoint holds the state of another optimizer",
                "resume with the model and the algorithm that the run was started with",
            )
        leaves, tree = jax.tree.flatten(self._state)
        made = placed_as(expected, values)
        assert len(made) == len(leaves)
        self._state = jax.tree.unflatten(tree, [made[name] for name in expected])

    def non_finite(self, published: str) -> list[str]:
        """Names of parameters and optimizer state that hold a NaN or an infinity, found on the devices.

        Parameters count too if only rounding to the dtype `published` makes an infinity.
        """
        with self.mesh:
            return non_finite_names(self._params, self.optimizer_state(), published)


class PolicyLearner(Protocol):
    """Methods of a learner that a policy calls."""

    @property
    def mesh(self) -> jax.sharding.Mesh: ...

    @property
    def params(self) -> Params: ...

    @property
    def trained(self) -> Params: ...

    @property
    def frozen(self) -> Params: ...

    @property
    def n_shapes(self) -> int: ...

    def update(self, batches: Sequence[Batch], *, apply: bool = True) -> Update: ...

    def optimizer_state(self) -> dict[str, jax.Array]: ...

    def load_params(self, values: Mapping[str, Any]) -> None: ...

    def load_optimizer_state(self, values: Mapping[str, Any]) -> None: ...

    def non_finite(self, published: str) -> list[str]: ...


def gradient(objective: Objective) -> Callable[[Params, Params, Batch], tuple[tuple[jax.Array, Statistics], Params]]:
    """Make a function of trained and frozen parameters and a batch: loss, statistics, gradient of the trained ones."""

    def of_trained(params: Params, frozen: Params, batch: Batch) -> tuple[jax.Array, Statistics]:
        return objective(frozen | params, batch)

    return jax.value_and_grad(of_trained, has_aux=True)


def snapshot(params: Params) -> Params:
    """Copy the parameters; later updates do not change the copy."""
    return {name: jnp.copy(value) for name, value in params.items()}


def placed_as(like: Mapping[str, jax.Array], values: Mapping[str, Any]) -> Params:
    """Place the values with the names, dtypes and shardings of `like`."""
    return {name: place(values[name], old.sharding, old.dtype) for name, old in like.items()}


def applied(optimizer: optax.GradientTransformation) -> Callable[[Params, Any, Params], tuple[Params, Any]]:
    """Make a function of parameters, optimizer state and gradient: parameters and state after a step."""

    def apply(params: Params, state: Any, gradient: Params) -> tuple[Params, Any]:
        updates, state = optimizer.update(gradient, state, params)
        applied: Any = optax.apply_updates(params, updates)
        return applied, state

    return apply


def _name(path: Sequence[Any]) -> str:
    """Join a path: (2, 0, .mu, "final_norm.w") -> opt_state.2.0.mu.final_norm.w"""
    parts = [getattr(key, next(a for a in ("key", "idx", "name") if hasattr(key, a))) for key in path]
    return ".".join([_STATE, *map(str, parts)])


def non_finite_names(params: Params, state: Mapping[str, jax.Array], published: str) -> list[str]:
    """Names of parameters and optimizer state that hold a NaN or an infinity.

    Arrays are checked one by one, so that equal shapes share a program: one of all takes seconds to compile.
    """
    found = {name: _is_finite(x, published=published) for name, x in params.items()}
    found |= {f"optimizer {name}": _is_finite(x, published=str(x.dtype)) for name, x in state.items()}
    return [name for name, ok in jax.device_get(found).items() if not ok]


@partial(jax.jit, static_argnames="published")
def _is_finite(x: jax.Array, *, published: str) -> jax.Array:
    return jnp.isfinite(x.astype(published)).all() & jnp.isfinite(x).all()
