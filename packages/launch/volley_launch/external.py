"""Check a run's external services before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared import packages
from shared.clients.base import HttpClient
from shared.errors import (
    ConfigError,
    Forbidden,
    NotFound,
    ServiceUnreachable,
    TlsFailed,
    Unauthorized,
    Unavailable,
    VolleyError,
)
from shared.schema import RunConfig
from shared.services import SERVICES, kind_of
from shared.visible import quoted
from shared.web.access import Role, token_for
from volley.local.external import find

_TIMEOUT_S = 10.0


async def check(config: RunConfig) -> None:
    """Check the run's external services, the servers of its engines and its teacher.

    Services must answer, accept our tokens and offer the run's environments; engines' servers and teacher must answer.

    Raises ServiceUnreachable or Unavailable (it does not answer, it is not ready), ConfigError (tokens, environment,
    settings).
    """
    for name, url in find(config.services).items():
        kind = kind_of(name)
        replicated = SERVICES[kind].replicated
        key = f"services.{kind}_urls" if replicated else f"services.{kind}.url"
        role = Role.ADMIN if replicated else Role.SERVICE
        token = token_for(config.services.token_files, role)
        async with HttpClient(url, token=token, timeout_s=_TIMEOUT_S, ca_file=config.services.tls.ca_file) as client:
            await _check_answers(client, key)
            try:
                if kind == "env":
                    await _check_environments(client, config)
                elif kind == "rollout":
                    await _check_weights_access(client)
            except Forbidden as error:
                raise _refused(f"{key}: {url}", error, role, given=token is not None) from error
    await _check_engines(config)
    if config.algorithm.teacher_kl_coef and not config.is_supervised:
        await packages.part("teachers").check(config)


async def _check_engines(config: RunConfig) -> None:
    """Raises ServiceUnreachable for a server of `rollout.engine.url` that does not answer."""
    if config.services.rollout_urls or config.is_supervised:
        return
    for url in config.rollout.engine.urls:
        async with HttpClient(url, timeout_s=_TIMEOUT_S, ca_file=config.services.tls.ca_file) as client:
            try:
                await client.exchange("GET", "/health")
            except ServiceUnreachable as error:
                hint = "start it first, as docs/engines.md says"
                raise ServiceUnreachable(f"rollout.engine.url: {error.detail}", hint) from error


def _refused(what: str, error: Forbidden, role: Role, *, given: bool) -> ConfigError:
    if isinstance(error, Unauthorized) and not given:
        return ConfigError(
            f"{what} asks for a token",
            "name the files with the tokens that it accepts in services.token_files (service and admin)",
        )
    wanted = f"services.token_files.{role} must hold a token that it accepts"
    return ConfigError(f"{what} refuses the token of services.token_files: {error.detail}", wanted)


async def _check_answers(client: HttpClient, key: str) -> None:
    try:
        await client.get("/health")
    except TlsFailed as error:
        raise TlsFailed(f"{key}: {error.detail}", error.hint) from error
    except ServiceUnreachable as error:
        hint = f"start it, or remove {key} to start one here"
        raise ServiceUnreachable(f"{key}: {error.detail}", hint) from error
    except VolleyError as error:
        raise ConfigError(
            f"{key}: {client.base_url} is not a service of Volley: GET /health answers {error.detail}"
        ) from error


async def _check_environments(client: HttpClient, config: RunConfig) -> None:
    """Raises Unavailable, Forbidden or ConfigError."""
    for env, entry in config.data.environments.items():
        section = "data" if env == config.data.env else f"data.mixture.{env}"
        try:
            await client.get("/ready")
            await client.get(f"/{env}/splits")
            listed = (await client.get("/environments"))["environments"]
        except Unavailable as error:
            raise Unavailable(
                f"services.env.url: {client.base_url} is not ready: {error.detail}", error.hint
            ) from error
        except NotFound as error:
            key = f"data.env={env}" if section == "data" else section
            hint = error.hint
            if (source := config.data.sources.get(env)) is not None:
                name = env.partition("@")[0]
                command = quoted("volley", "env", "submit", source.path, "--name", name, "--url", client.base_url)
                hint = f"submit it there first: {command}"
            raise ConfigError(f"{key}: services.env.url: {client.base_url} says: {error.detail}", hint) from error
        row: Mapping[str, Any] = next((one for one in listed if one["name"] == env), {})
        _check_rewards(client, config, env, row.get("rewards"))
        settings: Mapping[str, Any] = row.get("config", {})
        for name, wanted in entry.env_config.items():
            if name in settings and settings[name] != wanted:
                raise ConfigError(
                    f"{section}.env_config.{name}={wanted!r}: {client.base_url} serves {env} with {settings[name]!r}",
                    "start that service with this run's configuration, or write its settings into "
                    f"{section}.env_config",
                )


def _check_rewards(client: HttpClient, config: RunConfig, env: str, served: Any) -> None:
    """Raises ConfigError if the service rewards episodes differently from this configuration."""
    rewards = config.data.rewards.get(env) or config.data.rewards.get(env.partition("@")[0])
    if served != (rewards and rewards.model_dump(mode="json")):
        raise ConfigError(
            f"data.rewards.{env}: {client.base_url} rewards {env} differently",
            "start that service with this run's data.rewards and services.env.reward_servers",
        )


async def _check_weights_access(client: HttpClient) -> None:
    """Check that the trainer may set the server's weights. Raises Forbidden. The request names no weights, so a server
    that accepts the token refuses only its body.
    """
    try:
        await client.post("/weights/stage", {})
    except Forbidden:
        raise
    except VolleyError:
        return
