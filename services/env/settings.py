"""Plain settings of the service, read once from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.environments import datasets
from shared.reward_schema import EnvironmentRewards
from shared.run.folder import RunFolder
from shared.run.sources import FoundSource
from shared.schema import RunConfig
from shared.services_schema import EnvEndpoint, Limits, TokenFiles

MAX_BODY = 8 * 2**20
"""Bytes of a request body: room for the longest message under any JSON escaping."""

MAX_OBJECTS = 2**14
"""Values in a request body, far more than a message with its tool calls has."""


@dataclass(frozen=True, slots=True)
class ConfiguredSource:
    """An environment that the configuration names by file or import path.

    `found` is its location when the configuration was read, `sha256` the digest of its content, `config` the arguments
    of its class.
    """

    found: FoundSource
    sha256: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """Settings of the env service.

    Attributes:
        env: the run's main environment; checked at startup, as are the `others`.
        others: the remaining environments of the run's mixture.
        configs: settings of built-in environments, by name; only those that have some.
        variants: base and settings of environments that the run plays under names of its own.
        sources: environments that the configuration names by files or import paths, by their assigned names.
        ca_file: certificate authorities for https connections to them.
        rewards: additional rewards, by environment.
        folder: storage of submitted environments.
        max_sandboxes: most sandboxes at once.
        allow_changed_code: play submitted environments whose files have changed since the run began.
        ttl_s: idle life of an episode, in seconds.
        deadline_s: deadline of one call into environment code, in seconds.
        n_threads: calls into one kind of environment that run at once.
        n_processes: processes for episodes of built-in environments; 0 runs them in threads of the service.
        section: `services.env`, whose other settings are those of the package that extends the service.
        run: name of the run.
    """

    env: str
    configs: Mapping[str, Mapping[str, Any]]
    max_episodes: int
    ttl_s: float
    deadline_s: float
    n_threads: int
    limits: Limits
    token_files: TokenFiles
    folder: Path
    max_sandboxes: int
    n_processes: int = 0
    allow_changed_code: bool = False
    others: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, Mapping[str, Any]]] = field(
        default_factory=dict[str, tuple[str, Mapping[str, Any]]]
    )
    ca_file: Path | None = None
    rewards: Mapping[str, EnvironmentRewards] = field(default_factory=dict[str, EnvironmentRewards])
    sources: Mapping[str, ConfiguredSource] = field(default_factory=dict[str, ConfiguredSource])
    section: EnvEndpoint = field(default_factory=EnvEndpoint)
    run: str = "volley"

    @property
    def submitted(self) -> Path:
        """Folder of submitted environments."""
        return self.folder / "submitted"


def from_config(config: RunConfig) -> EnvSettings:
    """Derive the settings.

    Episodes outlive the orchestrator's deadline, and the service holds four times its concurrency.
    """
    data, orchestrator, limits, env = config.data, config.orchestrator, config.services.limits, config.services.env
    files = {"train": data.train, "eval": data.eval}
    configs: dict[str, dict[str, Any]] = {
        name: {k: v for k, v in files.items() if v is not None} for name in datasets()
    }
    played = data.environments
    for name, entry in played.items():
        if name not in data.sources and (name == data.env or entry.env_config) and not entry.base:
            configs[name] = {**configs.get(name, {}), **entry.env_config}
    folder = env.folder or RunFolder(config.run.folder).environments
    return EnvSettings(
        env=data.env,
        configs=configs,
        max_episodes=max(1024, 4 * orchestrator.max_concurrent_episodes),
        ttl_s=orchestrator.episode_timeout_s + 60.0,
        deadline_s=30.0,
        n_threads=4,
        limits=limits.model_copy(update={"max_body_bytes": min(limits.max_body_bytes, MAX_BODY)}),
        token_files=config.services.token_files,
        others=tuple(name for name in played if name != data.env),
        variants={name: (entry.base, entry.env_config) for name, entry in played.items() if entry.base},
        folder=folder,
        section=env,
        run=config.run.name,
        max_sandboxes=max(64, orchestrator.max_concurrent_episodes + 32),
        n_processes=env.processes,
        allow_changed_code=env.allow_changed_code,
        ca_file=config.services.tls.ca_file,
        rewards=data.rewards,
        sources={
            name: ConfiguredSource(FoundSource(source.path, source.entry), source.sha256, played[name].env_config)
            for name, source in data.sources.items()
            if name in played
        },
    )
