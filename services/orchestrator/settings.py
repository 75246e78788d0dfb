"""Plain values that the service needs, read once from the run's configuration."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.episodes.teaching import OpenTeachers, teachers_of
from services.orchestrator.episodes.turn import TokenBounds
from services.orchestrator.judges import OpenJudges, judges_of
from services.orchestrator.schedule.reservations import Admission
from shared.data_schema import CurriculumConfig
from shared.errors import ConfigError
from shared.generation_schema import GenerationSection, has_fresh_rounds, round_size, started_ahead
from shared.run.shares import Member, configured
from shared.schema import RunConfig
from shared.services_schema import Limits, TokenFiles


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Settings of the orchestrator.

    `folder` is the run's folder on this host; the trainer at `trainer_url` may have another one. `sampling` holds
    temperature, top_p and top_k of training episodes. `env` is the main environment, `members` are all that the run
    starts with. `teachers` and `judges` are None if they are not used. With `routing_replay`, training episodes record
    experts, if the model has any.
    """

    run: str
    folder: Path
    seed: int
    model_path: str
    date: datetime.date | None
    env: str
    members: Mapping[str, Member]
    curriculum: CurriculumConfig | None
    env_url: str
    trainer_url: str
    rollout_urls: tuple[str, ...]
    redis_url: str
    redis_password_file: Path | None
    token_files: TokenFiles
    ca_file: Path | None
    limits: Limits
    bounds: TokenBounds
    terms: Admission
    sampling: Mapping[str, Any]
    group_size: int
    max_concurrent: int
    max_steps: int
    n_eval_tasks: int
    eval_every: int | None
    teachers: OpenTeachers | None = None
    judges: OpenJudges | None = None
    routing_replay: bool = False
    mask_truncated: bool = False
    generation: GenerationSection = field(default_factory=GenerationSection)
    model_content: Mapping[str, str] = field(default_factory=dict[str, str])
    agents_url: str = ""

    @property
    def model_name(self) -> str:
        """Name of the model for agents, as a rollout server says it."""
        return self.model_path.rstrip("/").rpartition("/")[2]

    @property
    def n_groups(self) -> int:
        """Number of groups worked on at once: as many as fill the concurrency, at least one; or those of a round.

        With adaptive concurrency twice as many, so that groups with few running episodes leave no slot empty.
        """
        if self.generation.mode == "turn_synchronous":
            return round_size(self.generation, self.terms.batch)
        n_groups = max(1, self.max_concurrent // self.group_size)
        return 2 * n_groups if self.generation.concurrency == "adaptive" else n_groups


def from_config(config: RunConfig) -> OrchestratorSettings:
    """Read the settings. Raises ConfigError."""
    orchestrator, trainer, services = config.orchestrator, config.trainer, config.services
    generation, batch = orchestrator.generation, trainer.groups_per_step
    factor, max_staleness = generation.over_sampling_factor, config.grpo_config.off_policy_steps
    return OrchestratorSettings(
        run=config.run.name,
        folder=config.run.folder,
        seed=config.run.seed,
        model_path=config.model.path,
        model_content=config.model.content or {},
        agents_url=services.base_url("orchestrator") + "/v1",
        date=config.run.date,
        env=config.data.env,
        members=configured(config.data),
        curriculum=config.data.curriculum,
        env_url=services.base_url("env"),
        trainer_url=services.base_url("trainer"),
        rollout_urls=services.rollout_urls,
        redis_url=_redis_url(config),
        redis_password_file=services.redis_password_file,
        token_files=services.token_files,
        ca_file=services.tls.ca_file,
        limits=services.limits,
        bounds=_bounds(config),
        terms=Admission(
            batch=batch,
            max_staleness=max_staleness,
            total=trainer.max_steps * trainer.groups_per_step,
            lease_s=orchestrator.lease_s,
            patience_s=orchestrator.episode_timeout_s,
            ahead=None if factor is None else started_ahead(factor, batch),
            round=round_size(generation, batch) if has_fresh_rounds(generation) else None,
        ),
        generation=generation,
        sampling=config.rollout.sampling.model_dump(),
        group_size=config.grpo_config.num_generations,
        max_concurrent=orchestrator.max_concurrent_episodes,
        max_steps=trainer.max_steps,
        n_eval_tasks=config.data.n_eval_tasks,
        eval_every=orchestrator.eval_every_n_steps,
        teachers=teachers_of(config),
        judges=judges_of(config),
        routing_replay=config.model.routing_replay,
        mask_truncated=config.algorithm.mask_truncated,
    )


def _redis_url(config: RunConfig) -> str:
    if config.services.redis_url is None:
        raise ConfigError(
            "services.redis_url is not set",
            "volley train starts a server and sets it; or set one: redis://host:6379/0",
        )
    return config.services.redis_url


def _bounds(config: RunConfig) -> TokenBounds:
    engine = config.rollout.engine
    return TokenBounds(
        context_length=min(engine.context_length, engine.max_total_tokens or engine.context_length),
        max_response_length=config.grpo_config.max_response_length,
        max_turns=config.orchestrator.max_turns,
        timeout_s=config.orchestrator.episode_timeout_s,
        max_attempts=config.orchestrator.max_attempts,
        drops_oldest=config.orchestrator.generation.truncation == "left",
    )
