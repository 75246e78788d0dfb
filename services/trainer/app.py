"""Wiring of a trainer: backend, queue, files, training thread, clients, routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from redis.asyncio import Redis

from services.trainer import records
from services.trainer import settings as from_run
from services.trainer.backend.inputs import BackendInputs, OpenedBackend
from services.trainer.interfaces import RecordCheck, RunChecks, TrainPlan
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.ledger import LedgerFile
from services.trainer.loop.refusals import Refusals
from services.trainer.loop.run_store import RunStore, StoreContext
from services.trainer.loop.worker import TrainerWorker
from services.trainer.metrics import prometheus
from services.trainer.publishing import routes as publishing
from services.trainer.publishing.publications import Publications
from services.trainer.publishing.publisher import Publisher, Served
from services.trainer.publishing.routes import PublishingState
from services.trainer.routes import ROLES, router
from services.trainer.settings import TrainerSettings
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from shared import packages
from shared.boot import RunningService
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.findings import findings
from shared.models.chat import tokenizer_of_run
from shared.models.content import with_content
from shared.models.hub import keep, model_folder
from shared.models.origin import Origin
from shared.process import telemetry
from shared.process.imports import uncollected
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.published.serving import Uplink
from shared.queue.client import REFUSED_S, connect
from shared.queue.queue import TicketQueue
from shared.queue.registry import Registry
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.run.folder import Record, RunFolder
from shared.schema import RunConfig
from shared.types import WeightVersion
from shared.web.access import AccessTokens, Role, read_tokens
from shared.web.http import create_app

_log = telemetry.Log("trainer")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    opened: AbstractAsyncContextManager[RunningService]
    if config.services.trainer.num_processes > 1:
        opened = packages.part("trainer.processes")(config)
    elif config.is_supervised:
        opened = packages.part("trainer.supervised")(config)
    else:
        with uncollected():
            from services.trainer.rl_backend import open_backend  # JAX and Tunix

        opened = open_trainer(config, open_backend)
    async with opened as service:
        yield service


@asynccontextmanager
async def open_trainer(
    config: RunConfig, open_backend: Callable[[BackendInputs], OpenedBackend]
) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    config, origin, model = await asyncio.to_thread(prepared, config)
    settings = from_run.from_config(config)
    callers = read_tokens(settings.token_files)
    token, admin = (callers.of(Role.SERVICE), callers.of(Role.ADMIN)) if callers else (None, None)
    status = TrainerStatus(settings.run, config.trainer.max_steps)
    async with AsyncExitStack() as stack:
        redis = connect(settings.redis_url, settings.redis_password_file, settings.ca_file, refused_s=REFUSED_S)
        stack.push_async_callback(redis.aclose)
        env = EnvClient(settings.env_url, token=token, ca_file=settings.ca_file)
        environments = await stack.enter_async_context(env)
        sinks = stack.enter_context(MetricsFanout.opened([PrometheusSink(prometheus.show)], config.run.folder))
        thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        stack.callback(thread.shutdown, wait=False, cancel_futures=True)
        folder = RunFolder(settings.run_folder)
        publications = Publications(folder.published, settings.run)
        stack.callback(publications.close)
        publisher = _publisher(settings, redis, publications, admin)
        tokenizer = tokenizer_of_run(model, config.run.date)
        opened = open_backend(BackendInputs(config, settings, model, tokenizer, origin, publications, sinks))
        stack.callback(opened.close)
        plan = from_run.plan(config, opened.tokens, origin)
        parts = Collaborators(
            backend=opened.backend,
            checkpoints=opened.checkpoints,
            queue=TicketQueue(redis, settings.run),
            ledger=LedgerFile(folder.ledger),
            archive=Archive(folder.archive, settings.run),
            commits=CommitLog(folder.archive, settings.run),
            metrics=StepLog(folder.metrics),
            handovers=StepLog(folder.handovers),
            refusals=Refusals(folder.path),
            executor=thread,
            warm_start=lambda: opened.warm_start(environments, status, thread),
            publish=publisher.publish,
            run_id=publications.run_id,
            bucket=_store(config, settings, model, publications.run_id, status, plan),
            has_lost=lambda: publications.has_lost,
            sinks=sinks,
        )
        app = _app(settings, callers, status, parts.bucket, _record_checks(config, folder, environments))
        app.state.publishing = PublishingState(publications, Uplink(publications.read), publisher.sources)
        yield RunningService(app, [TrainerWorker(plan, parts, status).run])


def _store(
    config: RunConfig,
    settings: TrainerSettings,
    model: Path,
    run_id: Callable[[], str],
    status: TrainerStatus,
    plan: TrainPlan,
) -> RunStore | None:
    if settings.bucket is None:
        return None
    status.bucket = settings.bucket
    opened: Callable[[StoreContext], RunStore] = packages.part("bucket.run")
    folder = settings.run_folder
    return opened(StoreContext(config, settings.bucket, folder, model, run_id, status, plan.settings))


def prepared(config: RunConfig) -> tuple[RunConfig, Origin | None, Path]:
    """Return the configuration with its model's content, the run that it starts from, and the model's folder.

    The model of a run that starts from another is that run's; the run's folder records the origin. Raises ConfigError.
    """
    for finding in findings(config):
        _log.warning("ineffective setting", finding=finding)
    origin = keep(config)
    if origin is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": origin.path})})
    model = model_folder(config.model.path, config.run.folder, weights=True)
    return with_content(config, model), origin, model


def _app(
    settings: TrainerSettings,
    callers: AccessTokens | None,
    status: TrainerStatus,
    bucket: RunStore | None,
    checks: Mapping[Record, RecordCheck],
) -> FastAPI:
    """Build the HTTP application; the caller adds the state of `publishing`."""
    roles = ROLES | publishing.ROLES | records.ROLES
    app = create_app("trainer", limits=settings.limits, tokens=callers, ready=status.not_ready, roles=roles)
    kept = records.RecordsState(RunFolder(settings.run_folder), checks=checks)
    app.state.status = status
    app.state.records = kept if bucket is None else replace(kept, check_open=bucket.check_open)
    for one in (router, publishing.router, records.router):
        app.include_router(one)
    return app


def _record_checks(config: RunConfig, folder: RunFolder, environments: EnvClient) -> Mapping[Record, RecordCheck]:
    """Return checks of lines that are handed over, by record; none if no package brings them."""
    checks: RunChecks | None = packages.part("run_checks", required=False)
    return {} if checks is None else checks.of_records(folder, config.run.name, config.data, environments.versions)


def _publisher(settings: TrainerSettings, redis: Redis, publications: Publications, token: str | None) -> Publisher:
    """Make the publisher; `token` is that of an admin of the rollout servers."""

    def connect_to(url: str) -> RolloutClient:
        return RolloutClient(url, token=token, ca_file=settings.ca_file)

    servers = _servers(redis, settings)
    return Publisher(settings.url, servers, publications.announce, connect_to, settings.update_mode)


def _servers(redis: Redis, settings: TrainerSettings) -> Callable[[], Awaitable[Served]]:
    """Return a function that lists the registered and the configured rollout servers, each once."""
    registry = Registry(redis, settings.run)

    async def servers() -> Served:
        fixed = dict[str, WeightVersion | None].fromkeys(url.rstrip("/") for url in settings.rollout_urls)
        registered = {
            server.url.rstrip("/"): WeightVersion.of_name(server.version) for server in await registry.servers()
        }
        return dict(sorted((fixed | registered).items()))

    return servers
