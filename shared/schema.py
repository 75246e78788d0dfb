"""The run's configuration: one YAML file. Unknown keys are errors; algorithm keys keep Tunix's names.

Each service's `settings.py` turns the sections it needs into plain values; its core never sees these models.
"""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared import backend_kinds, own_rules, packages
from shared.algorithm_base import GrpoConfig, OptimizerConfig
from shared.algorithm_rules import contradiction
from shared.algorithm_schema import AlgorithmSection, GrpoSection
from shared.data_schema import DataSection
from shared.engine_schema import EngineSection
from shared.files.addresses import ADDRESS
from shared.generation_schema import GenerationSection, defeated
from shared.reward_schema import missing_servers
from shared.section import Fraction, NameOf, OwnRuleText, Section
from shared.services import SERVICES
from shared.services_schema import ServicesSection
from shared.supervised import supervised_steps

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_MOST_LINES = 100_000
"""Largest number of ledger lines in a checkpoint: about 40 MB, of the 64 MB that are read of its state."""


def _bucket(value: Any) -> Any:
    """Strip trailing slashes. Raises ValueError for anything but an s3:// or gs:// address."""
    if not isinstance(value, str):
        return value
    address = value.rstrip("/")
    if not re.fullmatch(ADDRESS, address):
        raise ValueError(f"{value[:200]!r} is not an address of the form s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    return address


def _collector(value: Any) -> Any:
    """Raises ValueError for anything but the address of an HTTP server."""
    if isinstance(value, str) and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError(f"{value[:200]!r} is not an address of the form http://HOST:4318")
    return value


class RunSection(Section):
    """Name, folder and seed of the run.

    The folder `dir/name` holds configuration, checkpoints, ledger, metrics and plots. `bucket` is `s3://BUCKET/PREFIX`
    or `gs://BUCKET/PREFIX`, used by this run alone: the trainer also keeps checkpoints and log there, and rollout
    servers may load checkpoints from there. `date` is the date that chat templates write; the first start of a run sets
    it to today's date in UTC. `traces` is the address of an OpenTelemetry collector, to which all services send
    spans by OTLP over HTTP.
    """

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    dir: Path = Path("runs")
    bucket: Annotated[str | None, BeforeValidator(_bucket)] = None
    seed: NonNegativeInt = 0
    date: datetime.date | None = None
    traces: Annotated[str | None, BeforeValidator(_collector)] = None

    @property
    def folder(self) -> Path:
        return self.dir / self.name


class ModelSection(Section):
    """The model to train: `path` is a Hugging Face folder, a hub id, or RUN@VERSION.

    A folder has config.json, tokenizer and the weights that transformers would load; with `initial_weights: random`, a
    folder without weights starts from random ones. RUN@VERSION always starts from its own weights. With
    `routing_replay` the trainer sends each token of a model with experts to the experts that the engine chose
    (shared.routing), which adds layers × experts per token bytes to each token. `content` holds digests of the folder's
    files (shared.models.content); the first start of a run sets it.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "block", "decoder"] = "none"
    routing_replay: bool = True
    initial_weights: Literal["folder", "random"] = "folder"
    content: dict[str, str] | None = None


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

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis."""
        return dict(zip(self.axis_names, self.shape, strict=True))


class CheckpointingOptions(Section):
    """Save a checkpoint every `save_interval_steps` steps and for every evaluated version.

    After a crash, steps since the newest checkpoint are trained again from the log. The newest `max_to_keep` are kept,
    and the one that solved the most held-out tasks.
    """

    save_interval_steps: PositiveInt = 1
    max_to_keep: Annotated[int, Field(ge=2)] = 3


class FiltersConfig(Section):
    """Filters that drop groups from training. Each dropped group is replaced, so a step always has `groups_per_step`.

    `zero_variance` drops groups whose rewards are equal (DAPO's dynamic sampling). `logprob` drops groups where trainer
    and engine disagree, on tokens sampled by the present weights, by more than this many nats on average. `custom`
    names a function of a file or module that returns True for a group to keep. If more than `max_num_gen_batches` times
    `groups_per_step` groups are dropped for one step, the run stops with an error.
    """

    zero_variance: bool = False
    logprob: PositiveFloat | None = None
    custom: OwnRuleText | None = None
    max_num_gen_batches: PositiveInt = 10


class LoraSection(Section):
    """LoRA: train adapters (A B · `alpha` / `rank`) of the projections `target_modules` instead of the weights.

    Names and meaning are those of PEFT and qwix.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: Annotated[tuple[Projection, ...], Field(min_length=1)] = get_args(Projection)


SPLASH_UNIT = 128
"""Splash attention takes row lengths that are multiples of this."""


class TrainerSection(Section):
    """One optimizer step trains on `groups_per_step` groups of `num_generations` episodes.

    `length_buckets` are the compiled row lengths, in tokens; of RL by default those below
    rollout.engine.context_length, and that. By default a row is one sequence, and a micro-batch has
    `train_micro_batch_size` rows (null: all rows of the step). With `micro_batch_tokens`, sequences are packed into
    rows, shared prefixes are stored once, and a micro-batch has at most that many positions.

    A step with non-finite numbers is never saved; `on_nonfinite` stops the run or skips the step's groups. With `lora`
    only adapters are trained, on top of the weights that the run starts with (RL: those after the warm start).
    `offload_reference` keeps the reference of a KL term or of DPO in host memory and moves it to the devices for its
    passes; with `lora` it has no effect. `attention` is computed in blocks of queries, or by splash attention, whose
    kernels need a TPU and lengths that are multiples of 128; `auto` uses splash attention where possible. `backend`
    computes losses and optimizer steps of RL; packages add others.

    `spot_checks` is the share of episodes that the trainer scores again, to name rollout servers that compute something
    else than the weights they report; 0 checks none.
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
    spot_checks: Fraction = 0.0
    lora: LoraSection | None = None
    offload_reference: bool = False
    attention: Literal["auto", "blocks", "splash"] = "auto"
    backend: Annotated[str, NameOf(backend_kinds.names)] = "volley"
    mesh: MeshSection = MeshSection()

    @model_validator(mode="after")
    def _one_size(self) -> TrainerSection:
        if self.micro_batch_tokens and self.train_micro_batch_size:
            raise ValueError(
                "train_micro_batch_size and micro_batch_tokens both set the size of a micro-batch: give one of them"
            )
        return self

    @model_validator(mode="after")
    def _splash(self) -> TrainerSection:
        odd = [length for length in self.length_buckets if length % SPLASH_UNIT]
        if self.attention == "splash" and odd:
            raise ValueError(
                f"attention=splash: length_buckets has {odd[0]}, which is not a multiple of {SPLASH_UNIT};"
                " attention=auto uses splash attention for the others"
            )
        return self


class SamplingSection(Section):
    """Sampling parameters, within the server's limits; below the lowest temperature it would sample greedily."""

    temperature: Annotated[float, Field(ge=1e-4, le=1e3)] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**30)] = -1

    @model_validator(mode="after")
    def _keeps_a_token(self) -> SamplingSection:
        if self.top_k == 0:
            raise ValueError("top_k=0 keeps no token: use -1 for all")
        return self

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


class RolloutSection(Section):
    """`update_mode` chooses what new weights do to running requests.

    `weights_root` is the folder below which REST may name checkpoints and Hugging Face folders to load (default: the
    run's checkpoints).
    """

    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    update_mode: Literal["retract", "abort", "in_place"] = "retract"
    weights_root: Path | None = None


class OrchestratorSection(Section):
    max_concurrent_episodes: PositiveInt = 256
    max_turns: PositiveInt = 8
    lease_s: PositiveFloat = 20.0
    episode_timeout_s: PositiveFloat = 600.0
    max_attempts: PositiveInt = 3
    eval_every_n_steps: PositiveInt | None = None
    generation: GenerationSection = GenerationSection()


Mode = Literal["rl", "sft+rl", "sft", "dpo"]


def _with_lengths(tree: dict[str, Any]) -> dict[str, Any]:
    """Let the row lengths end at the context, or the context at the longest row, if only one of them is given."""
    trainer, rollout = tree.get("trainer", {}), tree.get("rollout", {})
    engine = rollout.get("engine", {}) if isinstance(rollout, dict) else None
    if not isinstance(trainer, dict) or not isinstance(engine, dict):
        return tree  # which is refused
    fields = EngineSection.model_fields["context_length"], TrainerSection.model_fields["length_buckets"]
    default, lengths = int(fields[0].default), tuple[int, ...](fields[1].default)
    context, buckets = engine.get("context_length", default), trainer.get("length_buckets")
    if buckets is None and isinstance(context, int):
        buckets = [*(one for one in lengths if one < context), context]
        return {**tree, "trainer": {**trainer, "length_buckets": buckets}}
    if "context_length" not in engine and isinstance(buckets, list | tuple) and all(type(x) is int for x in buckets):
        engine = {**engine, "context_length": min(default, max(buckets, default=default))}
        return {**tree, "rollout": {**rollout, "engine": engine}}
    return tree


class RunConfig(Section):
    """The whole file.

    `mode` is what the run does: rl (RL, after a warm start if `sft` has one), sft+rl (RL after a required warm start),
    or supervised training alone (sft, dpo), for which the trainer needs no other service. Modes other than rl need the
    package volley-rl-supervised.
    """

    mode: Mode = "rl"
    run: RunSection = RunSection(name="quickstart")
    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    grpo_config: GrpoConfig = GrpoConfig()
    algorithm: AlgorithmSection = GrpoSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    services: ServicesSection = ServicesSection()

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, tree: Any) -> Any:
        """Default the algorithm's name, and row lengths and context to each other's."""
        if not isinstance(tree, dict):
            return tree
        given = tree.get("algorithm")
        if isinstance(given, dict):
            name = "own" if any(given.get(key.partition(".")[2]) for key in own_rules.OF_ALGORITHM) else "grpo"
            tree = {**tree, "algorithm": {"name": name, **given}}
        return tree if tree.get("mode") in ("sft", "dpo") else _with_lengths(tree)

    @property
    def is_supervised(self) -> bool:
        """True for supervised training without RL."""
        return self.mode in ("sft", "dpo")

    @property
    def needs_environment(self) -> bool:
        """True if the run needs the environment service."""
        steps = supervised_steps(self) if self.is_supervised else None
        return steps is None or steps.demonstrated

    def uses(self, service: str) -> bool:
        """True if the run has this service."""
        if service == "env":
            return self.needs_environment
        return not self.is_supervised or SERVICES[service].supervised

    def local_processes(self) -> dict[str, int]:
        """Number of processes that the run has on this host, by service."""
        return {name: self.services.n_local(name) if self.uses(name) else 0 for name in SERVICES}

    @model_validator(mode="after")
    def _has_data(self) -> RunConfig:
        if self.mode != "rl":
            if absent := packages.missing("supervised.steps"):
                raise ValueError(f"mode={self.mode}: {absent}")
            supervised_steps(self)
        if self.needs_environment and not self.data.env:
            raise ValueError("data.env is missing")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.is_supervised:
            return self
        if self.trainer.groups_per_step > _MOST_LINES:
            raise ValueError(
                f"trainer.groups_per_step={self.trainer.groups_per_step} is more than {_MOST_LINES}: a checkpoint"
                " holds a ledger line of each group"
            )
        if self.rollout.engine.context_length > max(self.trainer.length_buckets):
            raise ValueError("trainer.length_buckets must reach rollout.engine.context_length")
        urls, n_servers = self.rollout.engine.urls, self.services.rollout_replicas
        if len(urls) > 1 and len(urls) != n_servers:
            raise ValueError(f"rollout.engine.url names {len(urls)} servers for {n_servers} services.rollout_replicas")
        if problem := contradiction(self.algorithm, self.grpo_config, self.orchestrator.max_turns):
            raise ValueError(problem)
        if self.algorithm.credits_turns and self.orchestrator.generation.truncation == "left":
            raise ValueError(
                "orchestrator.generation.truncation=left divides an episode into several sequences, and"
                f" algorithm.{self.algorithm.shown_credit} counts rewards within one: choose credit=episode"
            )
        servers, played = self.services.orchestrator, list(self.data.environments)
        if problem := servers.missing_teacher(played, self.algorithm.teacher_kl_coef):
            raise ValueError(problem)
        n_groups = max(1, self.orchestrator.max_concurrent_episodes // self.grpo_config.num_generations)
        limits = self.trainer.groups_per_step, self.grpo_config.off_policy_steps, n_groups
        if problem := defeated(self.orchestrator.generation, *limits):
            raise ValueError(problem)
        foreign = backend_kinds.kind_of(self.trainer.backend)
        if foreign is not None and (problem := foreign.problem(self)):
            raise ValueError(f"trainer.backend={self.trainer.backend}: {problem}, or use trainer.backend=volley")
        if missing := missing_servers(self.data.rewards, self.services.env.reward_servers):
            raise ValueError(missing[0])
        return self
