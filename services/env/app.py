"""Wires the env service: catalogue, episodes, routes. The environment of the run is tried at start, so that bad
settings and missing files end the service with one line instead of failing its first episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.env.catalogue import Catalogue, try_out
from services.env.episodes import Episodes
from services.env.routes import ROLES, EnvState, router
from services.env.runner import Runner
from services.env.settings import MAX_OBJECTS, EnvSettings, from_config
from shared.errors import ConfigError, InputError
from shared.process import telemetry
from shared.process.boot import RunningService
from shared.schema import RunConfig
from shared.web.access import read_tokens
from shared.web.http import create_app

_log = telemetry.Log("env")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    async with open_env(from_config(config)) as service:
        yield service


@asynccontextmanager
async def open_env(settings: EnvSettings) -> AsyncIterator[RunningService]:
    """The service from plain settings. Raises ConfigError."""
    catalogue = open_catalogue(settings)
    runner = Runner(settings.n_threads, settings.deadline_s, settings.max_episodes)
    tokens = read_tokens(settings.token_files)
    app = create_app(
        "env",
        limits=settings.limits,
        tokens=tokens,
        ready=lambda: runner.why_stuck(settings.env),
        roles=ROLES,
        max_objects=MAX_OBJECTS,
    )
    try:
        episodes = Episodes(runner, max_episodes=settings.max_episodes, ttl_s=settings.ttl_s)
        app.state.env = EnvState(catalogue, episodes, runner)
        app.include_router(router)
        _log.info("environments ready", env=settings.env, available=[entry.name for entry in catalogue.entries()])
        yield RunningService(app, [episodes.sweep, runner.watch])
    finally:
        runner.close()


def open_catalogue(settings: EnvSettings) -> Catalogue:
    """The catalogue, with one task of each of the run's environments tried out. Raises ConfigError."""
    try:
        catalogue = Catalogue(settings.configs)
        try_out(catalogue.get(settings.env).environment)
    except InputError as error:
        raise ConfigError(f"data.env={settings.env}: {error.detail}", error.hint) from error
    for name in settings.others:
        try:
            try_out(catalogue.get(name).environment)
        except InputError as error:
            raise ConfigError(f"data.mixture.{name}: {error.detail}", error.hint) from error
    return catalogue
