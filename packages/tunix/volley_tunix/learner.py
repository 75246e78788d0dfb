"""Tunix's own RL trainer and losses on this trainer's batches (`trainer.backend: tunix`).

Tunix's: the policy losses that `tunix.rl` registers (`grpo`, with its `gspo-token`, and `ppo`), their aggregation, and
the train step of `tunix.rl.trainer.Trainer`: gradient, accumulation over micro-batches, optimizer step. Ours: the
decoder that it calls, rewards, advantages, importance weights, AdamW with its schedule, critic, checkpoints. Settings
under which Tunix's numbers are wrong are refused before the run (`volley_tunix.limits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.ppo.ppo_learner import PPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

from services.trainer import activity
from services.trainer.algorithms.terms import importance, statistics
from services.trainer.batches.batch import Batch
from services.trainer.learner.foreign import ForeignOptions
from services.trainer.learner.optimizer import NormState
from services.trainer.learner.scoring import bound_to, params_of, published_by
from services.trainer.learner.train_step import ROW_AXES, Params, Update, non_finite_names, placed_as
from services.trainer.models.decoder import hidden_states
from services.trainer.models.family import Model, head
from services.trainer.models.sharding import placed_tree
from shared.algorithm_base import ClippedSection
from shared.algorithm_schema import PpoSection
from shared.errors import ConfigError, WeightsError

_STATE = "opt_state"
_AUX = {"pg_clipfrac": "clip_fraction", "kl": "kl", "entropy": "entropy", "loss/entropy": "entropy"}
"""Tunix's names of statistics, and ours."""


def algorithm_config(options: ForeignOptions) -> Any:
    """Make Tunix's own configuration of the loss."""
    section = _clipped(options)
    high = section.epsilon_high or section.epsilon
    beta = section.beta if section.kl_in == "loss" else 0.0
    if isinstance(section, PpoSection):
        made = PPOConfig(
            epsilon=section.epsilon,
            epsilon_high=high,
            epsilon_c=section.epsilon_c,
            entropy_coef=section.entropy_coef or None,
        )
        return SimpleNamespace(**asdict(made), kl_coef=beta)  # the loss reads kl_coef, which the class lacks
    made = GRPOConfig(
        num_generations=options.num_generations,
        num_iterations=options.n_iterations,
        beta=beta,
        kl_loss_mode=section.kl_loss_mode,
        epsilon=section.epsilon,
        loss_algo="gspo-token" if section.name == "gspo-token" else "grpo",
        loss_agg_mode=section.loss_agg_mode,
    )
    made.epsilon_high, made.epsilon_c, made.temperature = high, section.epsilon_c, options.temperature
    return made


def _clipped(options: ForeignOptions) -> ClippedSection:
    """Return the algorithm, which is of this kind for all runs that `limits` lets pass."""
    assert isinstance(options.section, ClippedSection)
    return options.section


class _CallableModel(nnx.Module):
    """This trainer's model, called as `tunix.rl` calls its own."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, tokens: jax.Array, positions: Any, cache: Any, attention_mask: Any) -> tuple[jax.Array, None]:
        """Compute logits float32 [B, T, V] of right-padded rows; positions and mask follow from that."""
        model = published_by(self.model)(params_of(self.model))
        hidden, cap = hidden_states(model, tokens), model.described.logit_softcap
        logits = jnp.einsum("btd,vd->btv", hidden, head(model), preferred_element_type=jnp.float32)
        return (logits if cap is None else cap * jnp.tanh(logits / cap)), None


class TunixLearner:
    """Parameters under training by Tunix; a `ForeignLearner`.

    Args:
        params: trained parameters of `model` by leaf name, on their devices.

    Raises ConfigError for a model with adapters, or with experts whose routing is replayed.
    """

    def __init__(
        self, model: Model, params: Params, optimizer: optax.GradientTransformation, options: ForeignOptions
    ) -> None:
        if model.lora is not None:
            raise ConfigError("trainer.backend=tunix trains no adapters", "remove trainer.lora")
        self.mesh = next(iter(params.values())).sharding.mesh
        self._rows = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*ROW_AXES))
        self._callable, self._shapes = _CallableModel(bound_to(model)(params)), set[tuple[int, ...]]()
        self.configure(optimizer, options)

    def configure(self, optimizer: optax.GradientTransformation, options: ForeignOptions) -> None:
        """Train the next steps by these; parameters and optimizer state stay."""
        self._shapes.clear()
        state = self.optimizer_state() if hasattr(self, "_trainer") else None
        n = options.n_micro
        training = TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=n if n > 1 else None)
        with self.mesh:
            self._trainer = Trainer(self._callable, optimizer, training, dict[str, Any])
        name = "ppo" if isinstance(options.section, PpoSection) else "grpo"
        loss, algo_config = algo_core.function_registry.get_policy_loss_fn(name), algorithm_config(options)

        def of_example(model: nnx.Module, example: common.TrainExample) -> Any:
            return loss(model, example, algo_config, pad_id=-1, eos_id=-1)

        self._options = options
        self._trainer.with_loss_fn(of_example, has_aux=True)
        self._trainer.with_gen_model_input_fn(lambda example: {"example": example})
        if state is not None:
            self.load_optimizer_state(state)

    @property
    def params(self) -> Params:
        """All parameters, on their devices, until the next update."""
        return params_of(self._callable.model)

    @property
    def trained(self) -> Params:
        """Trained parameters: all."""
        return self.params

    @property
    def frozen(self) -> Params:
        """Parameters that are not trained: none."""
        return {}

    @property
    def n_shapes(self) -> int:
        """Number of compiled micro-batch shapes."""
        return len(self._shapes)

    def update(self, batches: Sequence[Batch], *, apply: bool = True) -> Update:
        """Take one optimizer step and wait for it.

        The loss is the mean of the micro-batches' losses, as Tunix counts it; the gradient's norm is that of the mean
        of their gradients. Raises ConfigError if the episodes of a step need more micro-batches than planned.
        """
        if not apply or len(batches) != self._options.n_micro:
            raise ConfigError(
                f"trainer.backend=tunix accumulates {self._options.n_micro} micro-batches a step, and this step has"
                f" {len(batches)}",
                "episodes of several sequences need trainer.backend=volley",
            )
        self._shapes |= {batch.ids.shape for batch in batches}
        found: list[tuple[Any, Mapping[str, Any]]] = []
        with self.mesh:
            train_step, _ = self._trainer.jit_train_and_eval_step(cache_nnx_graph=False)
            for batch in batches:
                loss, aux, _ = train_step(placed_tree(self._example(batch), self._rows))
                found.append((loss, aux))
                activity.note()
            found = jax.device_get(found)
        norm = next(value for name, value in self.optimizer_state().items() if name.endswith(NormState._fields))
        return Update(float(np.mean([loss for loss, _ in found])), float(norm), _statistics(batches, found))

    def _example(self, batch: Batch) -> common.TrainExample:
        """Make Tunix's example: a row's first token is the prompt, its targets are the completion."""
        if batch.routed is not None:
            raise ConfigError("trainer.backend=tunix replays no routing to experts", "set model.routing_replay=false")
        old, weights = batch.behaviour, None
        section = _clipped(self._options)
        correction = importance.Correction(section.sampler_is, section.sampler_is_threshold)
        if correction.needs_old:
            assert batch.old is not None
            old = batch.old
            args = jnp.asarray(old), jnp.asarray(batch.behaviour), jnp.asarray(batch.mask)
            weights = np.asarray(importance.weights(*args, correction).weights) * batch.mask
        return common.TrainExample(
            prompt_ids=batch.ids[:, :1],
            prompt_mask=np.ones_like(batch.ids[:, :1]),
            completion_ids=batch.targets,
            completion_mask=batch.mask,
            advantages=batch.advantages,
            ref_per_token_logps=batch.reference,
            old_per_token_logps=old,
            sampler_is_weights=weights,
        )

    def placed(self, batch: Batch) -> Batch:
        """Put the batch on the devices, sharded by rows."""
        return placed_tree(batch, self._rows)

    def optimizer_state(self) -> dict[str, jax.Array]:
        """Optimizer state by name, Tunix's accumulator and step counts included."""
        return {name: variable.get_value() for name, variable in self._state().items()}

    def load_params(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `trained`, bit for bit."""
        made = placed_as(self.params, values)
        for name, variable in self._variables().items():
            variable.set_value(made[name])

    def load_optimizer_state(self, values: Mapping[str, Any]) -> None:
        """Restore the values of `optimizer_state`, bit for bit. Raises WeightsError if names or shapes differ."""
        own = {name: value for name, value in values.items() if name.startswith(_STATE)}
        expected = self.optimizer_state()
        if {k: v.shape for k, v in expected.items()} != {k: np.shape(v) for k, v in own.items()}:
            raise WeightsError(
                "the checkpoint holds the state of another optimizer",
                "resume with the trainer.backend, the model and the batch sizes that the run was started with",
            )
        made = placed_as(expected, own)
        for name, variable in self._state().items():
            variable.set_value(made[name])

    def non_finite(self, published: str) -> list[str]:
        """Names of parameters and optimizer state that hold a NaN or an infinity, as `Learner.non_finite`."""
        with self.mesh:
            return non_finite_names(self.params, self.optimizer_state(), published)

    def _variables(self) -> dict[str, Any]:
        return {
            ".".join(map(str, path)): variable
            for path, variable in nnx.to_flat_state(nnx.state(self._callable.model, nnx.Param))
        }

    def _state(self) -> dict[str, Any]:
        flat = nnx.to_flat_state(nnx.state(self._trainer.optimizer, nnx.optimizer.OptState))
        return {
            ".".join([_STATE, *map(str, path[1:])]) if path[0] == _STATE else f"{_STATE}.{path[0]}": v
            for path, v in flat
        }


def _statistics(batches: Sequence[Batch], found: Sequence[tuple[Any, Mapping[str, Any]]]) -> dict[str, float | None]:
    """Join Tunix's statistics, which are means of micro-batches, with the comparison of trainer and engine."""
    parts: list[statistics.Statistics] = []
    for batch in batches:
        assert batch.old is not None
        mask, delta = jnp.asarray(batch.mask), jnp.abs(jnp.asarray(batch.old) - jnp.asarray(batch.behaviour))
        parts.append(
            {
                "tokens": statistics.total(mask),
                "logprob_abs_diff": statistics.mean(delta, mask),
                "logprob_abs_diff_current": statistics.mean(delta, jnp.asarray(batch.current)),
                "logprob_abs_diff_current_max": statistics.largest(delta, jnp.asarray(batch.current)),
            }
        )
    names = {ours: theirs for theirs, ours in _AUX.items() if theirs in found[0][1]}
    of_tunix = {ours: float(np.mean([aux[theirs] for _, aux in found])) for ours, theirs in names.items()}
    return statistics.values(statistics.joined(jax.device_get(parts))) | of_tunix
