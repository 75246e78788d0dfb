"""Packages beside the core: what each adds to it is found by the entry points of its distribution.

An entry point is a name and an object in a module, written in the package's pyproject.toml. The groups are

    volley.sections   place in the configuration, such as `tinker` → subclass of `shared.section.PackageSection`
    volley.keys       place of one key in a section of the core, such as `run.trackers` → `shared.section.PackageKey`
    volley.commands   name of a command of `volley` → `volley.command.Command`
    volley.proofs     kind of folder → `volley.proof.Prove`; `run` is asked last
    volley.routers    routes of a service, named such as `env.openenv` → `shared.web.routes.ServiceRoutes`
    volley.sinks      receiver of a run's metrics → `(folder) -> shared.process.sinks.MetricsSink`
    volley.sidecars   name of a helper beside a run → `(folder, config) -> context manager` (volley.local.sidecars)
    volley.parts      part that the core can do without: `bucket.run` → `(StoreContext) -> RunStore` (services.trainer.
                      loop.run_store), `bucket.versions` → `(address, folder) -> VersionStore` (services.rollout.
                      weights.sources), `trainer.processes` → `(RunConfig) -> context manager` that opens one of the
                      trainer's processes as a `shared.boot.RunningService`, `model_conversion` → `(name, folder)` that
                      makes a model's folder, `client_errors` → `(VolleyError, path) -> fields` that clients of a path
                      read beside a problem body, `generate_route` → module in the place of
                      `services.rollout.api.generate`, `constraints` → `volley_serving.constraints.guides`,
                      `report` → `volley.reports.RunReports`, `live_display` →
                      `(max_steps) -> context manager` of a `volley.reporting.progress.ProgressDisplay`,
                      `docs_page` → module with `ROLES` of the routes that its `add` adds to every service: the page
                      `/docs` and its document,
                      `trajectories` → `(folder) -> volley_python.client.records.EpisodeArchive`,
                      `gpu_kernels` → `volley_engines.gpu`,
                      `diagnosis.run` → `(facts) -> facts`, which adds what waits for what to GET /runs/NAME,
                      `diagnosis.waits` → `(clients of services, state) -> sentence`,
                      `folder_survey` → `(RunFolder) -> None`, which refuses files that no run makes,
                      `source_identity` → `(FoundSource, settings) -> (name, sha256)` of an environment in a file,
                      `python_api` → module with the names that `volley` offers to programs, such as `train`,
                      `traces` → `volley_traces.sending.sending`, which sends the spans of a process,
                      `own_data` → `volley_data.configure.configure`, `own_data.options` → `volley.own_data.OwnData`,
                      `accelerators` → `volley.local.devices.DeviceAssigner`, `planner` → `volley.choices.Planner`,
                      `findings` → `(RunConfig) -> Iterable[str]`, sentences on settings of the core without effect,
                      `external_checks` → `(RunConfig) -> Awaitable[None]`, which checks services that run elsewhere,
                      `foreign_names` → `shared.hints.ForeignNames`, what other trainers call settings,
                      `model_download` → `(hub id, patterns, with weights) -> folder`,
                      `model_refusals` → `(model_type) -> reason | None`,
                      `rule_text` → `(key, name, base folder) -> text` of a rule of the user,
                      `training_memory` → `(RunConfig, ModelConfig) -> services.trainer.backend.memory.PlannedMemory`,
                      `curriculum` → `(CurriculumConfig, EnvironmentTallies, names) -> Curriculum`
                      (services.orchestrator.mixture.mixture),
                      `adaptive_concurrency` → `(Slots, least) -> object` with the method `observe` of
                      `services.orchestrator.servers.fleet.Observe`,
                      `generation_policy` → `(GenerationSection, groups per step, group size, mask_truncated) ->
                      GenerationPolicy` (services.orchestrator.schedule.policy),
                      `teachers` → `services.orchestrator.episodes.teaching.TeacherOpening`,
                      `trainer.algorithms` → `services.trainer.algorithms.terms.added.AddedTerms`,
                      `supervised.steps` → `(RunConfig) -> SupervisedSteps | None` (shared.supervised),
                      `supervised.runs` → `volley.reporting.supervised.SupervisedRuns`, `trainer.supervised` →
                      `(RunConfig) -> context manager` as `trainer.processes`, `trainer.warm_start` →
                      `services.trainer.backend.warm_start.WarmStarts`,
                      `group_judges` → `(RunConfig) -> OpenJudges | None` (services.orchestrator.judges),
                      `run_checks` → `services.trainer.interfaces.RunChecks`,
                      `model_parts` → `(model, ModelConfig, nnx.Rngs) -> None`, which adds parts of families to a model
                      of the trainer, `splash` → `(Mesh, platform) -> KernelAttention` (services.trainer.models.splash),
                      `engine_classes` → classes of models that sglang-jax lacks,
                      `environments` → `services.env.extension.Extension`, `env.processes` → `(EnvSettings) ->
                      services.env.processes.EnvironmentProcesses`, `sandbox_tier` → module that runs as
                      a program
    volley.agents     recorder of agents' calls → `(RecorderContext) -> AgentRecorder` (services.orchestrator.agents)
    volley.environment_kinds   built-in environment → `services.env.environments.kinds.EnvironmentKind`
    volley.dataset_kinds       the same, for environments whose tasks are rows of `data.train` and `data.eval`
    volley.algorithms name for `algorithm.name` → `shared.algorithm_kinds.AlgorithmKind`
    volley.engines    name for `rollout.engine.kind` → `shared.engine_kinds.EngineKind`
    volley.backends   name for `trainer.backend` → `shared.backend_kinds.BackendKind`
    volley.families   `model_type` of a model's config.json → `shared.models.family.Family`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shared.errors import ConfigError

SECTIONS, COMMANDS, PROOFS = "volley.sections", "volley.commands", "volley.proofs"
ENVIRONMENTS, DATASETS = "volley.environment_kinds", "volley.dataset_kinds"
ENGINES, AGENTS = "volley.engines", "volley.agents"
ALGORITHMS, BACKENDS, FAMILIES = "volley.algorithms", "volley.backends", "volley.families"
ROUTERS, SINKS = "volley.routers", "volley.sinks"
KEYS, SIDECARS, PARTS = "volley.keys", "volley.sidecars", "volley.parts"
NAMED = (SECTIONS, KEYS, COMMANDS, ALGORITHMS, ENGINES, PARTS, BACKENDS, FAMILIES, ENVIRONMENTS, DATASETS)
BROUGHT: Mapping[str, tuple[str, ...]] = {
    "volley-rl-algorithms": (
        "adaptive_concurrency", "cispo", "curriculum", "dapo", "dppo", "drgrpo", "echo", "gdpo", "generation_policy",
        "gspo-token", "kpop", "maxrl", "mopd", "on_policy_distillation", "own", "rae", "reinforce_plus_plus", "rloo",
        "rule_text", "sao", "sapo", "teachers", "trainer.algorithms",
    ),
    "volley-rl-bucket": ("bucket.run", "bucket.versions"),
    "volley-rl-commands": (
        "access", "completion", "config", "doctor", "eval", "follow", "foreign_names", "model", "model_download",
        "model_refusals", "status", "upgrade",
    ),
    "volley-rl-convert": ("export", "model_conversion"),
    "volley-rl-dashboard": (
        "compare", "dashboard", "docs_page", "live_display", "report", "run.dashboard", "run.trackers", "track",
        "trajectories",
    ),
    "volley-rl-data": ("own_data", "own_data.options"),
    "volley-rl-engines": ("gpu_kernels", "sglang", "vllm"),
    "volley-rl-environments": (
        "blocksworld", "code", "env.processes", "gsm8k", "gymnasium", "math", "reasoning_gym", "sokoban", "tetris",
        "text_to_sql",
    ),
    "volley-rl-families": (
        "deepseek_v3", "engine_classes", "gemma2", "gemma3_text", "mistral", "model_parts", "qwen2_moe", "qwen3_moe",
        "splash",
    ),
    "volley-rl-judges": ("group_judges", "judges"),
    "volley-rl-launch": (
        "accelerators", "external_checks", "findings", "launch", "node", "plan", "planner", "training_memory",
    ),
    "volley-rl-multihost": ("trainer.processes",),
    "volley-rl-proof": ("fork", "replay", "reverify", "run_checks", "verify"),
    "volley-rl-python": ("diagnosis.run", "diagnosis.waits", "folder_survey", "python_api", "source_identity"),
    "volley-rl-sandbox": ("env", "environments", "sandbox_tier", "services.env.players"),
    "volley-rl-serving": ("client_errors", "constraints", "generate_route", "serve"),
    "volley-rl-supervised": (
        "dpo", "sft", "supervised.runs", "supervised.steps", "trainer.supervised", "trainer.warm_start",
    ),
    "volley-rl-tinker": ("tinker",),
    "volley-rl-traces": ("traces",),
    "volley-rl-tunix": ("tunix",),
}  # fmt: skip
"""Names of sections, commands, engines and so on that each distribution brings."""
OWNERS = {name: distribution for distribution, names in BROUGHT.items() for name in names}
"""Distribution of each name, for the message to somebody who has not installed it."""


@cache
def _installed() -> Mapping[str, Sequence[EntryPoint]]:
    """All entry points, by group: reading them opens the files of every installed distribution, which takes a while."""
    groups = defaultdict[str, list[EntryPoint]](list)
    for point in entry_points():
        groups[point.group].append(point)
    return groups


@cache
def found(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group, by name. Raises ConfigError if two installed packages bring one name."""
    points: dict[str, EntryPoint] = {}
    for point in sorted(_installed()[group], key=lambda point: point.name):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            owners = " and ".join(sorted(map(_owner, (other, point))))
            raise ConfigError(f"both {owners} bring {point.name} ({group})", "uninstall one of them")
    return points


def load(point: EntryPoint) -> Any:
    """Import an entry point's object. Raises ConfigError."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{point.name} of the package {_owner(point)} cannot be loaded: {error}",
            "install it again, or uninstall it",
        ) from error


def loaded(group: str) -> dict[str, Any]:
    """Import all objects of a group, by name. Raises ConfigError."""
    return {name: load(point) for name, point in found(group).items()}


def part(name: str, *, required: bool = True) -> Any:
    """Import a part that the core can do without. If no package brings it, raise ConfigError, or return None."""
    if (point := found(PARTS).get(name)) is not None:
        return load(point)
    if required:
        raise ConfigError(f"{name}: {_absent(name)}", "install it")
    return None


def program(name: str) -> str:
    """Return the name of the module of a part that runs as a program. Raises ConfigError."""
    if (point := found(PARTS).get(name)) is None:
        raise ConfigError(f"{name}: {_absent(name)}", "install it")
    return point.module


def missing(name: str) -> str | None:
    """Say which package brings something of this name, if it is not installed; None for any other name."""
    known = any(name in found(group) for group in NAMED)
    return None if known or name not in OWNERS else _absent(name)


def _absent(name: str) -> str:
    return f"it belongs to the package {OWNERS[name]}, which is not installed"


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
