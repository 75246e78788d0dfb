"""Search for settings with which a configuration fits. Every setting that is named has been tried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import yaml

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.micro_batch import rows_of_rl, supervised_rows
from shared.schema import RunConfig
from volley.planning.devices import Devices
from volley.planning.evaluation import PlannedDevices, evaluate

type Settings = tuple[str, ...]

_LARGEST_MESH = 512
_REMATS = ("none", "block", "decoder")
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
        """Describe settings that solve the problem of `part`: each alone if some do, else the first set that does."""
        run = self.loaded.config
        if part == "mesh":
            return self._mesh(run)
        singles: dict[str, Settings] = {}  # by key: the first value that suffices changes least
        for one in _singles(part, run):
            key = one[0].partition("=")[0]
            if key not in singles and (found := self._solution(part, one)):
                singles[key] = found
        ways = [_joined(one) for one in singles.values()] or self._first(part, _sets(part, run))
        if part == "training" and self.devices.trainer.type.platform != "cpu":
            ways += self._first(part, _larger_meshes(run, self.devices.trainer))
        return " or ".join(ways) or "a smaller model, or more or larger devices"

    def _first(self, part: str, tries: Iterable[Settings]) -> list[str]:
        """Describe the first settings that solve the problem."""
        return [*islice((_joined(found) for one in tries if (found := self._solution(part, one))), 1)]

    def _solution(self, part: str, settings: Settings) -> Settings | None:
        """Settings that solve the problem and make no other: the given ones, if need be with a smaller pool."""
        try:
            found = evaluate(self._with(settings).config, self.model, self.devices).problems
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
                    found = evaluate(self._with(one).config, self.model, self.devices).problems.keys()
                except ConfigError:
                    continue
                if found & {"mesh", "micro-batches"}:
                    continue
                if "training" not in found:
                    return _joined(one)
                inner = replace(self, loaded=self._with(one))
                return f"{_joined(one)} with {inner.find('training')}"
        return "trainer.mesh.shape=[1,1]"

    def _with(self, settings: Settings) -> LoadedConfig:
        """Return the configuration with these settings. Raises ConfigError."""
        pairs = (one.split("=", 1) for one in settings)
        return config.changed(self.loaded, {key: yaml.safe_load(value) for key, value in pairs})


def _joined(settings: Settings) -> str:
    return " with ".join(settings)


def _singles(part: str, run: RunConfig) -> Iterator[Settings]:
    """Settings to try alone, those of a key that change least first."""
    if part in ("training", "host"):
        yield from _of_training(run)
    if part in ("pool", "host"):
        yield from _of_servers(run)


def _of_training(run: RunConfig) -> Iterator[Settings]:
    trainer = run.trainer
    yield from _smaller_batches(run)
    for remat in _REMATS[_REMATS.index(run.model.remat) + 1 :]:
        yield (f"model.remat={remat}",)
    if not trainer.offload_reference:
        yield ("trainer.offload_reference=true",)
    if run.model.dtype == "float32":
        yield ("model.dtype=bfloat16",)
    if not run.is_supervised and run.algorithm.beta:
        yield ("algorithm.beta=0",)
    if trainer.lora is None:
        yield ("trainer.lora.rank=16",)


def _smaller_batches(run: RunConfig) -> Iterator[Settings]:
    """Halve the micro-batch until every shard of fsdp has one row."""
    trainer, shards = run.trainer, run.trainer.mesh.sizes.get("fsdp", 1)
    if trainer.micro_batch_tokens is not None:
        tokens, least = trainer.micro_batch_tokens // 2, shards * max(trainer.length_buckets)
        while tokens >= least:
            yield (f"trainer.micro_batch_tokens={tokens}",)
            tokens //= 2
        return
    rows = trainer.train_micro_batch_size or (supervised_rows(run) if run.is_supervised else rows_of_rl(run))
    while rows // 2 >= shards:
        rows = rows // 2 // shards * shards
        yield (f"trainer.train_micro_batch_size={rows}",)


def _of_servers(run: RunConfig) -> Iterator[Settings]:
    engine = run.rollout.engine
    if engine.device != "cpu":
        for i in range(1, _GROWTH):
            yield (f"rollout.engine.tp_size={engine.tp_size << i}",)
    if run.model.dtype == "float32":
        yield ("model.dtype=bfloat16",)
    length = engine.context_length
    while length > _SHORTEST:
        length //= 2
        yield (f"rollout.engine.context_length={length}",)
    for n in range(run.services.n_local("rollout") - 1, 0, -1):
        yield (f"services.rollout_replicas={n}",)


def _sets(part: str, run: RunConfig) -> Iterator[Settings]:
    """Settings to try together, those that cost least first."""
    if part not in ("training", "host"):
        return
    known: Settings = ()
    for one in (*[*_smaller_batches(run)][-1:], *_savings(run)):
        known = (*known, *one)
        yield known
    if run.trainer.lora is None:
        known = (*known, "trainer.lora.rank=16")
        yield known
    if not run.is_supervised and run.sft.trains:  # a warm start trains all weights
        yield (*known, "sft.max_steps=0")


def _savings(run: RunConfig) -> Iterator[Settings]:
    if run.model.remat != "decoder":
        yield ("model.remat=decoder",)
    if run.model.dtype == "float32":
        yield ("model.dtype=bfloat16",)


def _larger_meshes(run: RunConfig, devices: Devices) -> Iterator[Settings]:
    """Larger meshes, as they are and with one row on each shard and all that saves activations."""
    now = run.services.trainer.num_processes
    packs = run.trainer.micro_batch_tokens is not None
    key = "trainer.micro_batch_tokens" if packs else "trainer.train_micro_batch_size"
    savings = tuple(one for several in _savings(run) for one in several)
    for mesh in _meshes(run, devices.count or _LARGEST_MESH, larger=True):
        size = _shape(mesh)[0] * (max(run.trainer.length_buckets) if packs else 1)
        hosts = math.ceil(math.prod(_shape(mesh)) / devices.type.per_host)
        several = (*mesh, f"services.trainer.num_processes={hosts}") if hosts > now else mesh
        yield several
        yield (*several, f"{key}={size}")
        yield (*several, f"{key}={size}", *savings)


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
