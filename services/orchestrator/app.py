"""Wires the orchestrator: Redis, the environment service, rollout servers, the run, routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI

from services.orchestrator import metrics
from services.orchestrator.agents import AgentRecorder, RecorderContext, agent_recorder
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.episodes.partials import TABLE, PartialRollouts
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.teaching import Teachers, TeachingContext
from services.orchestrator.judges import JudgeContext
from services.orchestrator.mixture.mixture import opened_curriculum
from services.orchestrator.orchestrator import Orchestrator
from services.orchestrator.routes import ROLES, router
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.handover import RecordHandover
from services.orchestrator.schedule.policy import policy_of
from services.orchestrator.servers.balancer import Balancer
from services.orchestrator.servers.fleet import GIVE_UP_S, Discover, DiscoveredServer, Fleet
from services.orchestrator.servers.slots import Slots
from services.orchestrator.settings import OrchestratorSettings, from_config
from services.orchestrator.status import RunStatus
from services.orchestrator.store import RecordStore
from services.orchestrator.tallies import EnvironmentTallies
from shared import packages
from shared.boot import RunningService
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.clients.trainer import TrainerClient
from shared.models import content
from shared.models.chat import ChatTokenizer, tokenizer_of_run
from shared.models.config import ModelConfig
from shared.models.hub import model_folder
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.queue.client import REFUSED_S, connect
from shared.queue.queue import TicketQueue
from shared.queue.registry import Registry
from shared.routing import RoutingShape
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.web.access import AccessTokens, Role, read_tokens
from shared.web.http import create_app


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Open the orchestrator; its worker waits for services that are not up yet. Raises ConfigError."""
    async with open_orchestrator(from_config(config)) as service:
        yield service


@asynccontextmanager
async def open_orchestrator(settings: OrchestratorSettings) -> AsyncIterator[RunningService]:
    """Open the orchestrator from plain settings. Raises ConfigError."""
    _check_rule(settings)
    tokens = read_tokens(settings.token_files)
    token = tokens.of(Role.SERVICE) if tokens else None
    tokenizer, routing = await _model(settings)
    settings = replace(settings, routing_replay=routing is not None)
    async with AsyncExitStack() as stack:
        ca_file = settings.ca_file
        redis = await stack.enter_async_context(
            connect(settings.redis_url, settings.redis_password_file, ca_file, refused_s=REFUSED_S)
        )
        environments = await stack.enter_async_context(EnvClient(settings.env_url, token=token, ca_file=ca_file))
        trainer = await stack.enter_async_context(TrainerClient(settings.trainer_url, token=token, ca_file=ca_file))
        balancer = Balancer(settings.terms.max_staleness)
        slots = Slots(settings.max_concurrent, settings.generation.eval_share)
        registry, status = Registry(redis, settings.run), RunStatus()
        fleet = await stack.enter_async_context(_fleet(settings, balancer, slots, registry, token, routing))
        played, evaluated = lambda: orchestrator.environments_played(), lambda: orchestrator.last_evaluated()
        recorder = agent_recorder(
            RecorderContext(settings, tokenizer, environments, balancer, status, trainer, played, evaluated)
        )
        partials = await stack.enter_async_context(_partials(settings))
        agents = None if recorder is None else recorder.agents
        runner = EpisodeRunner(tokenizer, environments, balancer, status, settings.bounds, agents, partials)
        asked = TeachingContext(tokenizer, balancer, status, settings.bounds)
        teachers = await stack.enter_async_context(settings.teachers(asked)) if settings.teachers else Teachers()
        n_attempts, teaching = settings.bounds.max_attempts, teachers.of_episodes
        dispatcher = Dispatcher(runner, balancer, status, slots=slots, max_attempts=n_attempts, teaching=teaching)
        judged = JudgeContext(tokenizer, status)
        judges = await stack.enter_async_context(settings.judges(judged)) if settings.judges else None
        handover = RecordHandover(trainer, RunFolder(settings.folder), status)
        sinks = stack.enter_context(MetricsFanout.opened([PrometheusSink(metrics.show)], settings.folder))
        orchestrator = Orchestrator(
            settings,
            TicketQueue(redis, settings.run),
            environments,
            tokenizer,
            balancer,
            status,
            ReservationGate(),
            dispatcher,
            handover,
            policy=policy_of(
                settings.generation, settings.terms.batch, settings.group_size, mask_truncated=settings.mask_truncated
            ),
            sinks=sinks,
            recorder=recorder,
            judges=judges,
            partials=partials,
            privileged=teachers.of_groups,
        )
        yield RunningService(
            _application(settings, tokens, orchestrator, recorder),
            [fleet.watch, orchestrator.work, handover.watch, *(recorder.workers if recorder else ())],
        )


def _check_rule(settings: OrchestratorSettings) -> None:
    """Raise ConfigError for a curriculum of the user that fails on made inputs; a run makes its own only later."""
    if settings.curriculum is not None:
        opened_curriculum(settings.curriculum, EnvironmentTallies(), settings.members)


async def _model(settings: OrchestratorSettings) -> tuple[ChatTokenizer, RoutingShape | None]:
    """Return the tokenizer of the run's model, and its routing if the trainer replays it. Raises ConfigError."""
    folder = await asyncio.to_thread(model_folder, settings.model_path, settings.folder)
    content.check(settings.model_content, await asyncio.to_thread(content.digests, folder), folder)
    routing = ModelConfig.read(folder).routing if settings.routing_replay else None
    return await asyncio.to_thread(tokenizer_of_run, folder, settings.date), routing


def _fleet(
    settings: OrchestratorSettings,
    balancer: Balancer,
    slots: Slots,
    registry: Registry,
    token: str | None,
    routing: RoutingShape | None,
) -> Fleet:
    is_adaptive = settings.generation.concurrency == "adaptive"
    return Fleet(
        balancer,
        _discover(registry, settings.rollout_urls),
        lambda url: RolloutClient(url, token=token, ca_file=settings.ca_file, routing=routing),
        packages.part("adaptive_concurrency")(slots, settings.group_size).observe if is_adaptive else None,
        GIVE_UP_S + settings.limits.grace_s,
    )


def _application(
    settings: OrchestratorSettings,
    tokens: AccessTokens | None,
    orchestrator: Orchestrator,
    recorder: AgentRecorder | None,
) -> FastAPI:
    """Return the service's application with all its routes."""
    roles = ROLES | (recorder.roles if recorder else {})
    app = create_app("orchestrator", limits=settings.limits, tokens=tokens, ready=lambda: None, roles=roles)
    app.state.orchestrator = orchestrator
    app.include_router(router)
    if recorder is not None:
        recorder.attach(app)
        app.include_router(recorder.router)
    return app


@asynccontextmanager
async def _partials(settings: OrchestratorSettings) -> AsyncIterator[PartialRollouts]:
    """Open the store of running episodes, if the run keeps them. Raises Unavailable and ConfigError."""
    if not settings.generation.partial_rollouts:
        yield PartialRollouts(None)
        return
    store = await asyncio.to_thread(RecordStore, RunFolder(settings.folder).partials, TABLE)
    try:
        yield PartialRollouts(store)
    finally:
        await asyncio.to_thread(store.close)


def _discover(registry: Registry, fixed_urls: Sequence[str]) -> Discover:
    async def discover() -> Sequence[DiscoveredServer]:
        registered = [DiscoveredServer(server.url.rstrip("/"), server.capacity) for server in await registry.servers()]
        known = {server.url for server in registered}
        return registered + [DiscoveredServer(url.rstrip("/")) for url in fixed_urls if url.rstrip("/") not in known]

    return discover
