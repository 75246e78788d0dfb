"""A tiny model, datums, and a service around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.models.options import ModelOptions
from shared.models.config import ModelConfig
from tests.support import models
from volley_tinker.server.batches import BatchShapes
from volley_tinker.server.engine import TrainEngine
from volley_tinker.server.learner import Base
from volley_tinker.server.messages import Datum, PassRequest
from volley_tinker.server.service import TinkerService
from volley_tinker.server.store import FutureStore

CONFIG = models.tiny_config(head_dim=16, vocab_size=64)
SHAPES = BatchShapes(context=48, vocab_size=64, pad_id=0, tokens=32)  # one row of 32: one compiled shape


def base(folder: Path, dtype: str = "float32", n_layers: int = 1) -> Base:
    """Make the tiny model below a folder, with the weights of seed 3."""
    model = folder / "model"
    if not model.exists():
        config = CONFIG | {"num_hidden_layers": n_layers}
        models.write_hf(model, config, models.random_weights(config, 3))
    options = ModelOptions(model, dtype, "none", (1,), ("fsdp",), 0)
    return Base(options, ModelConfig.read(model))


def datum(seed: int, n: int, **inputs: Any) -> Datum:
    ids = np.random.default_rng(seed).integers(0, 64, n + 1)
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return Datum(ids[:-1].astype(np.int32), {"target_tokens": ids[1:].astype(np.int64), **arrays})


def passed(*data: Datum, loss: str = "cross_entropy", config: Mapping[str, float] | None = None) -> PassRequest:
    return PassRequest("m", 1, data, loss, config or {}, forward_only=False)


@asynccontextmanager
async def service(folder: Path, model: Base) -> AsyncIterator[TinkerService]:
    """Open a service without rollout servers; its worker is not started."""
    with ThreadPoolExecutor(1) as database, ThreadPoolExecutor(1) as train:
        store = database.submit(FutureStore, folder).result()
        try:
            yield TinkerService(
                name="tiny",
                architecture="Qwen3ForCausalLM",
                tokenizer="tiny",
                store=store,
                database=database,
                train=train,
                context=SHAPES.context,
                open_engine=lambda: TrainEngine(
                    model, SHAPES, folder, lambda path: database.submit(store.checkpoint, path).result()
                ),
                result_ttl_s=3600.0,
            )
        finally:
            database.submit(store.close).result()
