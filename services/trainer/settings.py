"""Plain values of the service, read once from the run's configuration. `options` has those of the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from services.trainer.groups.filters import FilterOptions
from services.trainer.groups.group_buffer import AdmissionRules
from services.trainer.interfaces import TrainPlan
from shared.errors import ConfigError
from shared.models.origin import Origin
from shared.outcomes import FilterRule
from shared.routing import RoutingShape
from shared.run import pinned
from shared.run.group_size import check_group
from shared.schema import FiltersConfig, RunConfig
from shared.services_schema import Limits, TokenFiles


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Values of the tokenizer and the model's config.json.

    Token ids are below `vocab_size`, `pad_id` fills rows, `routing` describes the experts of a mixture model.
    """

    vocab_size: int
    pad_id: int
    routing: RoutingShape | None = None


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Addresses, files and switches of the service.

    `run_folder` is absolute; rollout servers reach the trainer at `url`.
    """

    run: str
    run_folder: Path
    url: str
    max_to_keep: int
    redis_url: str
    redis_password_file: Path | None
    token_files: TokenFiles
    ca_file: Path | None
    env_url: str
    rollout_urls: tuple[str, ...]
    update_mode: str
    limits: Limits
    bucket: str | None = None


def from_config(config: RunConfig) -> TrainerSettings:
    """Read the settings. Raises ConfigError if no Redis address is set."""
    services = config.services
    if services.redis_url is None:
        raise ConfigError(
            "services.redis_url is not set",
            "`volley train` starts an embedded server; a service alone needs its address",
        )
    return TrainerSettings(
        run=config.run.name,
        run_folder=config.run.folder.absolute(),
        url=services.base_url("trainer"),
        max_to_keep=config.trainer.checkpointing_options.max_to_keep,
        redis_url=services.redis_url,
        redis_password_file=services.redis_password_file,
        token_files=services.token_files,
        ca_file=services.tls.ca_file,
        env_url=services.base_url("env"),
        rollout_urls=services.rollout_urls,
        update_mode=config.rollout.update_mode,
        limits=services.limits,
        bucket=config.run.bucket,
    )


def plan(config: RunConfig, tokens: TokenLimits, origin: Origin | None = None) -> TrainPlan:
    """Make the plan of a run. Raises ConfigError if a group may become too large."""
    check_group(config, tokens.routing)
    grpo, trainer = config.grpo_config, config.trainer
    return TrainPlan(
        max_steps=trainer.max_steps,
        groups_per_step=trainer.groups_per_step,
        save_interval_steps=trainer.checkpointing_options.save_interval_steps,
        grace_s=config.services.limits.grace_s,
        seed=config.run.seed,
        keep_reference=config.algorithm.beta > 0 and trainer.lora is None,
        rules=AdmissionRules(
            order=trainer.order,
            max_staleness=grpo.off_policy_steps,
            longest=max(trainer.length_buckets),
            vocab_size=tokens.vocab_size,
            group_size=grpo.num_generations,
            filters=filter_options(trainer.filters, config.algorithm.mask_truncated),
            has_teacher=config.algorithm.teacher_kl_coef > 0,
            components=config.algorithm.component_names,
            routing=tokens.routing,
        ),
        settings=pinned.relevant(config),
        origin=None if origin is None else asdict(origin),
        on_nonfinite=trainer.on_nonfinite,
        env=config.data.env,
        eval_every_n_steps=config.orchestrator.eval_every_n_steps,
        checks_servers=trainer.spot_checks > 0,
        truncated=config.rollout.sampling.is_truncated,
    )


def filter_options(config: FiltersConfig, mask_truncated: bool) -> FilterOptions:
    rules: tuple[FilterRule, ...] = ("zero_variance",) if config.zero_variance else ()
    return FilterOptions(rules, config.logprob, config.max_num_gen_batches, mask_truncated, config.custom)
