"""Wiring of a trainer that clients of Tinker's interface drive: futures, training thread, rollout servers, routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from services.trainer import options as from_run
from shared.boot import RunningService
from shared.clients.base import HttpClient
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.models.hub import keep, model_folder
from shared.run_config import section_of
from shared.schema import RunConfig
from shared.web.access import Role, read_tokens
from shared.web.http import create_app
from volley_tinker.section import TinkerSection
from volley_tinker.server import records, routes
from volley_tinker.server.batches import BatchShapes
from volley_tinker.server.engine import TrainEngine
from volley_tinker.server.learner import Base
from volley_tinker.server.sampling import SampleServer
from volley_tinker.server.service import TinkerService
from volley_tinker.server.store import FutureStore

_POSITIONS = 4096
_MOST_OBJECTS = 4_000_000


@asynccontextmanager
async def open_tinker(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    if await asyncio.to_thread(keep, config) is not None:
        raise ConfigError(f"model.path={config.model.path} is a version of a run", "export it, and name the folder")
    model = await asyncio.to_thread(model_folder, config.model.path, config.run.folder, weights=True)
    described, services = ModelConfig.read(model), config.services
    callers = read_tokens(services.token_files)
    async with AsyncExitStack() as stack:
        database, train = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("futures", "train"))
        stack.callback(train.shutdown, wait=False, cancel_futures=True)
        stack.callback(database.shutdown, wait=True)
        store = FutureStore(config.run.folder.absolute())
        stack.callback(store.close)
        shapes = _shapes(config, described)
        local, section = config.model.path == str(model), section_of(config, TinkerSection)
        tinker = TinkerService(
            name=section.model_name or (model.name if local else config.model.path),
            architecture=described.family.architecture,
            tokenizer=str(model.absolute()) if local else config.model.path,
            store=store,
            database=database,
            train=train,
            context=shapes.context,
            open_engine=_opening(config, model, described, shapes, store, database),
            result_ttl_s=section.result_ttl_s,
        )
        for url in services.rollout_urls or (services.base_url("rollout"),):
            token = callers.of(Role.ADMIN) if callers else None
            client = await stack.enter_async_context(HttpClient(url, token=token, ca_file=services.tls.ca_file))
            tinker.servers.append(SampleServer(client, shapes.context, tinker.export, tinker.settle))
        app = create_app(
            "tinker",
            limits=services.limits,
            tokens=callers,
            ready=tinker.why_not,
            roles=routes.ROLES | records.ROLES,
            max_objects=_MOST_OBJECTS,
        )
        app.state.tinker = tinker
        app.include_router(routes.router)
        app.include_router(records.router)
        yield RunningService(app, [tinker.run, tinker.sweep, *(server.run for server in tinker.servers)])


def _shapes(config: RunConfig, described: ModelConfig) -> BatchShapes:
    trainer = config.trainer
    shards = dict(zip(trainer.mesh.axis_names, trainer.mesh.shape, strict=True)).get("fsdp", 1)
    context = config.rollout.engine.context_length
    return BatchShapes(context, described.vocab_size, 0, trainer.micro_batch_tokens or _POSITIONS, shards)


def _opening(
    config: RunConfig, model: Path, described: ModelConfig, shapes: BatchShapes, store: FutureStore, database: Executor
) -> Callable[[], TrainEngine]:
    def opened() -> TrainEngine:
        base = Base(from_run.model_options(config, model), described)
        base.load()
        return TrainEngine(base, shapes, store.folder, lambda path: database.submit(store.checkpoint, path).result())

    return opened
