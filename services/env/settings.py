"""The plain values the service needs, read once from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.env.sandbox.limits import SandboxLimits
from shared.reward_schema import EnvironmentRewards, RewardServer
from shared.run.folder import RunFolder
from shared.run.sources import FoundSource
from shared.schema import RunConfig
from shared.services_schema import Limits, TokenFiles

DATASETS = frozenset({"code", "gsm8k", "math", "text_to_sql"})
"""Environments that read data.train and data.eval."""

MAX_BODY = 8 * 2**20
"""Bytes: room for a message of the greatest length, however it is escaped."""

MAX_OBJECTS = 2**14
"""Values of a body: far more than a message with its tool calls has."""


@dataclass(frozen=True, slots=True)
class ConfiguredSource:
    """An environment that the configuration names by a file or import path: where it was then, the digest of what is
    played, and the arguments of its class.
    """

    found: FoundSource
    sha256: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """`env` is the main environment of the run, `others` are the rest of its mixture, all checked at start; `configs`
    holds the settings of each built-in that has some, `variants` by name the built-ins and settings of what the run
    plays under names of its own.

    `remote_tokens_file` holds the tokens that remote environments are sent, by their address; `ca_file` who vouches for
    those at https.

    `rewards` are those beside the environments' own, by environment, and `reward_servers` who gives them.

    `folder` keeps what is submitted; `unsandboxed` names what may be submitted where nothing confines it, `sandbox` is
    what one process of submitted code may use, `max_sandboxes` how many there are at once, `package_index` where their
    dependencies come from. `allow_changed_code` plays submitted environments whose files have changed since the run
    began.

    `sources` are those that the configuration names by files or import paths, under the names that took their place.

    ttl_s is the idle life of an episode, in seconds; deadline_s bounds one call into environment code; n_threads is
    how many calls into one kind of environment run at once, n_processes how many processes the episodes of built-in
    environments run in, 0 if in the service's own threads.
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


def from_config(config: RunConfig) -> EnvSettings:
    """An episode outlives the orchestrator's own deadline, and four times its concurrency fits."""
    data, orchestrator, limits, env = config.data, config.orchestrator, config.services.limits, config.services.env
    files = {"train": data.train, "eval": data.eval}
    configs: dict[str, dict[str, Any]] = {name: {k: v for k, v in files.items() if v is not None} for name in DATASETS}
    played = data.environments
    for name, entry in played.items():
        if name not in data.sources and (name == data.env or entry.env_config) and not entry.base:
            configs[name] = {**configs.get(name, {}), **entry.env_config}
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
        folder=env.folder or RunFolder(config.run.folder).environments,
        sandbox=SandboxLimits(memory_mb=env.sandbox_memory_mb),
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
