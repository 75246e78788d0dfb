"""Wires the env service: catalogue, episodes, routes, and what an installed package adds.

At startup the service makes the first tasks of the run's environments, so that wrong settings and missing files end it
with one line instead of failing its first episode.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path

from fastapi import FastAPI

from services.env.api import environments
from services.env.api.routes import ROLES, direct_routes, router
from services.env.api.state import EnvState
from services.env.catalogue import Catalogue, CatalogueEntry, try_out
from services.env.content import ContentRecord
from services.env.environments.kinds import kinds
from services.env.episodes import Episodes
from services.env.equipment import EquippedBackend
from services.env.extension import Extension
from services.env.processes import EnvironmentProcesses, environment_processes
from services.env.settings import MAX_OBJECTS, EnvSettings, from_config
from services.env.threads import ThreadRunner
from shared import packages
from shared.boot import RunningService
from shared.errors import ConfigError, InputError, StorageDenied, Unavailable
from shared.files import locks
from shared.process import telemetry
from shared.schema import RunConfig
from shared.web.access import read_tokens
from shared.web.http import create_app

_log = telemetry.Log("env")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError, and Unavailable while another env service uses the folder.

    A service that plays a run again (`allow_changed_code`) may run at the same time as the run's own: it submits
    nothing.
    """
    settings = from_config(config)
    with nullcontext() if settings.allow_changed_code else _locked(settings.folder):
        async with open_env(settings) as service:
            yield service


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other env services, which would overwrite each other's files.

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
                "give each run its own services.env.folder; with services.env.processes one service uses more cores",
            )
        yield
    finally:
        os.close(lock)


@asynccontextmanager
async def open_env(settings: EnvSettings) -> AsyncIterator[RunningService]:
    """Open the service from plain settings. Raises ConfigError."""
    runner = ThreadRunner(settings.n_threads, settings.deadline_s, settings.max_episodes)
    extension = open_extension(settings, runner)
    async with AsyncExitStack() as opened:
        processes = await opened.enter_async_context(environment_processes(settings))
        catalogue = open_catalogue(settings, runner, extension, processes)
        await opened.enter_async_context(extension.running(catalogue))
        content = ContentRecord(settings.folder, settings.submitted, allow_changed_code=settings.allow_changed_code)
        try_out_all(settings, catalogue)
        await try_out_tools(settings, catalogue)
        check_rewarded(settings, catalogue)
        await content.ensure_all(_environments_of_run(settings, catalogue))
        if processes is not None:
            processes.expect(content.expected())
        episodes = Episodes(
            max_episodes=settings.max_episodes,
            ttl_s=settings.ttl_s,
            deadline_s=settings.deadline_s,
            watcher=extension.watcher,
            rewards=extension.rewards,
        )
        app = _app(settings, catalogue, extension)
        app.state.env = EnvState(catalogue, episodes, content, extension)
        _log.info("environments ready", env=settings.env, available=[entry.name for entry in catalogue.entries()])
        try:
            keeping = () if processes is None else (processes.keep,)
            yield RunningService(app, [episodes.sweep, runner.watch, *keeping, *extension.workers()])
        finally:
            await episodes.close()
            runner.close()


def open_extension(settings: EnvSettings, runner: ThreadRunner) -> Extension:
    """Build what the installed package adds. Raises ConfigError if the run needs one and there is none."""
    needed = bool(settings.sources or settings.rewards)
    kind: type[Extension] = packages.part("environments", required=needed) or Extension
    return kind(settings, runner)


def _app(settings: EnvSettings, catalogue: Catalogue, extension: Extension) -> FastAPI:
    """Build the HTTP application; the caller adds the state of the routes."""
    app = create_app(
        "env",
        limits=settings.limits,
        tokens=read_tokens(settings.token_files),
        ready=lambda: _not_ready_reason(catalogue, settings.env),
        roles={**ROLES, **environments.ROLES},
        max_objects=MAX_OBJECTS,
        direct=direct_routes(),
        about=extension.about,
    )
    app.include_router(environments.router)
    app.include_router(router)
    return app


def _environments_of_run(settings: EnvSettings, catalogue: Catalogue) -> list[CatalogueEntry]:
    """The run's environments, and those added to the run later."""
    names = {settings.env, *settings.others}
    return [entry for entry in catalogue.entries() if entry.name in names or entry.name not in kinds()]


def open_catalogue(
    settings: EnvSettings, runner: ThreadRunner, extension: Extension, processes: EnvironmentProcesses | None = None
) -> Catalogue:
    """Build the catalogue of built-in environments and their variants. Raises ConfigError."""
    try:
        variants = settings.folder / "variants.json"
        return Catalogue(runner, settings.configs, variants, settings.variants, extension.equipment, processes)
    except InputError as error:
        keys = f"data.env={settings.env}" if not settings.others else "data.env, data.mixture"
        raise ConfigError(f"{keys}: {error.detail}", error.hint) from error


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
        backend = catalogue.get(name).backend if catalogue.has(name) else None
        try:
            if isinstance(backend, EquippedBackend):
                await backend.check_tools()
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


def _not_ready_reason(catalogue: Catalogue, env: str) -> str | None:
    return catalogue.get(env).backend.stuck_reason() if catalogue.has(env) else None
