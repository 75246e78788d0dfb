"""Models of several clients on one base: full parameters, or adapters. Synchronous, for one thread.

Invariants: the same requests in the same order, from the same state, give bit-identical weights; clients share only the
frozen base; programs are compiled once for each kind of adapter, loss and shape, and used by all clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from services.trainer.learner.checksum import checksum
from services.trainer.learner.scoring import Loss, objective, params_of
from services.trainer.learner.train_step import ROW_AXES, Params, gradient, placed_as
from services.trainer.models.family import Model, abstract, build, fill, leaf_name, make_mesh
from services.trainer.models.initial_weights import leaves_of
from services.trainer.models.lora import LoraOptions, initial_adapter
from services.trainer.models.options import ModelOptions
from services.trainer.models.sharding import placed_tree, replicated, to_host
from shared.errors import NonFinite, WeightsError
from shared.models import adapter
from shared.models.config import ModelConfig
from shared.models.names import is_untrained, to_files
from volley_tinker.server.batches import BatchShapes, PlacedBatch, batches, gathered
from volley_tinker.server.messages import PassOutput, PassRequest
from volley_tinker.server.token_losses import token_loss

_PARAMS, _FIRST, _SECOND, _COUNT = "params.", "first.", "second.", "count"


@dataclass(frozen=True, slots=True)
class Adam:
    """Settings of one optimizer step (AdamW, decoupled weight decay); `grad_clip_norm` 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def values(self) -> np.ndarray:
        names = self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay, self.grad_clip_norm
        return np.array(names, np.float32)


class Programs:
    """Compiled programs of clients with one kind of adapter.

    All arrays have the same shardings before and after each program: with others JAX would compile another variant,
    whose results may differ in their last bits.
    """

    def __init__(self, model: Model, like: Mapping[str, jax.sharding.Sharding], mesh: jax.sharding.Mesh) -> None:
        self._model, self._like, self._everywhere = model, dict(like), replicated(mesh)
        self.add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=self._like)
        kept = (self._like, self._like, self._like, self._everywhere)
        self.step = jax.jit(_stepped, donate_argnums=(0, 1, 2, 3), out_shardings=kept)
        self.check = jax.jit(_checked, static_argnames="dtype")
        self._passes: dict[str, tuple[Any, Any]] = {}

    def passes(self, loss: str) -> tuple[Any, Any]:
        """Return a forward pass with a loss, and one with its gradient."""
        if loss not in self._passes:
            of = objective(self._model, cast("Loss", token_loss(loss)), 1.0, "none")

            def forward(params: Params, frozen: Params, batch: Any) -> Any:
                return of(frozen | params, batch)

            both = (self._everywhere, self._everywhere)
            self._passes[loss] = (
                jax.jit(forward, out_shardings=both),
                jax.jit(gradient(of), out_shardings=(both, self._like)),
            )
        return self._passes[loss]


class Base:
    """The base model, loaded once, and the programs of its clients."""

    def __init__(self, options: ModelOptions, described: ModelConfig) -> None:
        self.options, self.described = options, described
        self.mesh = make_mesh(options.mesh_shape, options.mesh_axes)
        self._frozen: Params | None = None
        self._programs: dict[LoraOptions | None, Programs] = {}

    def initial(self, lora: LoraOptions | None, seed: int) -> Params:
        """Make the first trained parameters of a client: its adapters, or all. Raises ConfigError, WeightsError."""
        if lora is None:
            return self._loaded()
        _, state = self._abstract(lora)
        leaves = [item for item in nnx.to_flat_state(state) if adapter.is_adapter(leaf_name(item[0]))]
        made = fill(nnx.from_flat_state(leaves), initial_adapter(self._missing, seed), self.mesh)
        return {leaf_name(path): variable.get_value() for path, variable in nnx.to_flat_state(made)}

    def _missing(self, name: str, _size: tuple[int, ...]) -> np.ndarray:
        raise WeightsError(f"{name} is not of an adapter")

    def frozen(self, lora: LoraOptions | None) -> Params:
        """Return the parameters that a client does not train, in the activations' dtype."""
        return {} if lora is None else self.load()

    def load(self) -> Params:
        """Load the base's parameters, once. Raises ConfigError."""
        if self._frozen is None:
            dtype = jnp.dtype(self.options.dtype)
            self._frozen = {name: value.astype(dtype) for name, value in self._loaded().items()}
        return self._frozen

    def _loaded(self) -> Params:
        options = self.options
        leaves = leaves_of(options.folder, self.described, options.seed, random=options.random_weights)
        return params_of(build(self.described, leaves, self.mesh, dtype=options.dtype, remat=options.remat))

    def _abstract(self, lora: LoraOptions | None) -> tuple[Any, Any]:
        return abstract(self.described, self.options.dtype, self.options.remat, self.mesh, lora)

    def programs(self, lora: LoraOptions | None, like: Params) -> Programs:
        """Return the programs of clients with adapters of this kind; `like` are parameters of one."""
        if lora not in self._programs:
            model = nnx.merge(*self._abstract(lora))
            self._programs[lora] = Programs(model, {name: value.sharding for name, value in like.items()}, self.mesh)
        return self._programs[lora]

    def tensors(self, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Make the tensors of Hugging Face's files of whole parameters, on the host in the model's dtype."""
        dtype = jnp.dtype(self.options.dtype)
        whole = {leaf: np.asarray(value).astype(dtype) for leaf, value in params.items()}
        return {name: tensor for leaf, value in whole.items() for name, tensor in to_files(leaf, value).items()}


class ClientModel:
    """A client's trained parameters, optimizer state and accumulated gradient.

    Args:
        arrays: state as `state` returned it; None begins anew.
    """

    def __init__(
        self,
        base: Base,
        shapes: BatchShapes,
        lora: LoraOptions | None,
        seed: int,
        arrays: Mapping[str, Any] | None = None,
    ) -> None:
        self.base, self.lora, self._shapes = base, lora, shapes
        self._rows = jax.sharding.NamedSharding(base.mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._params = base.initial(lora, seed)
        self._programs = base.programs(lora, self._params)
        self._begin_optimizer()
        self._gradient: Any = None
        if arrays is not None:
            self.load(arrays, optimizer=True)

    def _begin_optimizer(self) -> None:
        like = self._params
        self._first, self._second = (
            {k: jnp.zeros_like(v, device=v.sharding) for k, v in like.items()} for _ in range(2)
        )
        self._count = jax.device_put(np.int32(0), replicated(self.base.mesh))

    def run(self, request: PassRequest) -> PassOutput:
        """Run a checked pass; with its gradient, add that to the accumulated one."""
        forward, with_gradient = self._programs.passes(request.loss)
        frozen, total, tables = self.base.frozen(self.lora), 0.0, list[tuple[PlacedBatch, np.ndarray]]()
        added: Any = None
        with self.base.mesh:
            for placed in batches(request, self._shapes):
                batch = placed_tree(placed.batch, self._rows)
                if request.forward_only:
                    loss, logprobs = forward(self._params, frozen, batch)
                else:
                    (loss, logprobs), found = with_gradient(self._params, frozen, batch)
                    added = found if added is None else self._programs.add(added, found)
                total += float(loss)
                tables.append((placed, np.asarray(logprobs)))
            if added is not None:
                self._gradient = added if self._gradient is None else self._programs.add(self._gradient, added)
        n = sum(one.inputs["target_tokens"].size for one in request.data)
        return PassOutput(gathered(request, tables), {"loss:sum": total, "tokens:sum": float(n)})

    def step(self, adam: Adam, *, check: bool = True) -> Mapping[str, float]:
        """Take an optimizer step with the accumulated gradient (zeros without one), and clear it.

        Raises NonFinite, unless `check` is false, if the gradient is not finite or weights and optimizer state would
        not be; they are then unchanged.
        """
        found = self._gradient or {k: jnp.zeros_like(v, device=v.sharding) for k, v in self._params.items()}
        self._gradient = None
        before = self._params, self._first, self._second, self._count, found, adam.values()
        with self.base.mesh:
            norm, is_finite = self._programs.check(*before, dtype=self.base.options.dtype)
            if check and not np.isfinite(norm):
                raise NonFinite("the gradient is not finite; the weights are unchanged", "lower the learning rate")
            if check and not is_finite:
                raise NonFinite(
                    "the step gives weights or an optimizer state that are not finite; both are unchanged",
                    "lower learning_rate or weight_decay, or scale the loss",
                )
            made = self._programs.step(*before)
        self._params, self._first, self._second, self._count = made
        return {"grad_norm:mean": float(norm)}

    def forget_gradient(self) -> None:
        """Clear the accumulated gradient."""
        self._gradient = None

    @property
    def n_bytes(self) -> int:
        """Size of parameters and optimizer state."""
        return 3 * sum(value.nbytes for value in self._params.values())

    def checksum(self) -> str:
        """Compute the checksum of the exact bits of the trained parameters."""
        return checksum(self._params)

    def params(self) -> dict[str, np.ndarray]:
        """Copy the trained parameters to the host."""
        return {name: to_host(value) for name, value in self._params.items()}

    def state(self) -> dict[str, np.ndarray]:
        """Copy trained parameters and optimizer state to the host."""
        parts = ((_PARAMS, self._params), (_FIRST, self._first), (_SECOND, self._second))
        arrays = {prefix + name: to_host(x) for prefix, part in parts for name, x in part.items()}
        return {**arrays, _COUNT: np.asarray(self._count)}

    def load(self, arrays: Mapping[str, Any], *, optimizer: bool) -> None:
        """Take saved parameters, with their optimizer state or a new one; clear the accumulated gradient.

        Raises WeightsError if they are of another model.
        """
        self._params = placed_as(self._params, _part(arrays, _PARAMS, self._params))
        self._gradient = None
        self._begin_optimizer()
        if optimizer:
            self._first = placed_as(self._first, _part(arrays, _FIRST, self._params))
            self._second = placed_as(self._second, _part(arrays, _SECOND, self._params))
            self._count = jax.device_put(np.asarray(arrays[_COUNT], np.int32).reshape(()), replicated(self.base.mesh))


def saved_params(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained parameters of a saved state."""
    return {name.removeprefix(_PARAMS): value for name, value in arrays.items() if name.startswith(_PARAMS)}


def params_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Name parameters as in a saved state."""
    return {_PARAMS + name: value for name, value in arrays.items()}


def _part(arrays: Mapping[str, Any], prefix: str, like: Params) -> dict[str, Any]:
    found = {name: arrays.get(prefix + name) for name in like}
    wrong = [name for name, value in found.items() if value is None or value.shape != like[name].shape]
    wrong += [name for one in arrays if one.startswith(prefix) and (name := one.removeprefix(prefix)) not in like]
    if wrong:
        raise WeightsError(
            f"the saved state does not fit this model: {wrong[0]} is missing, not adapted here or of another shape",
            "load it into a model of the same rank and adapted layers; a sampler's weights have no optimizer",
        )
    return found


def _stepped(
    params: Params, first: Params, second: Params, count: jax.Array, found: Params, settings: jax.Array
) -> Any:
    """Take a step of AdamW (arXiv:1711.05101), as torch.optim.AdamW does, after clipping the global norm."""
    rate, beta1, beta2, eps, decay, clip = settings
    norm = optax.global_norm(found)
    scale = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    found = jax.tree.map(lambda g: g * scale, found)
    optimizer = optax.scale_by_adam(beta1, beta2, eps)
    updates, state = optimizer.update(found, optax.ScaleByAdamState(count, first, second))
    decayed = {name: 0.0 if is_untrained(name) else decay * p for name, p in params.items()}
    stepped = jax.tree.map(lambda p, u, d: p - rate * (u + d), params, updates, decayed)
    return stepped, state.mu, state.nu, state.count


def _checked(*before: Any, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Return the gradient's global norm, and whether all results of the step are finite, weights also in `dtype`.

    The step is computed without storing its results.
    """
    params, first, second, _ = _stepped(*before)
    published = [x.astype(dtype) for x in params.values()]
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((published, params, first, second))]
    return optax.global_norm(before[4]), jnp.stack(finite).all()
