"""Wires the env service: catalogue, submissions, sandboxes, episodes, routes.

At startup the service makes the first tasks of the run's environments, so that wrong settings and missing files end it
with one line instead of failing its first episode.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path

from fastapi import FastAPI

from services.env.api import environments, openenv, tools
from services.env.api.routes import ROLES, direct_routes, router
from services.env.api.state import EnvState
from services.env.backends.remote.site import open_access
from services.env.catalogue import KINDS, Catalogue, CatalogueEntry, try_out
from services.env.content import ContentRecord
from services.env.episodes import Episodes
from services.env.harbor.containers import Containers
from services.env.rewards.rewards import Rewards
from services.env.sandbox.sandboxes import Sandboxes
from services.env.settings import MAX_OBJECTS, ConfiguredSource, EnvSettings, from_config
from services.env.submissions.offers import Offers
from services.env.submissions.programs import Programs
from services.env.submissions.store import SubmissionStore
from services.env.submissions.submission import Submission
from services.env.submissions.submissions import Submissions
from services.env.threads import ThreadRunner
from services.env.tools.mcp import McpServers
from services.env.tools.toolset import ANY_TOOLS, Toolbox, ToolSet
from services.env.workers.pool import WorkerPool, WorkerSettings
from shared.boot import RunningService
from shared.errors import ConfigError, InputError, StorageDenied, Unavailable
from shared.files import locks
from shared.process import telemetry
from shared.run.sources import content_of
from shared.schema import RunConfig
from shared.web.access import read_tokens
from shared.web.http import create_app

_log = telemetry.Log("env")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError, and Unavailable while another env service uses the folder.

    A service that plays a run again (`allow_changed_code`) may run beside the run's own: it submits nothing.
    """
    settings = from_config(config)
    with nullcontext() if settings.allow_changed_code else _sole_use(settings.folder):
        async with open_env(settings) as service:
            yield service


@contextmanager
def _sole_use(folder: Path) -> Iterator[None]:
    """Keep other env services from the folder; each would overlook and overwrite what the others store there.

    A service that cannot write to the folder stores nothing there, and needs no lock.
    """
    try:
        lock = locks.lock_file(folder / ".lock")
    except StorageDenied:
        yield
        return
    try:
        if not locks.try_lock(lock):
            raise Unavailable(
                f"another env service uses {folder}",
                "start one for each run, with a services.env.folder of its own: it alone knows its episodes and what "
                "was submitted to it. services.env.processes gives it more cores; other env services can be submitted "
                "to it by their addresses",
            )
        yield
    finally:
        os.close(lock)


@asynccontextmanager
async def open_env(settings: EnvSettings) -> AsyncIterator[RunningService]:
    """Open the service from plain settings. Raises ConfigError."""
    runner = ThreadRunner(settings.n_threads, settings.deadline_s, settings.max_episodes)
    sandboxes = Sandboxes(max_running=settings.max_sandboxes, containers=settings.containers)
    pool = WorkerPool(
        settings.n_processes, WorkerSettings(settings.n_threads, settings.deadline_s, settings.max_episodes)
    )
    servers = McpServers()
    toolbox = Toolbox(sandboxes, runner, servers, settings.unsandboxed)
    catalogue = open_catalogue(settings, runner, toolbox, pool if settings.n_processes else None)
    rewarding = Rewards(settings.rewards, settings.reward_servers, settings.folder, settings.ca_file)
    containers = Containers(settings.harbor)
    async with sandboxes, servers, pool, containers.running(), rewarding as rewards:
        store = SubmissionStore(settings.folder / "submitted")
        submissions = _submissions(settings, store, catalogue, sandboxes, containers)
        content = ContentRecord(settings.folder, store, allow_changed_code=settings.allow_changed_code)
        await submissions.open()
        for full_name, source in settings.sources.items():
            await submit_configured(submissions, full_name, source)
        try_out_all(settings, catalogue)
        await try_out_tools(settings, catalogue)
        check_rewarded(settings, catalogue)
        await content.ensure_all(_environments_of_run(settings, catalogue))
        pool.expect(content.expected())
        episodes = Episodes(
            max_episodes=settings.max_episodes,
            ttl_s=settings.ttl_s,
            deadline_s=settings.deadline_s,
            watcher=submissions,
            rewards=rewards,
        )
        app = _app(settings, catalogue, sandboxes)
        app.state.env = EnvState(catalogue, episodes, submissions, rewards, ToolSet(toolbox, ANY_TOOLS), content)
        _log.info("environments ready", env=settings.env, available=[entry.name for entry in catalogue.entries()])
        workers = [episodes.sweep, runner.watch, pool.keep, submissions.validate_waiting, submissions.judge_canaries]
        try:
            yield RunningService(app, workers)
        finally:
            await episodes.close()
            runner.close()


def _app(settings: EnvSettings, catalogue: Catalogue, sandboxes: Sandboxes) -> FastAPI:
    """Build the HTTP application; the caller adds the state of the routes."""
    app = create_app(
        "env",
        limits=settings.limits,
        tokens=read_tokens(settings.token_files),
        ready=lambda: _why_not(catalogue, settings.env),
        roles={**ROLES, **environments.ROLES, **openenv.ROLES, **tools.ROLES},
        max_objects=MAX_OBJECTS,
        direct=direct_routes(),
        about=lambda: {"sandbox": sandboxes.tier.describe() if sandboxes.tier else None},
    )
    app.state.websockets = True
    for one in (environments.router, openenv.router, tools.router, router):
        app.include_router(one)
    return app


def _environments_of_run(settings: EnvSettings, catalogue: Catalogue) -> list[CatalogueEntry]:
    """The run's environments, and those added to the run later."""
    names = {settings.env, *settings.others}
    return [entry for entry in catalogue.entries() if entry.name in names or entry.name not in KINDS]


def _submissions(
    settings: EnvSettings,
    store: SubmissionStore,
    catalogue: Catalogue,
    sandboxes: Sandboxes,
    containers: Containers,
) -> Submissions:
    """Raises ConfigError."""
    remotes = open_access(settings.remote_tokens_file, settings.ca_file, settings.deadline_s)
    programs = Programs(store, settings.folder, settings.package_index, containers)
    offers = Offers(
        store, catalogue, sandboxes, remotes, programs, settings.sandbox, settings.deadline_s, settings.ca_file
    )
    return Submissions(store, catalogue, sandboxes, programs, offers, unsandboxed=settings.unsandboxed)


def open_catalogue(
    settings: EnvSettings, runner: ThreadRunner, toolbox: Toolbox | None = None, pool: WorkerPool | None = None
) -> Catalogue:
    """Build the catalogue of built-in environments and their variants. Raises ConfigError."""
    try:
        return Catalogue(runner, settings.configs, settings.folder / "variants.json", settings.variants, toolbox, pool)
    except InputError as error:
        keys = f"data.env={settings.env}" if not settings.others else "data.env, data.mixture"
        raise ConfigError(f"{keys}: {error.detail}", error.hint) from error


async def submit_configured(submissions: Submissions, full_name: str, source: ConfiguredSource) -> None:
    """Submit an environment that the configuration names by file.

    Raises ConfigError, Unavailable.
    """

    def read() -> Submission:
        content, archive = content_of(source.found)
        if hashlib.sha256(content).hexdigest() != source.sha256:
            raise ConfigError(
                f"{source.found.path} has changed since the run's configuration was made",
                "restore the file, or start another run",
            )
        return Submission(full_name.partition("@")[0], content, source.found.entry, source.config, 0.0, archive)

    try:
        await submissions.ensure(full_name, read)
    except InputError as error:
        raise ConfigError(f"{source.found.path}: {error.detail}", error.hint) from error


def try_out_all(settings: EnvSettings, catalogue: Catalogue) -> None:
    """Make the first tasks of the run's built-in environments. Raises ConfigError.

    Submitted environments did so when they were validated.
    """
    for key, name in ((f"data.env={settings.env}", settings.env), *((f"data.mixture.{n}", n) for n in settings.others)):
        try:
            if (backend := catalogue.built_in(name)) is not None:
                try_out(backend.environment)
        except InputError as error:
            raise ConfigError(f"{key}: {error.detail}", error.hint) from error


async def try_out_tools(settings: EnvSettings, catalogue: Catalogue) -> None:
    """Check the tools of the run's environments. Raises ConfigError."""
    for name in (settings.env, *settings.others):
        tools = catalogue.tools(name) if catalogue.has(name) else None
        try:
            if tools is not None:
                await tools.check()
        except InputError as error:
            raise ConfigError(f"{name}: tools: {error.detail}", error.hint) from error


def check_rewarded(settings: EnvSettings, catalogue: Catalogue) -> None:
    """Reject rewards for a name that is nearly, but not exactly, an environment of the run.

    Other unknown names get a warning, because an environment may be submitted later. Raises ConfigError.
    """
    bare = [name for name in (settings.env, *settings.others) if name not in settings.rewards]
    plain = [name.partition("@")[0] for name in bare]
    for name in settings.rewards:
        if catalogue.has(name):
            continue
        if near := get_close_matches(name, {*bare, *plain} - settings.rewards.keys(), n=1, cutoff=0.8):
            raise ConfigError(
                f"data.rewards.{name}: there is no such environment; the run plays {near[0]}, which has no rewards",
                f"write data.rewards.{near[0]}; to submit {name} later, give it a less similar name",
            )
        _log.warning("rewards are configured for an environment that does not exist yet", env=name)


def _why_not(catalogue: Catalogue, env: str) -> str | None:
    return catalogue.get(env).backend.why_stuck() if catalogue.has(env) else None
