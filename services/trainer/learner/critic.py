"""Critic: a copy of the policy's initial backbone and one linear layer, trained along with the policy.

Invariant: `state` holds all its parameters and optimizer state, so a resume is bit-exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from services.trainer.algorithms.terms.algorithm import ActorCritic
from services.trainer.batches.batch import Batch
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import bound_to, divided, params_of
from services.trainer.learner.train_step import Learner, Objective, Params, Update, snapshot
from services.trainer.models.attention import Packing
from services.trainer.models.decoder import hidden_states
from services.trainer.models.family import Model
from services.trainer.models.sharding import place, replicated
from shared.errors import WeightsError
from shared.models.names import is_of_attention

_HEAD, _VALUE = "lm_head.", "value_head"
_STATE, _PARAMS = "critic.", "critic.params."


@dataclass(frozen=True, slots=True)
class CriticSetup:
    """Setup of the critic; in the run's first `warmup_steps` steps only the critic is trained.

    It takes `n_updates` updates for each of the policy. Without `trains_attention`, the parameters of its attention
    stay those of the policy's initial weights (SAO, arXiv:2607.07508).
    """

    algorithm: ActorCritic
    optimizer: OptimizerOptions
    warmup_steps: int
    n_updates: int = 1
    trains_attention: bool = True


class Critic:
    """Predicts, before each token, the rewards from it on: value = hidden state · value_head, 0 at the start.

    Args:
        model: its backbone is copied. If it has adapters, the critic shares the base and copies the adapters.
    """

    def __init__(self, model: Model, setup: CriticSetup) -> None:
        of_model = params_of(model)
        backbone, frozen = divided({name: value for name, value in of_model.items() if not name.startswith(_HEAD)})
        unused = {name: np.zeros((), np.float32) for name in of_model if name.startswith(_HEAD)}
        bound, mesh = bound_to(model), model.embedder.input_embedding.get_value().sharding.mesh
        everywhere = replicated(mesh)
        head = place(np.zeros(model.described.hidden_size, np.float32), everywhere)

        def values(params: Params, ids: jax.Array, packing: Packing | None) -> jax.Array:
            hidden = hidden_states(bound({**params, **unused}), ids, packing)
            return jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), params[_VALUE])

        def objective(algorithm: ActorCritic) -> Objective:
            return lambda params, batch: algorithm.value_loss(values(params, batch.ids, batch.packing), batch)

        self._values, self._objective = jax.jit(values, out_shardings=everywhere), objective
        own = {**snapshot(backbone), _VALUE: head}
        self._kept = () if setup.trains_attention else tuple(name for name in own if is_of_attention(name))
        trained = {name: value for name, value in own.items() if name not in self._kept}
        frozen |= {name: own[name] for name in self._kept}
        self._n_updates = setup.n_updates
        self._learner = Learner(trained, make_optimizer(setup.optimizer), objective(setup.algorithm), frozen)

    def apply_setup(self, setup: CriticSetup) -> None:
        """Train the next steps with this setup; parameters and optimizer state do not change.

        `trains_attention` has to be the present one.
        """
        self._n_updates = setup.n_updates
        self._learner.configure(make_optimizer(setup.optimizer), self._objective(setup.algorithm))

    def values(self, batch: Batch) -> np.ndarray:
        """Compute float32 [B, T]: the value before each token of `batch.targets`."""
        with self._learner.mesh:
            placed = self._learner.placed(batch)
            return np.asarray(self._values(self._learner.params, placed.ids, placed.packing))

    def update(self, batches: Sequence[Batch], weights: Sequence[np.ndarray]) -> Update:
        """Take `n_updates` optimizer steps on the returns in the batches, and return the last.

        `weights` are of their tokens, [B, T] or [B, 1].
        """
        weighed = [replace(b, weight=w) for b, w in zip(batches, weights, strict=True)]
        for _ in range(self._n_updates - 1):
            self._learner.update(weighed)
        return self._learner.update(weighed)

    def state(self) -> dict[str, jax.Array]:
        """Parameters and optimizer state by name."""
        params = {f"{_PARAMS}{name}": value for name, value in self._own().items()}
        return params | {f"{_STATE}{name}": value for name, value in self._learner.optimizer_state().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, bit for bit. Raises WeightsError if the values have none of this critic."""
        params = {name.removeprefix(_PARAMS): value for name, value in state.items() if name.startswith(_PARAMS)}
        if params.keys() != self._own().keys():
            raise WeightsError(
                "the checkpoint holds no critic of this model",
                "resume with the model and the algorithm.name that the run was started with",
            )
        self._learner.load_params(params)
        self._learner.load_frozen({name: params[name] for name in self._kept})
        optimizer = {name.removeprefix(_STATE): value for name, value in state.items() if name.startswith(_STATE)}
        self._learner.load_optimizer_state(optimizer)

    def _own(self) -> Params:
        """Parameters that are not those of the policy's base: trained ones and frozen attention."""
        return self._learner.trained | {name: self._learner.frozen[name] for name in self._kept}

    def non_finite(self) -> list[str]:
        """Names of arrays that hold a NaN or an infinity."""
        return [f"critic {name}" for name in self._learner.non_finite("float32")]
