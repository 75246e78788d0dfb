"""`python -m tests.support.wrong_rollout --config …`: a rollout server of the real engine that lies.

It reports the right weights and passes every check of its own. The variable `FAULT` is `scaled`: one
projection of the first layer is 2 % larger than loaded; or `narrow`: tokens are drawn from the likeliest two, but
reported as if from all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from services.rollout.app import open_rollout
from services.rollout.engines.base import Engine, EngineSpec
from services.rollout.engines.sglang_jax import client
from services.rollout.settings import from_config
from services.rollout.weights import serving
from shared.boot import RunningService, main
from shared.schema import RunConfig

FAULT = "VOLLEY_TEST_FAULT"
_FACTOR = 1.02
_TOP = 2


class _Narrow:
    """An engine that samples from the likeliest tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, request, on_tokens=None):
        return await self._engine.generate(replace(request, sampling=replace(request.sampling, top_k=_TOP)), on_tokens)


def serve(fault: str) -> None:
    serving.check_probe = lambda *_: None

    @asynccontextmanager
    async def open_engine(spec: EngineSpec) -> AsyncIterator[Engine]:
        worker = "tests.support.wrong_rollout" if fault == "scaled" else client.WORKER
        async with client.open_engine(spec, worker) as engine:
            yield _Narrow(engine) if fault == "narrow" else engine

    @asynccontextmanager
    async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
        async with open_rollout(from_config(config), open_engine) as service:
            yield service

    main("rollout", open_service=open_service)


def work(channel: int) -> int:
    """The engine's process."""
    import jax

    from services.rollout.engines.sglang_jax import boot, worker
    from services.rollout.engines.sglang_jax.loading import checksum
    from services.rollout.engines.sglang_jax.scheduling.adapters import EngineWeights
    from services.rollout.engines.sglang_jax.scheduling.scheduler import RolloutScheduler

    loaded: list[jax.Array] = []
    honest = checksum.checksum

    class Scaled(RolloutScheduler):
        def swap(self, weights: EngineWeights, version: str, mode: str) -> dict:
            leaves = loaded[:] = weights.leaves
            tree = jax.tree_util.tree_unflatten(self.runner._model_state_def, leaves)
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
            at = next(i for i, path in enumerate(paths) if "layers" in path and "down_proj" in path)
            changed = [*leaves[:at], leaves[at] * _FACTOR, *leaves[at + 1 :]]
            return super().swap(weights._replace(leaves=changed), version, mode)

    boot.RolloutScheduler = Scaled
    worker.check_probe = lambda *_: None
    checksum.checksum = lambda leaves: honest(loaded if loaded and leaves[0] is loaded[0] else leaves)
    return worker.main(channel)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        code = work(int(sys.argv[1]))
        sys.stderr.flush()
        os._exit(code)
    serve(os.environ[FAULT])
