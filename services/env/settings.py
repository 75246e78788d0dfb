"""Plain settings of the service, read once from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.env.harbor.containers import HarborSettings
from services.env.sandbox.limits import SandboxLimits
from services.env.sandbox.process.containers import ContainerSettings
from shared.reward_schema import EnvironmentRewards, RewardServer
from shared.run.folder import RunFolder
from shared.run.sources import FoundSource
from shared.schema import RunConfig
from shared.services_schema import Limits, TokenFiles

DATASETS = frozenset({"code", "gsm8k", "math", "text_to_sql"})
"""Environments that read data.train and data.eval."""

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
        remote_tokens_file: tokens for remote environments, by address.
        ca_file: certificate authorities for https connections to them.
        rewards: additional rewards, by environment.
        reward_servers: servers that compute rewards, by name.
        folder: storage of submitted environments.
        unsandboxed: tools and environments that may run on machines without a sandbox.
        sandbox: limits of one process of submitted code.
        containers: where programs run that a model writes; None runs them in sandboxed processes.
        max_sandboxes: most sandboxes at once.
        package_index: index from which their dependencies are installed.
        allow_changed_code: play submitted environments whose files have changed since the run began.
        ttl_s: idle life of an episode, in seconds.
        deadline_s: deadline of one call into environment code, in seconds.
        n_threads: calls into one kind of environment that run at once.
        n_processes: processes for episodes of built-in environments; 0 runs them in threads of the service.
        harbor: containers of task folders.
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
    sandbox: SandboxLimits
    max_sandboxes: int
    package_index: str
    n_processes: int = 0
    unsandboxed: tuple[str, ...] = ()
    allow_changed_code: bool = False
    others: tuple[str, ...] = ()
    variants: Mapping[str, tuple[str, Mapping[str, Any]]] = field(
        default_factory=dict[str, tuple[str, Mapping[str, Any]]]
    )
    remote_tokens_file: Path | None = None
    ca_file: Path | None = None
    rewards: Mapping[str, EnvironmentRewards] = field(default_factory=dict[str, EnvironmentRewards])
    reward_servers: Mapping[str, RewardServer] = field(default_factory=dict[str, RewardServer])
    sources: Mapping[str, ConfiguredSource] = field(default_factory=dict[str, ConfiguredSource])
    harbor: HarborSettings = field(default_factory=HarborSettings)
    containers: ContainerSettings | None = None


def from_config(config: RunConfig) -> EnvSettings:
    """Derive the settings.

    Episodes outlive the orchestrator's deadline, and there is room for four times its concurrency.
    """
    data, orchestrator, limits, env = config.data, config.orchestrator, config.services.limits, config.services.env
    files = {"train": data.train, "eval": data.eval}
    configs: dict[str, dict[str, Any]] = {name: {k: v for k, v in files.items() if v is not None} for name in DATASETS}
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
        harbor=HarborSettings(env.harbor, config.run.name, folder / "trials", folder / "pythons"),
        sandbox=SandboxLimits(memory_mb=env.sandbox_memory_mb),
        containers=(
            ContainerSettings(env.sandbox, config.run.name, folder / "sandboxes")
            if env.sandbox.kind == "container"
            else None
        ),
        max_sandboxes=max(64, orchestrator.max_concurrent_episodes + 32),
        package_index=env.package_index,
        n_processes=env.processes,
        unsandboxed=env.unsandboxed,
        allow_changed_code=env.allow_changed_code,
        remote_tokens_file=env.remote_tokens_file,
        ca_file=config.services.tls.ca_file,
        rewards=data.rewards,
        reward_servers=env.reward_servers,
        sources={
            name: ConfiguredSource(FoundSource(source.path, source.entry), source.sha256, played[name].env_config)
            for name, source in data.sources.items()
            if name in played
        },
    )
