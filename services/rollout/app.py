"""Wire the rollout service: engine, weight updates, registration, routes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from services.rollout import metrics
from services.rollout.api import generate, routes
from services.rollout.api.generation import GenerationRunner
from services.rollout.engines.base import BASE_VERSION, Engine
from services.rollout.engines.kinds import OpenEngine, opener
from services.rollout.settings import RolloutSettings, from_config
from services.rollout.weights.checkpoint import examine
from services.rollout.weights.pulling import ChunkPuller
from services.rollout.weights.serving import NothingServes, Serving, ServingState, StagedUpdate
from services.rollout.weights.sources import VersionStore
from services.rollout.weights.updater import WeightUpdater
from shared import packages
from shared.boot import RunningService
from shared.clients.chunks import WeightSource
from shared.engines import DeclaredEngine
from shared.errors import DecodeError, WeightsError
from shared.models.chat import ChatTokenizer, tokenizer_of_run
from shared.models.config import ModelConfig
from shared.process.telemetry import Log
from shared.published.chunks import ChunkFolder
from shared.published.serving import Uplink
from shared.queue.client import REFUSED_S, connect
from shared.queue.registry import RegisteredServer, Registry
from shared.schema import RunConfig
from shared.types import WeightVersion
from shared.web.access import AccessTokens, Role, read_tokens
from shared.web.http import create_app

_BODY_BYTES, _TOKEN_BYTES, _OBJECTS = 2**18, 16, 2**15
_ANSWER_S = 5.0  # how long the trainer may take to name its newest version
_log = Log("rollout")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Open the service of a run. Raises ConfigError, or EngineDied with the engine's reason."""
    async with open_rollout(from_config(config)) as service:
        yield service


@asynccontextmanager
async def open_rollout(
    settings: RolloutSettings, open_engine: OpenEngine | None = None
) -> AsyncIterator[RunningService]:
    """Open the service around the engine of `settings.kind`, or the one that `open_engine` starts in its place.

    Redis is used only if `settings.redis_url` is given.
    """
    open_engine = open_engine or opener(settings.kind)
    model = ModelConfig.read(Path(settings.engine.model_path))
    tokens = read_tokens(settings.token_files)
    async with AsyncExitStack() as stack:
        puller, trainer = await _sources(settings, tokens, stack)
        engine = await stack.enter_async_context(open_engine(settings.engine))
        _log.info(
            "engine ready",
            engine=str(DeclaredEngine.of_kind(settings.kind)),
            boot_s=engine.info.boot_s,
            pid=engine.info.pid,
            kv_tokens=engine.info.max_total_tokens,
        )
        updates = WeightUpdater(
            engine,
            settings.weights_root,
            model,
            settings.run,
            settings.update_mode,
            settings.engine.dtype,
            await _first_state(settings, engine, model),
            puller=puller,
            newest_offer=trainer.newest if trainer else None,
            bucket=_bucket(settings),
            declared=DeclaredEngine.of_kind(settings.kind),
        )
        generation = GenerationRunner(engine, settings.limits.grace_s, updates)
        app = build_app(settings, engine, updates, generation, tokens)
        workers = [engine.wait_closed, updates.guard, generation.drain, lambda: metrics.observe(engine)]
        workers += [updates.watch] if settings.follows else []
        if settings.redis_url is None:
            yield RunningService(app, workers)
            return
        async with connect(
            settings.redis_url, settings.redis_password_file, settings.ca_file, refused_s=REFUSED_S
        ) as redis:
            heartbeat = _heartbeat(Registry(redis, settings.run), settings, updates, generation)
            yield RunningService(app, [*workers, heartbeat])


async def _first_state(settings: RolloutSettings, engine: Engine, model: ModelConfig) -> ServingState:
    """Load the checkpoint that is served from the start, if there is one. Raises WeightsError, Unavailable."""
    if settings.first is None:
        return Serving(BASE_VERSION) if settings.engine.load_weights else NothingServes()
    found = await asyncio.to_thread(examine, settings.first, model, settings.run)
    staged = StagedUpdate.of(found, settings.first, await engine.stage(found))
    result = await engine.commit(found.version, "abort")
    if (wrong := staged.difference(result.live, settings.engine.dtype)) is not None:
        raise WeightsError(f"{found.version} was loaded, but {wrong}")
    return Serving(found.version, staged)


async def _sources(
    settings: RolloutSettings, tokens: AccessTokens | None, stack: AsyncExitStack
) -> tuple[ChunkPuller | None, WeightSource | None]:
    """Return a puller of published versions into an emptied folder, and a client of the trainer.

    Both are None if `settings.pulled` is None.
    """
    if settings.pulled is None:
        return None, None
    chunks = await asyncio.to_thread(ChunkFolder, settings.pulled)
    await asyncio.to_thread(chunks.clear)
    stack.callback(shutil.rmtree, chunks.folder, ignore_errors=True)
    token = tokens.of(Role.SERVICE) if tokens else None

    def source(url: str) -> WeightSource:
        return WeightSource(url, token=token, ca_file=settings.ca_file, timeout_s=_ANSWER_S)

    trainer = settings.trainer_url and await stack.enter_async_context(source(settings.trainer_url))
    return ChunkPuller(chunks, source, settings.url), trainer or None


def _bucket(settings: RolloutSettings) -> VersionStore | None:
    """Return the run's bucket, if there is one; versions are copied into a folder beside the one for chunks."""
    if settings.bucket is None or settings.pulled is None:
        return None
    opened: Callable[[str, Path], VersionStore] = packages.part("bucket.versions")
    return opened(settings.bucket, settings.pulled.with_name(f"{settings.pulled.name}.bucket"))


def build_app(
    settings: RolloutSettings,
    engine: Engine,
    updates: WeightUpdater,
    generation: GenerationRunner,
    tokens: AccessTokens | None,
) -> FastAPI:
    """Build the HTTP application around an engine."""
    limits = settings.limits.model_copy(update={"max_body_bytes": _longest_body(settings)})
    generating: Any = packages.part("generate_route", required=False) or generate
    app = create_app(
        "rollout",
        limits=limits,
        tokens=tokens,
        ready=generation.why_not,
        roles={**routes.ROLES, **generate.ROLES},
        max_objects=_OBJECTS + settings.engine.context_length,  # a JSON prompt is a list of numbers
        direct=generating.direct_routes(),
    )
    tokenizer = _tokenizer(settings, engine.info.context_length)
    name = settings.model_name or Path(settings.engine.model_path).name
    app.state.rollout = routes.RolloutState(
        engine, generation, updates, settings.engine, tokenizer, Uplink(updates.read_chunk), name
    )
    app.include_router(routes.router)
    app.include_router(generating.router)
    return app


def _heartbeat(
    registry: Registry, settings: RolloutSettings, updates: WeightUpdater, generation: GenerationRunner
) -> Callable[[], Awaitable[None]]:
    """Return a worker that keeps the server registered in Redis while it can take requests."""

    def current() -> RegisteredServer | None:
        if generation.why_not() is not None or updates.current is None:
            return None
        epoch = _epoch(updates.current)
        return RegisteredServer(
            settings.server_id,
            settings.url,
            updates.current,
            settings.engine.max_running_requests,
            epoch,
            updates.declared,
        )

    return lambda: registry.heartbeat(current)


def _longest_body(settings: RolloutSettings) -> int:
    """Limit of a request's body in bytes: enough for every prompt that fits the context."""
    return min(settings.limits.max_body_bytes, _BODY_BYTES + _TOKEN_BYTES * settings.engine.context_length)


def _epoch(version: str) -> int:
    try:
        return WeightVersion.parse(version).epoch
    except DecodeError:
        return 0


def _tokenizer(settings: RolloutSettings, context_length: int) -> ChatTokenizer | None:
    """Return the model's tokenizer; None, which turns the text routes off, if the folder has none."""
    folder = Path(settings.engine.model_path)
    if not (folder / "tokenizer.json").is_file():
        return None
    if settings.follows:
        tokenizer = tokenizer_of_run(folder, settings.date)
    else:
        tokenizer = ChatTokenizer(folder, settings.date, needs_template=False)
    return tokenizer.within(context_length)
