"""Supervised warm start: demonstrations made by the environment, the loss on what the assistant says.

Invariant: a demonstration becomes the very tokens that a rollout of it would record, end-of-turn tokens included.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.trainer.algorithms.supervised import supervised_loss
from services.trainer.learner.batch import BatchLayout, Row, micro_batches, row_weights, supervised_row
from services.trainer.learner.optimizer import OptimizerOptions, make_optimizer
from services.trainer.learner.scoring import objective, params_of, put_into
from services.trainer.learner.train_step import Learner, Update
from services.trainer.models.family import Model
from shared.clients.env import DemonstrationReply
from shared.errors import ConfigError, NonFinite, first_error
from shared.models.chat import ChatTokenizer

_CONCURRENT = 32
_SPLIT = "train"


class Demonstrator(Protocol):
    """The part of the environment's client that is used here."""

    async def num_tasks(self, env: str, split: str) -> int: ...

    async def demonstration(self, env: str, split: str, index: int) -> DemonstrationReply: ...


@dataclass(frozen=True, slots=True)
class SftOptions:
    """`batch_size` demonstrations make a step."""

    max_steps: int
    batch_size: int
    seed: int
    layout: BatchLayout
    optimizer: OptimizerOptions


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """A line of `sft.jsonl`: mean negative log-likelihood of a trained token (nats), `tokens` trained."""

    step: int
    max_steps: int
    loss: float
    grad_norm: float
    tokens: int


async def fetch(client: Demonstrator, env: str, n: int, seed: int) -> list[DemonstrationReply]:
    """Up to `n` demonstrations of distinct training tasks, chosen by `seed`, in that order. Raises what the client
    raises.
    """
    total = await client.num_tasks(env, _SPLIT)
    rng = np.random.default_rng([seed, 0x5F7])
    chosen = rng.permutation(total)[:n] if total <= 4 * n else np.unique(rng.integers(0, total, n))
    limit = asyncio.Semaphore(_CONCURRENT)

    async def one(index: int) -> DemonstrationReply:
        async with limit:
            return await client.demonstration(env, _SPLIT, index)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(int(index))) for index in chosen]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


def tokenize(tokenizer: ChatTokenizer, demonstrations: Sequence[DemonstrationReply], longest: int) -> list[Row]:
    """Rows of the demonstrations that fit into `longest` tokens. Raises ConfigError if none does."""
    rows = [supervised_row(*tokenizer.render_demonstration(shown.messages, shown.tools)) for shown in demonstrations]
    fitting = [row for row in rows if len(row.ids) <= longest]
    if not fitting:
        raise ConfigError(f"no demonstration fits into {longest} tokens", "raise trainer.length_buckets")
    return fitting


def train(model: Model, rows: Sequence[Row], options: SftOptions) -> Iterator[SftMetrics]:
    """Trains the model, a step for each item that is asked for; it has the weights once the iterator is closed. Raises
    NonFinite.
    """
    layout = replace(options.layout, rows=min(options.layout.rows, options.batch_size))
    n_micro = layout.n_micro(options.batch_size)
    learner = Learner(
        params_of(model), make_optimizer(options.optimizer), objective(model, supervised_loss, 1.0, "none")
    )
    draws = _draws(len(rows), options.batch_size, options.seed)
    try:
        for step in range(1, options.max_steps + 1):
            batch = [rows[i] for i in next(draws)]
            weights = row_weights(batch, "token-mean", max_response_length=1)
            update = learner.update(micro_batches(batch, weights, layout, n_micro))
            _require_finite(update, step)
            told = update.statistics
            yield SftMetrics(step, options.max_steps, told["nll"] or 0.0, update.grad_norm, int(told["tokens"] or 0))
    finally:
        put_into(model, learner.params)


def _require_finite(update: Update, step: int) -> None:
    """Raises NonFinite."""
    what = [name for name in ("loss", "grad_norm") if not math.isfinite(getattr(update, name))]
    if what:
        raise NonFinite(
            f"the warm start was refused at its step {step}: {' and '.join(what)} not finite",
            "lower sft.optimizer_config.learning_rate and start a run with another name, or look at the demonstrations",
            what,
        )


def _draws(n_rows: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices int64 [batch_size], shuffled anew in every epoch; without end."""
    rng = np.random.default_rng([seed, 0xB47C4])
    pool = np.zeros(0, np.int64)
    while True:
        while len(pool) < batch_size:
            pool = np.concatenate([pool, rng.permutation(n_rows)])
        yield pool[:batch_size]
        pool = pool[batch_size:]
