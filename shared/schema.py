"""The run's configuration: one YAML, these models, unknown keys refused. Algorithm keys keep Tunix's names.

The core of a service never sees these models: its `settings.py` turns the sections it needs into plain values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.algorithm_schema import AlgorithmSection, GrpoConfig, GrpoSection, OptimizerConfig, contradiction
from shared.reward_schema import EnvironmentRewards, RewardServer, missing_servers
from shared.section import Section
from shared.services import SERVICES

Fraction = Annotated[float, Field(ge=0, le=1)]
MAX_WEIGHT = 1_000_000
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
MOST_ENVIRONMENTS = 256
"""In a run at once."""
_MOST_LINES = 100_000
"""Ledger lines that one checkpoint carries: some 40 MB, of the 64 that are read of its state."""


class RunSection(Section):
    """Identity of the run; its folder `dir/name` holds config, checkpoints, ledger, metrics and plots."""

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    dir: Path = Path("runs")
    seed: NonNegativeInt = 0

    @property
    def folder(self) -> Path:
        return self.dir / self.name


class ModelSection(Section):
    """`path` is a Hugging Face folder or hub id: config.json and tokenizer; without safetensors the
    weights are random.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "block", "decoder"] = "none"


class MixtureEntry(Section):
    """One environment of several: `weight` in proportion to the others' (0 only evaluates), never less than `min_share`
    of the groups, and settings of a built-in: of the one with this name, or of `base`, of which it is then a variant. A
    plain number is its weight.
    """

    weight: Weight = 1.0
    min_share: Fraction = 0.0
    env_config: dict[str, Any] = Field(default_factory=dict)
    base: str | None = None


def _entry(value: Any) -> Any:
    return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class CurriculumConfig(Section):
    """Weights follow what there is to learn: every so many groups, an environment's weight is multiplied by its
    learnability, from `floor` (all samples succeed, or none) to 1 (half of them do).
    """

    every_groups: PositiveInt = 32
    floor: Annotated[float, Field(ge=0.01, le=1.0)] = 0.1


class EnvironmentSource(Section):
    """What a name stands for that was made of a file or an import path: the file or the package's folder, the class,
    and the SHA-256 of what is played.
    """

    path: Path
    entry: str | None = None
    sha256: str


class DataSection(Section):
    """Which environment makes the tasks: its name, or a file or import path, which a name takes the place of when the
    configuration is read (`sources`, see shared.run.sources). `train` and `eval` are the files of a dataset
    environment.

    `mixture` names the environments that the run plays beside `env`, its main one, whose weight is 1 unless it is named
    there too. `rewards` says by environment what else than its own reward its episodes get.
    """

    env: str
    env_config: dict[str, Any] = Field(default_factory=dict)
    mixture: dict[str, Annotated[MixtureEntry, BeforeValidator(_entry)]] = Field(default_factory=dict)
    curriculum: CurriculumConfig | None = None
    rewards: dict[str, EnvironmentRewards] = Field(default_factory=dict)
    sources: dict[str, EnvironmentSource] = Field(default_factory=dict)
    train: Path | None = None
    eval: Path | None = None
    n_eval_tasks: PositiveInt = 200

    @property
    def environments(self) -> dict[str, MixtureEntry]:
        """All environments that the run begins with; the main one first."""
        main = self.mixture.get(self.env, MixtureEntry())
        return {self.env: main.model_copy(update={"env_config": self.env_config}), **self._others}

    @property
    def _others(self) -> dict[str, MixtureEntry]:
        return {name: entry for name, entry in self.mixture.items() if name != self.env}

    @model_validator(mode="after")
    def _playable(self) -> DataSection:
        if len(self.mixture) >= MOST_ENVIRONMENTS:
            raise ValueError(f"data.mixture names more than {MOST_ENVIRONMENTS - 1} environments")
        main = self.mixture.get(self.env)
        if main is not None and (main.env_config or main.base):
            raise ValueError(f"data.mixture.{self.env}: settings of data.env belong into data.env_config")
        rows = self.environments.values()
        if not any(row.weight for row in rows):
            raise ValueError("data.mixture leaves no environment a weight above 0, so there is nothing to train on")
        if (least := sum(row.min_share for row in rows)) > 1:
            raise ValueError(f"data.mixture: the min_share of all environments is {least:g} together, more than 1")
        if wrong := [name for name, row in self.mixture.items() if row.min_share and not row.weight]:
            raise ValueError(f"data.mixture.{wrong[0]}.min_share needs a weight above 0")
        return self


class SftSection(Section):
    """Warm start on demonstrations made by the environment, before step 0 of RL. `max_steps: 0` skips it."""

    max_steps: NonNegativeInt = 0
    n_demonstrations: PositiveInt = 1024
    batch_size: PositiveInt = 32
    optimizer_config: OptimizerConfig = OptimizerConfig()


class MeshSection(Section):
    shape: tuple[PositiveInt, ...] = (1, 1)
    axis_names: tuple[Literal["fsdp", "tp"], ...] = ("fsdp", "tp")

    @model_validator(mode="after")
    def _same_rank(self) -> MeshSection:
        if len(self.shape) != len(self.axis_names):
            raise ValueError("mesh.shape and mesh.axis_names differ in length")
        return self


class CheckpointingOptions(Section):
    """The newest `max_to_keep` stay, and beside them the one that solved the most held-out tasks."""

    save_interval_steps: PositiveInt = 1
    max_to_keep: Annotated[int, Field(ge=2)] = 3


class FiltersConfig(Section):
    """Groups that are not trained on; another one takes the place of each, so a step has always `groups_per_step`.

    `zero_variance` drops those whose rewards are equal (DAPO's dynamic sampling); `logprob` those on whose tokens of
    the present weights trainer and engine differ by more than so many nats in the mean. Where more than
    `max_num_gen_batches` times `groups_per_step` are dropped for one step, the run stops and says so.
    """

    zero_variance: bool = False
    logprob: PositiveFloat | None = None
    max_num_gen_batches: PositiveInt = 10


class TrainerSection(Section):
    """`groups_per_step` groups of `num_generations` episodes make one optimizer step.

    `length_buckets` are the sequence lengths compiled for, in tokens. `on_nonfinite` says what follows when a step
    gives numbers that are not finite, which is never saved: the run stops, or goes on without its groups.
    """

    max_steps: PositiveInt = 10
    groups_per_step: PositiveInt = 8
    train_micro_batch_size: PositiveInt | None = None
    order: Literal["arrival", "ticket"] = "arrival"
    length_buckets: tuple[PositiveInt, ...] = (256, 512, 1024, 2048, 4096)
    optimizer_config: OptimizerConfig = OptimizerConfig()
    checkpointing_options: CheckpointingOptions = CheckpointingOptions()
    on_nonfinite: Literal["stop", "skip"] = "stop"
    filters: FiltersConfig = FiltersConfig()
    mesh: MeshSection = MeshSection()


class EngineSection(Section):
    """sglang-jax: sizes are tokens, except `max_running_requests`. Paddings list the shapes compiled at start; null
    compiles on demand.
    """

    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    tp_size: PositiveInt = 1
    context_length: PositiveInt = 512
    max_running_requests: PositiveInt = 64
    max_total_tokens: PositiveInt | None = None
    max_prefill_tokens: PositiveInt = 2048
    precompile_token_paddings: tuple[PositiveInt, ...] | None = None
    precompile_bs_paddings: tuple[PositiveInt, ...] | None = None


class SamplingSection(Section):
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1


class RolloutSection(Section):
    """`update_mode` says what happens to requests that are running when new weights arrive."""

    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    update_mode: Literal["retract", "abort", "in_place"] = "retract"


class OrchestratorSection(Section):
    max_concurrent_episodes: PositiveInt = 256
    max_turns: PositiveInt = 8
    lease_s: PositiveFloat = 20.0
    episode_timeout_s: PositiveFloat = 600.0
    max_attempts: PositiveInt = 3
    eval_every_n_steps: PositiveInt | None = None


def _without_password(url: str) -> str:
    """Addresses are written to logs, to the run's folder and to other services; secrets are not."""
    user, at, _ = url.partition("://")[2].rpartition("@")
    if (at and ":" in user) or "password=" in url:
        raise ValueError("holds a password; put that into a file of its own (for Redis: services.redis_password_file)")
    return url


Url = Annotated[str, AfterValidator(_without_password)]


type Port = Annotated[int, Field(ge=0, le=65535)]


class Endpoint(Section):
    """Where a service listens; `url` is how others reach it (default: from host and port, see
    `ServicesSection.base_url`).

    Each service has a class of its own, so that naming one key of an endpoint leaves the others at their defaults.
    """

    host: str = "127.0.0.1"
    port: Port = 0
    url: Url | None = None


class EnvEndpoint(Endpoint):
    """`folder` keeps submitted environments (default: in the run's folder). `unsandboxed` names those that may be
    submitted where this machine cannot confine their code; `python` there allows that tool. `sandbox_memory_mb` is what
    one episode's process may use. `processes` run the episodes of built-in environments, each with threads of its own
    (0: threads of the service).
    `package_index` is the only place that their dependencies come from. `remote_tokens_file` is a secret file with a
    line `URL TOKEN` for each server of remote environments that asks for a token. `reward_servers` are the judges and
    reward services that `data.rewards` names.
    """

    port: Port = SERVICES["env"].port
    folder: Path | None = None
    unsandboxed: tuple[str, ...] = ()
    sandbox_memory_mb: PositiveInt = 512
    processes: Annotated[int, Field(ge=0, le=256)] = 0
    package_index: Url = "https://pypi.org/simple"
    remote_tokens_file: Path | None = None
    reward_servers: dict[str, RewardServer] = Field(default_factory=dict)


class RolloutEndpoint(Endpoint):
    port: Port = SERVICES["rollout"].port


class OrchestratorEndpoint(Endpoint):
    port: Port = SERVICES["orchestrator"].port


class TrainerEndpoint(Endpoint):
    port: Port = SERVICES["trainer"].port


class Limits(Section):
    """What one client may cost a service. `body_timeout_s` bounds how long a body may take to arrive, and an answer to
    be read.

    `admin_per_s` is how many requests that change something for others (role admin) one address may make, with bursts
    of ten times as many. `grace_s` is what running requests have after SIGTERM.
    """

    max_body_bytes: PositiveInt = 8 * 2**20
    max_connections: PositiveInt = 4096
    header_timeout_s: PositiveFloat = 10.0
    body_timeout_s: PositiveFloat = 30.0
    admin_per_s: PositiveFloat = 20.0
    grace_s: PositiveFloat = 10.0


class TokenFiles(Section):
    """Files with the bearer token of each role: viewer reads state, service works, admin changes what others rely on.

    admin includes service includes viewer. None given: no token is asked for.
    """

    viewer: Path | None = None
    service: Path | None = None
    admin: Path | None = None

    @model_validator(mode="after")
    def _whole(self) -> TokenFiles:
        if any((self.viewer, self.service, self.admin)) and not (self.service and self.admin):
            raise ValueError(
                "token_files needs service and admin: services call each other with the one, the "
                "trainer sets weights with the other"
            )
        return self


class Tls(Section):
    """PEM files: services show `cert_file` (with its chain), clients trust `ca_file` (default: the system's), also for
    rediss://.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _pair(self) -> Tls:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("tls needs cert_file and key_file together")
        return self


class ServicesSection(Section):
    """`redis_url: null` starts the embedded server. Rollout servers register themselves; `rollout_urls` adds fixed
    ones.

    `volley train` starts what is not named here: no env service with `env.url`, no rollout server with `rollout_urls`.
    """

    redis_url: Url | None = None
    redis_password_file: Path | None = None
    token_files: TokenFiles = TokenFiles()
    tls: Tls = Tls()
    env: EnvEndpoint = EnvEndpoint()
    rollout: RolloutEndpoint = RolloutEndpoint()
    orchestrator: OrchestratorEndpoint = OrchestratorEndpoint()
    trainer: TrainerEndpoint = TrainerEndpoint()
    rollout_urls: tuple[Url, ...] = ()
    rollout_replicas: PositiveInt = 1
    limits: Limits = Limits()

    def base_url(self, name: str) -> str:
        """How others reach the service `name`."""
        endpoint: Endpoint = getattr(self, name)
        return (endpoint.url or self.local_url(name, endpoint.port)).rstrip("/")

    def local_url(self, name: str, port: int) -> str:
        """How the service `name` is reached on this host when it listens on `port`."""
        host: str = getattr(self, name).host
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104 - compared, not bound
        return f"{'https' if self.tls.cert_file else 'http'}://{host}:{port}"


class RunConfig(Section):
    """The whole file."""

    run: RunSection = RunSection(name="quickstart")
    model: ModelSection
    data: DataSection
    sft: SftSection = SftSection()
    grpo_config: GrpoConfig = GrpoConfig()
    algorithm: AlgorithmSection = GrpoSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    services: ServicesSection = ServicesSection()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, tree: Any) -> Any:
        """GRPO, where no algorithm is named."""
        given = tree.get("algorithm") if isinstance(tree, dict) else None
        return {**tree, "algorithm": {"name": "grpo", **given}} if isinstance(given, dict) else tree

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        interval, max_staleness = (
            self.trainer.checkpointing_options.save_interval_steps,
            self.grpo_config.off_policy_steps,
        )
        if interval > max_staleness + 1:
            raise ValueError(
                f"trainer.checkpointing_options.save_interval_steps={interval} needs "
                f"grpo_config.off_policy_steps >= {interval - 1}: "
                "new weights are published only once they are durable, so a longer interval would wait for itself"
            )
        if (lines := interval * self.trainer.groups_per_step) > _MOST_LINES:
            raise ValueError(
                f"trainer.groups_per_step times trainer.checkpointing_options.save_interval_steps "
                f"is {lines}, more than {_MOST_LINES}: "
                "a checkpoint carries a line of each group since the last one"
            )
        if self.rollout.engine.context_length > max(self.trainer.length_buckets):
            raise ValueError("trainer.length_buckets must reach rollout.engine.context_length")
        if problem := contradiction(self.algorithm, self.grpo_config, self.orchestrator.max_turns):
            raise ValueError(problem)
        if missing := missing_servers(self.data.rewards, self.services.env.reward_servers):
            raise ValueError(missing[0])
        return self
