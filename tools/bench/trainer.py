"""Compare the learner's step with a bare jitted function.

Also compares packed groups with one sequence per row. The first comparison uses the same loss, optimizer, model and
data in the same process. The two sides alternate, and the fastest step of each counts, because noise only slows down.
Prints one JSON line.

    python -m tools.bench.trainer --model config.json --rows 8 --length 2048

measures instead GRPO steps in bfloat16 on random weights of that shape, with every device of the machine on the mesh's
`fsdp` axis: tokens/s, and the share of the floating-point operations per second that a large product of matrices
reaches (6 operations for each token and parameter that it is multiplied with, and 12 for each pair of query and key,
layer and head's element).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orjson

from services.trainer.algorithms.registry import algorithm
from services.trainer.batches.batch import Batch, BatchLayout, Row, micro_batches, row_weights
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import objective, params_of
from services.trainer.learner.train_step import Learner
from services.trainer.models.family import Model, build, make_mesh, reproduce_on_gpus
from services.trainer.models.initial_weights import random_leaves
from shared.algorithm_schema import GrpoSection
from shared.models.config import ModelConfig

N_ROWS, LENGTH, N_ROUNDS = 16, 128, 15
PADDED, PACKED = BatchLayout((128, 256, 512), N_ROWS, 0), BatchLayout((512,), 1, 0, tokens=2048)
LOSS = algorithm(GrpoSection(), 1, 16).loss
_OPTIMIZER = OptimizerOptions(1e-4, "constant", 0, 100, 0.9, 0.95, 0.0, 1.0)
MODEL = ModelConfig.parse(
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
    arguments = _parser().parse_args()
    record = _whole_model(arguments) if arguments.model else _small_model()
    sys.stdout.write(orjson.dumps(record).decode() + "\n")


def _small_model() -> dict[str, object]:
    batch = make_batch(np.random.default_rng(0))
    packed, padded = (trainer_step(make_model(), groups(layout)) for layout in (PACKED, PADDED))
    return {
        "trainer_step": compared(trainer_step(make_model(), [batch]), bare_step(make_model(), batch), N_ROUNDS),
        "packed_step": compared(packed, padded, 3),
    }


def _whole_model(arguments: argparse.Namespace) -> dict[str, object]:
    """Tokens/s of GRPO steps on one micro-batch, and the share of the devices' bound."""
    described = ModelConfig.read(arguments.model.parent)
    reproduce_on_gpus()
    mesh = make_mesh((jax.device_count(), 1), ("fsdp", "tp"))
    model = build(described, _repeated_leaves, mesh, dtype="bfloat16", remat=arguments.remat)
    rows, length = arguments.rows, arguments.length
    batch = make_batch(np.random.default_rng(0), rows, length, described.vocab_size)
    step = trainer_step(model, [batch])
    for _ in range(2):
        step()
    seconds = min(_timed(step) for _ in range(arguments.rounds))
    tokens, bound = rows * length, jax.device_count() * _matrix_flops(1024 if jax.default_backend() == "cpu" else 8192)
    flops = step_flops(described, rows, length)
    return {
        "whole_model_tokens": {"value": tokens / seconds, "unit": "tokens/s"},
        "whole_model_flops": {
            "value": flops / seconds / 1e12,
            "unit": "TFLOP/s",
            "reference": bound / 1e12,
            "ratio": flops / seconds / bound,
        },
    }


def step_flops(model: ModelConfig, rows: int, length: int) -> float:
    """Floating-point operations of forward and backward passes over full rows, without what `remat` repeats."""
    pairs = rows * length * (length + 1) / 2
    heads = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    return 6 * _multiplied(model) * rows * length + 12 * heads * pairs


def _multiplied(model: ModelConfig) -> int:
    """Parameters that one token is multiplied with: of experts those it is sent to, and no table of embeddings."""
    if model.experts is not None:
        chosen = dataclasses.replace(model.experts, num_experts=model.experts.num_experts_per_tok)
        model = dataclasses.replace(model, experts=chosen)
    return dataclasses.replace(model, tie_word_embeddings=True).n_numbers


def _repeated_leaves(name: str, size: tuple[int, ...]) -> np.ndarray:
    """Make a leaf of normal values that repeat; norms are 1."""
    if name.endswith("norm.w"):
        return np.ones(size, np.float32)
    drawn = np.random.default_rng(0).standard_normal(min(math.prod(size), 1 << 22), np.float32)
    return np.resize(drawn * np.float32(0.02), size)


def _matrix_flops(n: int) -> float:
    """Floating-point operations per second of a bfloat16 product of n x n matrices on one device."""
    x = jax.random.normal(jax.random.key(0), (n, n), jax.numpy.bfloat16)
    product = jax.jit(lambda a: a @ a)
    run = lambda: jax.block_until_ready([product(x) for _ in range(8)])  # noqa: E731
    run()
    return 8 * 2 * n**3 / min(_timed(run) for _ in range(5))


def compared(ours: Callable[[], object], reference: Callable[[], object], n_rounds: int) -> dict[str, object]:
    """Compare the fastest of `n_rounds` steps of each side."""
    for step in (ours, reference):
        step()
        step()
    pairs = [(_timed(ours), _timed(reference)) for _ in range(n_rounds)]
    a, b = (1000 * min(times) for times in zip(*pairs, strict=True))
    return {"value": a, "unit": "ms", "reference": b, "ratio": a / b}


def make_model() -> Model:
    mesh = make_mesh((1, 1), ("fsdp", "tp"))
    return build(MODEL, random_leaves(MODEL, seed=0), mesh, dtype="float32", remat="none")


def make_batch(
    rng: np.random.Generator, n_rows: int = N_ROWS, length: int = LENGTH, vocab: int = MODEL.vocab_size
) -> Batch:
    """Full rows, of which all but the first quarter is sampled tokens."""
    mask = (np.arange(length) >= length // 4).astype(np.uint8)
    ids = [rng.integers(1, vocab, length).astype(np.int32) for _ in range(n_rows)]
    rows = [Row(x, mask, -7.6 * mask.astype(np.float32), mask, mask * rng.standard_normal()) for x in ids]
    return micro_batches(rows, row_weights(rows, "token-mean", length), BatchLayout((length,), n_rows, 0), 1)[0]


def groups(layout: BatchLayout) -> list[Batch]:
    """Batches of eight prompts with eight answers each, of lognormal lengths."""
    rng, rows = np.random.default_rng(0), list[Row]()
    for _ in range(8):
        prompt = rng.integers(1, MODEL.vocab_size, rng.integers(40, 120))
        for length in np.clip(rng.lognormal(4.0, 0.7, 8), 4, 392).astype(int):
            ids = np.concatenate([prompt, rng.integers(1, MODEL.vocab_size, length)]).astype(np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            rows.append(Row(ids, mask, -7.6 * mask.astype(np.float32), mask, mask * rng.standard_normal()))
    return micro_batches(rows, row_weights(rows, "token-mean", LENGTH), layout, layout.n_micro(len(rows)))


def trainer_step(model: Model, batches: list[Batch]) -> Callable[[], object]:
    """A step as the service makes it, including reading its metrics back."""
    learner = Learner(params_of(model), make_optimizer(_OPTIMIZER), objective(model, LOSS, 1.0))
    return lambda: learner.update(batches)


def bare_step(model: Model, batch: Batch) -> Callable[[], object]:
    """The same arithmetic as one pure jitted function, including reading loss and gradient norm back."""
    params, transformation, loss = params_of(model), make_optimizer(_OPTIMIZER), objective(model, LOSS, 1.0)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, Any, Any]:
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.trainer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="config.json of a model of real size")
    parser.add_argument("--rows", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--remat", choices=("none", "decoder", "block"), default="decoder")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
