"""Search for settings with which a configuration fits. Every setting that is named has been tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.schema import RunConfig
from volley_launch.planning.devices import Devices
from volley_launch.planning.evaluation import PlannedDevices, evaluate
from volley_launch.training.remedies import (
    Settings,
    described,
    of_training,
    of_training_together,
    savings,
    ways,
    with_settings,
)

_LARGEST_MESH = 512
_GROWTH = 8  # doublings of a mesh or of tp_size that are tried
_SHORTEST = 256  # tokens of a context that is proposed


@dataclass(frozen=True, slots=True)
class Search:
    """Search for settings that solve a problem of the run. `problems` are the parts that have one already."""

    loaded: LoadedConfig
    model: ModelConfig
    devices: PlannedDevices
    problems: frozenset[str] = field(default=frozenset())

    def find(self, part: str) -> str:
        """Describe the two settings that solve the problem of `part` best: alone, together, or by a larger mesh."""
        run = self.loaded.config
        if part == "mesh":
            return self._mesh(run)
        training, servers = part in ("training", "host"), part in ("pool", "host")
        singles = [*(of_training(run) if training else ()), *(_of_servers(run) if servers else ())]
        sets = of_training_together(run, _smallest_pool(run) if servers else ()) if training else iter(())

        def tried(settings: Settings) -> Settings | None:
            return self._solution(part, settings)

        found = ways(tried, singles, sets)
        if part == "training" and self.devices.trainer.type.platform != "cpu" and len(found) < 2:
            found += ways(tried, (), _larger_meshes(run, self.devices.trainer))
        return described(found) or "a smaller model, or more or larger devices"

    def _solution(self, part: str, settings: Settings) -> Settings | None:
        """Settings that solve the problem and make no other: the given ones, if need be with a smaller pool."""
        try:
            found = evaluate(with_settings(self.loaded, settings).config, self.model, self.devices).problems
        except ConfigError:
            return None
        if part == "pool" and part in found and (hint := found[part].hint) is not None:
            return self._solution(part, (*settings, hint)) if hint not in settings else None
        return None if part in found or found.keys() - self.problems else settings

    def _mesh(self, run: RunConfig) -> str:
        """Find a mesh that devices and model allow, and what makes training fit there."""
        for mesh in _meshes(run, self.devices.trainer.count or run.trainer.mesh.n_devices):
            for one in (mesh, (*mesh, f"trainer.train_micro_batch_size={_shape(mesh)[0]}")):
                try:
                    found = evaluate(with_settings(self.loaded, one).config, self.model, self.devices).problems.keys()
                except ConfigError:
                    continue
                if found & {"mesh", "micro-batches"}:
                    continue
                if "training" not in found:
                    return described([one])
                inner = replace(self, loaded=with_settings(self.loaded, one))
                return f"{described([one])} with {inner.find('training')}"
        return "trainer.mesh.shape=[1,1]"


def _of_servers(run: RunConfig) -> Iterator[Settings]:
    engine = run.rollout.engine
    if engine.device != "cpu":
        for i in range(1, _GROWTH):
            yield (f"rollout.engine.tp_size={engine.tp_size << i}",)
    yield from _smallest_pool(run)
    if run.model.dtype == "float32":
        yield ("model.dtype=bfloat16",)
    length = engine.context_length
    while length > _SHORTEST:
        length //= 2
        yield (f"rollout.engine.context_length={length}",)
    for n in range(run.services.n_local("rollout") - 1, 0, -1):
        yield (f"services.rollout_replicas={n}",)


def _smallest_pool(run: RunConfig) -> Iterator[Settings]:
    """Size a CPU's pool for the running requests alone, so that no conversation stays cached between its turns."""
    engine = run.rollout.engine
    if engine.device == "cpu" and engine.max_total_tokens is None and not run.is_supervised:
        yield (f"rollout.engine.max_total_tokens={engine.max_running_requests * engine.context_length}",)


def _larger_meshes(run: RunConfig, devices: Devices) -> Iterator[Settings]:
    """Larger meshes, as they are and with one row on each shard and all that saves activations."""
    now = run.services.trainer.num_processes
    packs = run.trainer.micro_batch_tokens is not None
    key = "trainer.micro_batch_tokens" if packs else "trainer.train_micro_batch_size"
    saved = tuple(one for several in savings(run) for one in several)
    for mesh in _meshes(run, devices.count or _LARGEST_MESH, larger=True):
        size = _shape(mesh)[0] * (max(run.trainer.length_buckets) if packs else 1)
        hosts = math.ceil(math.prod(_shape(mesh)) / devices.type.per_host)
        several = (*mesh, f"services.trainer.num_processes={hosts}") if hosts > now else mesh
        yield several
        yield (*several, f"{key}={size}")
        yield (*several, f"{key}={size}", *saved)


def _meshes(run: RunConfig, most: int, *, larger: bool = False) -> Iterator[Settings]:
    """Meshes of fsdp and tp with at most `most` devices: the largest first, or the next larger ones first."""
    now = run.trainer.mesh.n_devices
    if run.trainer.mesh.axis_names != ("fsdp", "tp"):
        return
    sizes = [now << i for i in range(1, _GROWTH)] if larger else [2**i for i in range(9, -1, -1)]
    for n in sizes:
        for tp in (1, 2, 4, 8):
            if n <= most and n % tp == 0 and tp <= 2 * math.isqrt(n):
                yield (f"trainer.mesh.shape=[{n // tp},{tp}]",)


def _shape(mesh: Settings) -> list[int]:
    return [*map(int, mesh[0].partition("[")[2].rstrip("]").split(","))]
