"""Tunix's own GRPO beside ours: its loss, and its learner as it is shipped, on episodes that are already there.

The learner is `GRPOLearner` on an `RLCluster` whose rollout engine hands out recorded completions: everything else of a
step (padding to the longest prompt and the longest completion, advantages, micro-batches, loss, optimizer) is its own.
Its packing of sequences is off, as it is by default: without flash attention it has no mask between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import algo_core, common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from services.trainer.models.family import Model

PAD, EOS = 0, 1
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Recorded:
    """An episode of one turn: ids of prompt and completion, int32 each, none of them PAD; and its reward."""

    prompt: np.ndarray
    completion: np.ndarray
    reward: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """What Tunix pads to, in tokens."""

    prompt: int
    completion: int


def loss_and_gradient(model: Model, batch: int, lengths: Lengths, vocab: int) -> tuple[Callable[..., Any], Any, Any]:
    """A function of parameters and a padded batch, with both: value and gradient of GRPO's loss."""
    graph, params = nnx.split(model)
    config = GRPOConfig(num_generations=batch, beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0
    rng = np.random.default_rng(0)
    example = common.TrainExample(
        prompt_ids=jnp.asarray(rng.integers(2, vocab, (batch, lengths.prompt)), jnp.int32),
        prompt_mask=jnp.ones((batch, lengths.prompt), bool),
        completion_ids=jnp.asarray(rng.integers(2, vocab, (batch, lengths.completion)), jnp.int32),
        completion_mask=jnp.ones((batch, lengths.completion), bool),
        advantages=jnp.asarray(rng.standard_normal(batch), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )

    def loss(params: Any, example: Any) -> Any:
        return algo_core.grpo_loss_fn(nnx.merge(graph, params), example, config, PAD, EOS)

    return jax.value_and_grad(loss, has_aux=True), params, example


class Recording(base_rollout.BaseRollout):
    """A rollout engine that has all its answers: `steps` of episodes, in the order in which they are asked for.
    `at_step` is called in front of each step, when the one before has been done.
    """

    def __init__(
        self,
        *,
        steps: Sequence[Sequence[Recorded]],
        lengths: Lengths,
        at_step: Callable[[], None],
        rollout_actor: Any,
        **_: Any,
    ) -> None:
        self._waiting = [one for step in steps for one in step]
        self._steps, self._lengths, self._at_step, self._model = steps, lengths, at_step, rollout_actor
        self.mesh = None

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> base_rollout.RolloutOutput:
        if len(self._waiting) % len(self._steps[0]) == 0:
            jax.block_until_ready(nnx.state(self._model))
            self._at_step()
        given, self._waiting = self._waiting[: len(prompts)], self._waiting[len(prompts) :]
        left = np.full((len(given), self._lengths.prompt), PAD, np.int32)
        for row, one in zip(left, given, strict=True):
            row[len(row) - len(one.prompt) :] = one.prompt
        return base_rollout.RolloutOutput(
            text=[str(one.reward) for one in given],
            logits=None,
            tokens=[one.completion for one in given],
            left_padded_prompt_tokens=left,
            logprobs=None,
        )

    def get_per_token_logps(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing asks for them with one iteration")

    def update_params(self, *_: Any, **__: Any) -> None:
        pass

    def pad_id(self) -> int:
        return PAD

    def eos_id(self) -> int:
        return EOS

    def model(self) -> Any:
        return self._model


class _Words:
    """The methods that a tokenizer must have; none is used."""

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return EOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def step_seconds(
    model: Model,
    steps: Sequence[Sequence[Recorded]],
    *,
    group_size: int,
    micro_rows: int,
    lengths: Lengths,
    between: Callable[[int], None],
) -> list[float]:
    """Of each step, in seconds; the first ones compile. A step's episodes are groups of `group_size`, one after the
    other, and a micro-batch has `micro_rows` of them. `between` is called with the number of each step in front of it;
    its time does not count.
    """
    n_prompts, began, ended = len(steps[0]) // group_size, list[float](), list[float]()

    def at_step() -> None:
        ended.append(time.perf_counter())
        between(len(began))
        began.append(time.perf_counter())

    mesh = model.embedder.input_embedding.get_value().sharding.mesh
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=_Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
            rollout_engine=partial(Recording, steps=steps, lengths=lengths, at_step=at_step),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_LEARNING_RATE, b2=0.95)),
                eval_every_n_steps=10**9,
                max_steps=len(steps),
                mini_batch_size=n_prompts,
                train_micro_batch_size=max(1, micro_rows // group_size),
                rollout_micro_batch_size=n_prompts,
                compute_logps_micro_batch_size=n_prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=lengths.completion, max_prompt_length=lengths.prompt, temperature=1.0
            ),
        ),
    )
    config = GRPOConfig(num_generations=group_size, beta=0.0, loss_agg_mode="token-mean")
    learner = GRPOLearner(cluster, config, reward_fns=_rewards)
    data: list[Mapping[str, Any]] = [{"prompts": np.array([str(i) for i in range(n_prompts)])} for _ in steps]
    learner.train(data)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    assert len(began) == len(steps), "not every step was trained"
    ended.append(time.perf_counter())
    return [end - start for start, end in zip(began, ended[1:], strict=True)]


def _rewards(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(text) for text in completions]
