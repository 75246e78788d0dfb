"""The run's configuration: one YAML, these models, unknown keys refused. Algorithm keys keep Tunix's names.

The core of a service never sees these models: its `settings.py` turns the sections it needs into plain values.
"""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.algorithm_schema import AlgorithmSection, GrpoConfig, GrpoSection, OptimizerConfig, contradiction
from shared.files import buckets
from shared.reward_schema import EnvironmentRewards, missing_servers
from shared.section import Section
from shared.services_schema import ServicesSection
from shared.sft_schema import DpoSection, SftSection

Fraction = Annotated[float, Field(ge=0, le=1)]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_WEIGHT = 1_000_000
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
MOST_ENVIRONMENTS = 256
"""In a run at once."""
_MOST_LINES = 100_000
"""Ledger lines that one checkpoint carries: some 40 MB, of the 64 that are read of its state."""


def _bucket(value: Any) -> Any:
    """Without slashes at its end. Raises ValueError."""
    if not isinstance(value, str):
        return value
    address = value.rstrip("/")
    if not re.fullmatch(buckets.ADDRESS, address):
        raise ValueError(f"{value[:200]!r} is no address as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    return address


class RunSection(Section):
    """Identity of the run; its folder `dir/name` holds config, checkpoints, ledger, metrics and plots. `bucket`,
    `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`, is this run's alone: the trainer keeps checkpoints and log there as
    well, and rollout servers may take checkpoints from there. `date` is the one that chat templates write; the first
    start of a run sets it to today's, in UTC.
    """

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    dir: Path = Path("runs")
    bucket: Annotated[str | None, BeforeValidator(_bucket)] = None
    seed: NonNegativeInt = 0
    date: datetime.date | None = None

    @property
    def folder(self) -> Path:
        return self.dir / self.name


class ModelSection(Section):
    """`path` is a Hugging Face folder or hub id: config.json, tokenizer and the weights that transformers would load.
    With `initial_weights: random` a folder without weights starts from random ones; RUN@VERSION has its own in any
    case. With `routing_replay` the trainer sends the tokens of a model with experts to those that the
    engine has sent them to (shared.routing), which costs a group layers times experts a token, in bytes a token.
    `content` holds digests of the folder's files (shared.models.content): the first start of a run sets it.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "block", "decoder"] = "none"
    routing_replay: bool = True
    initial_weights: Literal["folder", "random"] = "folder"
    content: dict[str, str] | None = None


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

    env: str = ""
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


class MeshSection(Section):
    shape: tuple[PositiveInt, ...] = (1, 1)
    axis_names: tuple[Literal["fsdp", "tp"], ...] = ("fsdp", "tp")

    @model_validator(mode="after")
    def _same_rank(self) -> MeshSection:
        if len(self.shape) != len(self.axis_names):
            raise ValueError("mesh.shape and mesh.axis_names differ in length")
        return self

    @property
    def n_devices(self) -> int:
        return math.prod(self.shape)


class CheckpointingOptions(Section):
    """A checkpoint is made every `save_interval_steps` steps and of every version that is evaluated: after a crash the
    steps since then are trained again from the log. The newest `max_to_keep` stay, and beside them the one that solved
    the most held-out tasks.
    """

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


class LoraSection(Section):
    """Adapters (A B · `alpha` / `rank`) of the projections `target_modules`, which are trained in the place of the
    weights. Names and meaning are those of PEFT and qwix.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: Annotated[tuple[Projection, ...], Field(min_length=1)] = get_args(Projection)


SPLASH_UNIT = 128
"""The lengths of rows that splash attention takes are multiples of it."""


class TrainerSection(Section):
    """`groups_per_step` groups of `num_generations` episodes make one optimizer step.

    `length_buckets` are the lengths of rows compiled for, in tokens. A row is one sequence, and a micro-batch has
    `train_micro_batch_size` of them (null: all of the step); with `micro_batch_tokens` sequences are packed into rows,
    what they begin with in common once, and a micro-batch has at most so many positions. `on_nonfinite` says what
    follows when a step gives numbers that are not finite, which is never saved: the run stops, or goes on without its
    groups. With `lora` adapters alone are trained, of the weights that the run begins with (RL: after its warm start).
    With `offload_reference` the reference of a KL term or of DPO lies in the host's memory, and on the devices for its
    passes alone; with `lora` there is nothing to bring. `attention` is computed in blocks of queries, or by splash
    attention, whose kernels are for TPUs and lengths that are multiples of 128: auto takes it where it can be.
    """

    max_steps: PositiveInt = 10
    groups_per_step: PositiveInt = 8
    train_micro_batch_size: PositiveInt | None = None
    micro_batch_tokens: PositiveInt | None = None
    order: Literal["arrival", "ticket"] = "arrival"
    length_buckets: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (256, 512, 1024, 2048, 4096)
    optimizer_config: OptimizerConfig = OptimizerConfig()
    checkpointing_options: CheckpointingOptions = CheckpointingOptions()
    on_nonfinite: Literal["stop", "skip"] = "stop"
    filters: FiltersConfig = FiltersConfig()
    lora: LoraSection | None = None
    offload_reference: bool = False
    attention: Literal["auto", "blocks", "splash"] = "auto"
    mesh: MeshSection = MeshSection()

    @model_validator(mode="after")
    def _one_size(self) -> TrainerSection:
        if self.micro_batch_tokens and self.train_micro_batch_size:
            raise ValueError(
                "a micro-batch is train_micro_batch_size sequences or micro_batch_tokens: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _splash(self) -> TrainerSection:
        odd = [length for length in self.length_buckets if length % SPLASH_UNIT]
        if self.attention == "splash" and odd:
            raise ValueError(
                f"attention=splash: length_buckets has {odd[0]}, which is no multiple of {SPLASH_UNIT};"
                " attention=auto takes it for the others"
            )
        return self


class EngineSection(Section):
    """Engine of the rollout servers, one of the `kind` that services/rollout/engines/kinds.py names. Sizes are tokens,
    except `max_running_requests`. Paddings list the shapes compiled at start; null compiles on demand.
    """

    kind: Literal["sglang_jax"] = "sglang_jax"
    device: Literal["cpu", "tpu", "gpu"] = "cpu"
    tp_size: PositiveInt = 1
    context_length: PositiveInt = 512
    max_running_requests: PositiveInt = 64
    max_total_tokens: PositiveInt | None = None
    max_prefill_tokens: PositiveInt = 2048
    precompile_token_paddings: tuple[PositiveInt, ...] | None = None
    precompile_bs_paddings: tuple[PositiveInt, ...] | None = None


class SamplingSection(Section):
    """The bounds are those of the rollout server. Below the least temperature it would sample greedily."""

    temperature: Annotated[float, Field(ge=1e-4, le=1e3)] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**30)] = -1

    @model_validator(mode="after")
    def _keeps_a_token(self) -> SamplingSection:
        if self.top_k == 0:
            raise ValueError("top_k=0 keeps no token: use -1 for all")
        return self


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


Mode = Literal["rl", "sft+rl", "sft", "dpo"]


class RunConfig(Section):
    """The whole file. `mode` is what the run does: RL, after a warm start where `sft` asks for one, which sft+rl
    requires; or supervised training alone (sft, dpo), for which the trainer needs no other service.
    """

    mode: Mode = "rl"
    run: RunSection = RunSection(name="quickstart")
    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    sft: SftSection = SftSection()
    dpo: DpoSection = DpoSection()
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

    @property
    def is_supervised(self) -> bool:
        """Whether it is a run without RL."""
        return self.mode in ("sft", "dpo")

    @property
    def needs_environment(self) -> bool:
        """Whether anybody asks the environment service for anything."""
        return not (self.is_supervised and self.sft.train)

    @model_validator(mode="after")
    def _supervised(self) -> RunConfig:
        if self.mode == "dpo" and not self.sft.train:
            raise ValueError("mode=dpo needs sft.train: files of preference pairs")
        if self.mode == "sft+rl" and not self.sft.trains:
            raise ValueError("mode=sft+rl needs sft.max_steps or sft.epochs")
        if self.needs_environment and not self.data.env:
            other = " (or sft.train, files of conversations)" if self.mode == "sft" else ""
            raise ValueError(f"data.env is missing{other}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.is_supervised:
            return self
        if self.trainer.groups_per_step > _MOST_LINES:
            raise ValueError(
                f"trainer.groups_per_step={self.trainer.groups_per_step} is more than {_MOST_LINES}: a commit record"
                " carries a line of each group"
            )
        if self.rollout.engine.context_length > max(self.trainer.length_buckets):
            raise ValueError("trainer.length_buckets must reach rollout.engine.context_length")
        if problem := contradiction(self.algorithm, self.grpo_config, self.orchestrator.max_turns):
            raise ValueError(problem)
        if self.algorithm.teacher_kl_coef and self.services.orchestrator.teacher is None:
            raise ValueError(
                f"algorithm.teacher_kl_coef={self.algorithm.teacher_kl_coef:g} needs a teacher: its address is "
                "services.orchestrator.teacher.url"
            )
        if missing := missing_servers(self.data.rewards, self.services.env.reward_servers):
            raise ValueError(missing[0])
        return self
