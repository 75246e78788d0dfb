"""Plan of a run: topology, memory, weight updates, cost and disk, and the reasons why it cannot run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.findings import beyond_positions, findings
from shared.models.config import ModelConfig
from shared.models.parameters import n_parameters, parameters
from shared.schema import RunConfig
from volley_launch.accelerators import shares
from volley_launch.plan import costs, topology
from volley_launch.planning.devices import Devices, local, parse, this_host
from volley_launch.planning.evaluation import Evaluation, PlannedDevices, evaluate
from volley_launch.planning.quantities import show_bytes
from volley_launch.planning.remedies import Search
from volley_launch.sharing import is_shared

SHARED = "shared"
"""Name of the trainer's GPU in place of the rollout servers' devices."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Devices, rates and prices of a plan.

    Attributes:
        trainer, rollout: devices as text; None: those of this machine. `SHARED`: the servers use the trainer's GPU.
        bandwidth: bytes per second between the trainer and a rollout server.
        moved: share of the weights that a step changes.
        prices: per device and hour, by name.
        step_s: seconds of a step.
    """

    trainer: str | None = None
    rollout: str | None = None
    bandwidth: float | None = None
    moved: float = 0.02
    prices: Mapping[str, float] | None = None
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why the run cannot start, and the settings that solve it."""

    reason: str
    change: str


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All parts of a plan; sizes are in bytes, times in seconds. None where the run has no such part."""

    model: Mapping[str, Any]
    topology: Mapping[str, Any]
    trainer: Mapping[str, Any] | None
    rollout: Mapping[str, Any] | None
    host: Mapping[str, Any] | None
    hand_over: costs.HandOver | None
    disk: costs.Disk | None
    cost: costs.Cost | None
    notes: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        made = asdict(self)
        if self.disk is not None:
            made["disk"]["total"] = self.disk.total
        return {"fits": not self.refusals, **made}


def make(loaded: LoadedConfig, model: ModelConfig, request: PlanRequest) -> RunPlan:
    """Plan the run of a configuration. Raises ConfigError for devices or prices that are not known."""
    config = loaded.config
    devices = _devices(config, request)
    found = evaluate(config, model, devices)
    search = Search(loaded, model, devices, frozenset(found.problems))
    devices = found.devices
    refusals = [Refusal(one.reason, one.hint or search.find(part)) for part, one in found.problems.items()]
    sent = costs.hand_over(config, model, request.bandwidth, request.moved)
    disk = None if found.trainer is None else costs.disk(config, model, sent)
    is_here = request.trainer is None and request.rollout is None
    if is_here:
        refusals += [] if disk is None else _of_disk(config, disk)
        refusals += _of_accelerators(config, found)
    return RunPlan(
        model=_of_model(config, model),
        topology=_topology(config, devices, found, is_here=is_here),
        trainer=_of_trainer(found, devices),
        rollout=_of_rollout(found),
        host=None if found.host is None else found.host.to_json(),
        hand_over=sent,
        disk=disk,
        cost=None if request.prices is None else _cost(config, devices, found, request.prices, request.step_s),
        notes=tuple(_notes(config, model, found, devices)),
        refusals=tuple(refusals),
    )


def _devices(config: RunConfig, request: PlanRequest) -> PlannedDevices:
    """Read the devices of the request, or find those of this machine. Raises ConfigError."""
    device = config.rollout.engine.device
    platform = device if device != "cpu" else "gpu"

    def own() -> Devices:
        return this_host() if device == "cpu" else local(device)

    trainer = own() if request.trainer is None else parse(request.trainer, platform)
    has_engine = not config.is_supervised and not config.rollout.engine.is_external
    if not has_engine:
        return PlannedDevices(trainer, None)
    if request.rollout == SHARED:
        return _sharing(config, trainer)
    if request.rollout is not None:
        return PlannedDevices(trainer, parse(request.rollout, platform))
    if request.trainer is None:
        return _divided(config, trainer)
    return PlannedDevices(trainer, Devices(trainer.type, 1 if trainer.type.platform == "cpu" else None))


def _divided(config: RunConfig, here: Devices) -> PlannedDevices:
    """Divide this machine's devices as `volley train` does: the trainer has its mesh, the servers the rest."""
    if here.count is None or here.type.platform == "cpu":
        return PlannedDevices(here, here)
    if here.type.platform == "gpu" and is_shared(config, here.count, config.services.n_local("rollout"), 1):
        return PlannedDevices(here, here, is_shared=True)
    left = max(0, here.count - config.trainer.mesh.n_devices)
    n = min(left, config.services.n_local("rollout") * config.rollout.engine.tp_size)
    return PlannedDevices(Devices(here.type, here.count - left or None), Devices(here.type, n))


def _sharing(config: RunConfig, trainer: Devices) -> PlannedDevices:
    """Let the rollout servers share the trainer's GPU. Raises ConfigError if they cannot."""
    count = trainer.count or config.trainer.mesh.n_devices
    if trainer.type.platform != "gpu" or not is_shared(config, count, config.services.n_local("rollout"), 1):
        raise ConfigError(
            f"--rollout {SHARED} needs one GPU for the trainer, trainer.mesh.shape=[1,1] and rollout.engine.tp_size=1",
            "name the devices of the rollout servers, e.g. --rollout h100:4",
        )
    return PlannedDevices(trainer, trainer, is_shared=True)


def _of_model(config: RunConfig, model: ModelConfig) -> Mapping[str, Any]:
    lora, n = config.trainer.lora, n_parameters(model)
    trained = n
    if lora is not None:
        trained = sum(one.n for one in parameters(model, lora.rank, lora.target_modules).values()) - n
    return {"path": config.model.path, "type": model.model_type, "parameters": n, "trained": trained}


def _topology(config: RunConfig, devices: PlannedDevices, found: Evaluation, *, is_here: bool) -> Mapping[str, Any]:
    servers = devices.servers
    return {
        "mode": config.mode,
        "processes": topology.processes(config, is_elsewhere=not is_here),
        "external": topology.external(config),
        "trainer": topology.of_trainer(config, devices.trainer),
        "rollout": None if servers is None else topology.of_servers(config, servers, found.n_servers),
    }


def _of_trainer(found: Evaluation, devices: PlannedDevices) -> Mapping[str, Any] | None:
    one = found.trainer
    if one is None:
        return None
    copies = 0 if one.saves_between else one.host_copies
    return {
        "kept": {name: n for name, n in one.kept.items() if n},
        "step": dict(one.step),
        "warm_start": dict(one.warm_start),
        "host": {name: n for name, n in (("reference", one.host_reference), ("copies of a checkpoint", copies)) if n},
        "phases": one.phases,
        "peak": one.peak,
        "peak_with_branches": one.peak_with_branches,
        "usable": devices.trainer.type.usable,
    }


def _of_rollout(found: Evaluation) -> Mapping[str, Any] | None:
    one = found.server
    if one is None:
        return None
    return {
        **asdict(one),
        "pool": one.pool,
        "total": one.total,
        "sequences": one.n_sequences,
    }


def _cost(
    config: RunConfig, devices: PlannedDevices, found: Evaluation, prices: Mapping[str, float], step_s: float | None
) -> costs.Cost:
    one, servers = devices.trainer, devices.servers
    used = [("trainer", one.type.name, one.count or config.trainer.mesh.n_devices)]
    is_same = servers is not None and (devices.is_shared or servers.type.platform == "cpu" == one.type.platform)
    if servers is not None and not is_same:
        n = servers.count or found.n_servers * config.rollout.engine.tp_size
        used.append(("rollout", servers.type.name, n))
    return costs.cost(used, prices, costs.steps(config), step_s)


def _of_accelerators(config: RunConfig, found: Evaluation) -> list[Refusal]:
    """Refuse parts of a host that a process cannot have, unless there is another problem with the devices."""
    if found.problems.keys() & {"mesh", "servers", "processes", "shares"}:
        return []
    try:
        shares(config, config.local_processes()["rollout"])
    except ConfigError as error:
        return [Refusal(error.detail, error.hint or "")]
    return []


def _of_disk(config: RunConfig, disk: costs.Disk) -> list[Refusal]:
    """Refuse a run whose checkpoints do not fit on this machine's disk; a run that has some needs less."""
    folder = next(one for one in (config.run.folder, *config.run.folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(folder).free
    needed = disk.checkpoint * disk.n_checkpoints + disk.base + disk.published
    if needed <= free or config.run.folder.exists():
        return []
    others = disk.n_checkpoints - config.trainer.checkpointing_options.max_to_keep
    fitting = (free - disk.base - disk.published) // max(1, disk.checkpoint) - others
    change = f"trainer.checkpointing_options.max_to_keep={fitting} or " if fitting >= 2 else ""
    reason = f"checkpoints take {show_bytes(needed)} below {folder}, which has {show_bytes(free)} free"
    return [Refusal(reason, f"{change}run.dir=FOLDER on a larger disk")]


def _notes(config: RunConfig, model: ModelConfig, found: Evaluation, devices: PlannedDevices) -> list[str]:
    notes = []
    if "group" not in found.problems:
        try:
            notes += findings(config)
        except ConfigError as error:
            notes.append(f"{error.detail}: {error.hint}.")
    notes += [one for one in (beyond_positions(config, model),) if one is not None]
    engine, serving, training = config.rollout.engine, found.server, found.trainer
    if engine.is_external and not config.is_supervised:
        notes.append(f"rollout.engine.kind={engine.kind}: its servers manage their own memory, which is not estimated.")
    if serving is not None and 0 < serving.n_sequences < engine.max_running_requests:
        notes.append(
            f"rollout.engine.max_running_requests={engine.max_running_requests} is more than the"
            f" {serving.n_sequences:,} sequences of {serving.context_length:,} tokens that a server's pool holds:"
            " longer ones wait for each other."
        )
    if serving is not None and 0 < serving.pool_tokens < serving.context_length:
        notes.append(
            f"rollout.engine.context_length={serving.context_length} has no effect: the pool of"
            f" rollout.engine.max_total_tokens={serving.pool_tokens} is smaller, and limits every sequence."
        )
    if devices.is_shared and devices.servers is not None and found.n_servers:
        trainer, each = devices.trainer.type.share or 0, devices.servers.type.share or 0
        notes.append(
            f"{found.n_servers + 1} processes share one GPU: the trainer fills {trainer:.1%} of its memory, and each"
            f" rollout server {each:.1%}."
        )
    limit = devices.trainer.type.usable
    if training is not None and training.peak <= limit < training.peak_with_branches:
        notes.append(
            f"If episodes have several sequences, training takes {show_bytes(training.peak_with_branches)}, which is"
            " more than the device has: lower trainer.train_micro_batch_size then."
        )
    if config.is_supervised and costs.steps(config) is None:
        notes.append("The number of steps depends on the conversations in sft.train: the run's cost is not estimated.")
    return notes
