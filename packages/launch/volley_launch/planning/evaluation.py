"""Memory of a configuration on given devices, and the reasons why it cannot run there."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.errors import ConfigError
from shared.models.adapter import is_adapter
from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.run.group_size import check_group
from shared.schema import RunConfig
from volley_launch.planning import host, server
from volley_launch.planning.devices import Devices
from volley_launch.planning.host import HostEstimate
from volley_launch.planning.quantities import show_bytes
from volley_launch.planning.server import ServerEstimate
from volley_launch.sharing import divide, is_shared
from volley_launch.training import trainer
from volley_launch.training.memory import MemoryEstimate


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason why a configuration cannot run. `hint` says what to change, where that needs no search."""

    reason: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedDevices:
    """Devices of a run's trainer and rollout servers. `servers` None: the run starts or needs no engine.

    With `is_shared` they are the same GPU.
    """

    trainer: Devices
    servers: Devices | None
    is_shared: bool = False

    def divided(self, config: RunConfig, model: ModelConfig) -> PlannedDevices:
        """Return the devices with each process's share of a shared GPU. Raises ConfigError if they cannot share."""
        kind, n = self.trainer.type, config.services.n_local("rollout")
        if not self.is_shared or self.servers is None:
            return self
        if not is_shared(config, 1, n, 1):
            raise ConfigError(
                "sharing one GPU requires trainer.mesh.shape=[1,1] and rollout.engine.tp_size=1",
                "trainer.mesh.shape=[1,1] with rollout.engine.tp_size=1",
            )
        found = divide(config, model, kind.memory, n, 1, os.environ)
        trainer, server = (replace(kind, share=share) for share in (found.trainer, found.server))
        return PlannedDevices(Devices(trainer, 1), Devices(server), is_shared=True)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Memory of a configuration on devices, and its problems by the part of the run that has them.

    `host` is the sum of all processes, if the devices are the processors of one machine.
    """

    devices: PlannedDevices
    trainer: MemoryEstimate | None = None
    server: ServerEstimate | None = None
    n_servers: int = 0
    host: HostEstimate | None = None
    problems: Mapping[str, Obstacle] = field(default_factory=dict[str, Obstacle])


def evaluate(config: RunConfig, model: ModelConfig, devices: PlannedDevices) -> Evaluation:
    """Estimate the memory and collect problems."""
    problems: dict[str, Obstacle] = {}
    estimate = None
    try:
        devices = devices.divided(config, model)
    except ConfigError as error:
        return Evaluation(devices, problems={"shares": Obstacle(error.detail, error.hint)})
    try:
        if not config.is_supervised:
            check_group(config, model.routing)
    except ConfigError as error:
        problems["group"] = Obstacle(error.detail, error.hint)
    try:
        estimate = trainer.estimate(config, model, devices.trainer.type.platform)
    except ConfigError as error:
        problems["micro-batches"] = Obstacle(error.detail, error.hint)
    problems |= _of_mesh(config, model, devices.trainer) | _of_parts(config, model, devices.trainer)
    if estimate is not None:
        problems |= _of_training(estimate, devices.trainer)
    serving, n_servers = None, 0
    if devices.servers is not None:
        n_servers = servers_of(config, devices.servers)
        serving = server.estimate(config, model, devices.servers.type)
        problems |= _of_servers(config, model, devices.servers, serving)
    on_host = None
    if estimate is not None and devices.trainer.type.platform == "cpu":
        own = None if config.services.rollout_urls else serving
        on_host = host.estimate(model, config.rollout.engine, devices.trainer.type.memory, estimate, own, n_servers)
        problems |= {} if problems else _of_host(on_host)
    return Evaluation(devices, estimate, serving, n_servers, on_host, problems)


def servers_of(config: RunConfig, devices: Devices) -> int:
    """Rollout servers of the run: as many as the named devices make up, or as the configuration lists."""
    if devices.count is not None and devices.type.platform != "cpu":
        return devices.count // config.rollout.engine.tp_size
    return len(config.services.rollout_urls) or config.services.n_local("rollout")


def _of_mesh(config: RunConfig, model: ModelConfig, devices: Devices) -> dict[str, Obstacle]:
    mesh, kind = config.trainer.mesh, devices.type
    shape = list(mesh.shape)
    if devices.count is not None and mesh.n_devices > devices.count:
        what = "has one device for JAX" if kind.platform == "cpu" else f"are {devices.count}"
        there = f"this machine {what}" if kind.platform == "cpu" else f"there {what} of type {kind.name}"
        return {"mesh": Obstacle(f"trainer.mesh.shape={shape} needs {mesh.n_devices} devices, and {there}")}
    for name, one in parameters(model).items():
        if (axis := one.indivisible(mesh.sizes)) is not None:
            return {
                "mesh": Obstacle(
                    f"parameter {name} of shape {list(one.shape)} does not divide over {axis}={mesh.sizes[axis]} of"
                    f" trainer.mesh.shape={shape}"
                )
            }
    hosts, processes = math.ceil(mesh.n_devices / kind.per_host), config.services.trainer.num_processes
    if kind.platform != "cpu" and hosts > processes:
        return {
            "processes": Obstacle(
                f"{mesh.n_devices} {kind.name} are on {hosts} hosts of at most {kind.per_host}, and the trainer has"
                f" {processes} process{'es' * (processes > 1)}",
                f"trainer.mesh.shape=[{kind.per_host},1], because a run of mode={config.mode} is trained by one process"
                if config.is_supervised
                else f"services.trainer.num_processes={hosts}, with services.trainer.coordinator_address=HOST:PORT",
            )
        }
    if mesh.n_devices % processes:
        return {
            "processes": Obstacle(
                f"the {mesh.n_devices} devices of trainer.mesh.shape={shape} do not divide over"
                f" services.trainer.num_processes={processes}",
                f"services.trainer.num_processes={hosts}",
            )
        }
    return {}


def _of_parts(config: RunConfig, model: ModelConfig, devices: Devices) -> dict[str, Obstacle]:
    """Refuse adapters that no projection has, and kernels that the platform does not have."""
    lora, platform = config.trainer.lora, devices.type.platform
    found: dict[str, Obstacle] = {}
    if lora is not None and not any(map(is_adapter, parameters(model, lora.rank, lora.target_modules))):
        found["adapters"] = Obstacle(
            f"trainer.lora.target_modules={list(lora.target_modules)} names no projection of this model that can have"
            " adapters: experts have none",
            "trainer.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
        )
    if config.trainer.attention == "splash" and platform != "tpu":
        found["attention"] = Obstacle(
            f"trainer.attention=splash has kernels for TPUs, and the trainer's devices are of the platform {platform}",
            "trainer.attention=auto",
        )
    return found


def _of_training(found: MemoryEstimate, devices: Devices) -> dict[str, Obstacle]:
    kind = devices.type
    if found.peak <= kind.usable:
        return {}
    return {
        "training": Obstacle(
            f"training takes {show_bytes(found.peak)} on each device ({found.largest_phase}), and {kind.limit} has"
            f" {show_bytes(kind.usable)} for it"
        )
    }


def _of_servers(config: RunConfig, model: ModelConfig, devices: Devices, found: ServerEstimate) -> dict[str, Obstacle]:
    engine, kind = config.rollout.engine, devices.type
    if kind.platform != engine.device:
        return {
            "device": Obstacle(
                f"rollout.engine.device={engine.device}, and the rollout servers' devices ({kind.name}) are of the"
                f" platform {kind.platform}",
                f"rollout.engine.device={kind.platform}",
            )
        }
    heads, keys, tp_size = model.num_attention_heads, model.num_key_value_heads, engine.tp_size
    if heads % tp_size or (keys % tp_size and tp_size % keys):
        fitting = [n for n in range(1, heads + 1) if not heads % n and not (keys % n and n % keys)]
        return {
            "heads": Obstacle(
                f"the model's {heads} heads with {keys} heads of keys do not divide over"
                f" rollout.engine.tp_size={tp_size}",
                f"rollout.engine.tp_size={_nearest(fitting, tp_size)}",
            )
        }
    if devices.count is not None and kind.platform != "cpu":
        n_servers = config.services.n_local("rollout")
        least = tp_size * n_servers
        if devices.count < least:
            return {
                "servers": Obstacle(
                    f"services.rollout_replicas={n_servers} with rollout.engine.tp_size={tp_size} needs {least}"
                    f" devices, and there are {devices.count}",
                    _fewer(devices, tp_size),
                )
            }
    return _of_pool(engine.max_total_tokens, found, devices)


def _fewer(devices: Devices, tp_size: int) -> str:
    """Settings with which servers use at most so many devices."""
    n_devices = devices.count or 0
    if not n_devices and devices.type.platform == "gpu":
        return "trainer.mesh.shape=[1,1] with rollout.engine.tp_size=1, with which processes can share the only GPU"
    if n_devices >= tp_size:
        return f"services.rollout_replicas={n_devices // tp_size}"
    smaller = "a smaller trainer.mesh.shape, or services.rollout_urls with servers of other hosts"
    return f"rollout.engine.tp_size={n_devices}" if n_devices else smaller


def _nearest(numbers: list[int], to: int) -> int:
    return min(numbers, key=lambda n: abs(n - to))


def _of_pool(asked: int | None, found: ServerEstimate, devices: Devices) -> dict[str, Obstacle]:
    kind, length = devices.type, found.context_length
    sizes = f"weights {show_bytes(found.weights)}, twice while a version arrives, and a step {show_bytes(found.step)}"
    if found.most_tokens < length:
        room = max(0, found.most_tokens)
        return {
            "pool": Obstacle(
                f"a rollout server has room for {room:,} tokens of keys and values, less than one sequence of"
                f" rollout.engine.context_length={length}: {kind.limit} has {show_bytes(found.limit)}; {sizes}"
            )
        }
    if found.pool_tokens > found.most_tokens:
        pool = f"rollout.engine.max_total_tokens={asked}" if asked else "the engine's own pool"
        return {
            "pool": Obstacle(
                f"{pool} takes {show_bytes(found.pool)} of a rollout server's device, and {kind.limit} has"
                f" {show_bytes(found.limit)}: {sizes}",
                f"rollout.engine.max_total_tokens={_rounded(found.most_tokens)}",
            )
        }
    return {}


def _rounded(n: int) -> int:
    """Round down to a multiple of 1024 if that leaves most of it."""
    return n // 1024 * 1024 if n > 16 * 1024 else n


def _of_host(found: HostEstimate) -> dict[str, Obstacle]:
    """Compare the sum of all processes on a CPU with this machine's memory."""
    if found.total <= found.memory:
        return {}
    n, of_servers = found.n_servers, show_bytes(found.server * found.n_servers)
    servers = f" and {n} rollout server{'s' * (n > 1)} {of_servers}" if n else ""
    rest = f"the run's other processes {show_bytes(found.services)} and the system {show_bytes(found.system)}"
    return {
        "host": Obstacle(
            f"the trainer takes {show_bytes(found.trainer)}{servers}, {rest}, and this machine has"
            f" {show_bytes(found.memory)}"
        )
    }
