"""A step through Tunix's Trainer against the bare jitted step: same loss, optimizer, model and data, in the same
process.

The two alternate, and the fastest step of each counts: noise only ever adds. Run as a program, it prints one JSON line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import orjson
from flax import nnx

from services.trainer.algorithms.loss import GRPO_SUMS, GrpoOptions, grpo_loss
from services.trainer.learner.batch import Batch, BatchLayout, Row, micro_batches, row_weights
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.train_step import TunixLearner, make_logger, model_loss
from services.trainer.models.initial_weights import random_leaves
from services.trainer.models.qwen3 import Qwen3, build, make_mesh
from shared.models.config import ModelConfig

N_ROWS, LENGTH, N_ROUNDS = 16, 128, 15
_OPTIONS = GrpoOptions(0.2, 0.2, 0.0, "grpo", "low_var_kl", None)
_OPTIMIZER = OptimizerOptions(1e-4, "constant", 0, 100, 0.9, 0.95, 0.0, 1.0)
_MODEL = ModelConfig.parse(
    {
        "model_type": "qwen3",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
)


def main() -> None:
    batch = make_batch(np.random.default_rng(0))
    through_trainer, bare = trainer_step(make_model(), batch), bare_step(make_model(), batch)
    for step in (through_trainer, bare):
        step()
        step()
    pairs = [(_timed(through_trainer), _timed(bare)) for _ in range(N_ROUNDS)]
    ours, reference = (1000 * min(times) for times in zip(*pairs, strict=True))
    record = {"trainer_step": {"value": ours, "unit": "ms", "reference": reference, "ratio": ours / reference}}
    sys.stdout.write(orjson.dumps(record).decode() + "\n")


def make_model() -> Qwen3:
    return build(_MODEL, random_leaves(_MODEL, seed=0), make_mesh((1, 1), ("fsdp", "tp")), dtype="float32")


def make_batch(rng: np.random.Generator) -> Batch:
    """Full rows, all but the first quarter sampled."""
    mask = (np.arange(LENGTH) >= LENGTH // 4).astype(np.uint8)
    ids = [rng.integers(1, _MODEL.vocab_size, LENGTH).astype(np.int32) for _ in range(N_ROWS)]
    rows = [Row(x, mask, -7.6 * mask.astype(np.float32), mask, float(rng.standard_normal())) for x in ids]
    return micro_batches(rows, row_weights(rows, "token-mean", LENGTH), BatchLayout((LENGTH,), N_ROWS, 0), 1)[0]


def trainer_step(model: Qwen3, batch: Batch) -> Callable[[], object]:
    """A step as the service does it, its metrics read back."""
    loss = partial(grpo_loss, options=_OPTIONS)
    learner = TunixLearner(
        model, make_optimizer(_OPTIMIZER), loss, sums=GRPO_SUMS, temperature=1.0, n_micro=1, logger=make_logger()
    )
    return lambda: learner.update([batch])


def bare_step(model: Qwen3, batch: Batch) -> Callable[[], object]:
    """The same arithmetic as one jitted function of pure values, its loss and gradient norm read back."""
    graph, params = nnx.split(model)
    transformation, loss = make_optimizer(_OPTIMIZER), model_loss(partial(grpo_loss, options=_OPTIONS), 1.0)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, Any, Any]:
        (value, sums), gradient = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), batch), has_aux=True)(params)
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, (value, optax.global_norm(gradient)), sums

    held = [params, transformation.init(params)]

    def run() -> object:
        held[0], held[1], numbers, sums = step(held[0], held[1], batch)
        return jax.device_get((numbers, sums, jax.block_until_ready(held[0]) and None))

    return run


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
