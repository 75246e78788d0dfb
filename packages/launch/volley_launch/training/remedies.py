"""Settings with which training takes less memory, and a search for those that suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import yaml

from shared import config
from shared.config import LoadedConfig
from shared.planning.micro_batch import rows_of_step
from shared.schema import RunConfig
from shared.supervised import supervised_steps

type Settings = tuple[str, ...]
"""`KEY=VALUE` that belong together."""

_REMATS = ("none", "block", "decoder")
_MOST_WAYS = 2


def ways(
    tried: Callable[[Settings], Settings | None], singles: Iterable[Settings], sets: Iterable[Settings]
) -> list[Settings]:
    """Find two settings that suffice alone, of different keys, or else the first set that does.

    Args:
        tried: returns settings that suffice, with what they need beside them; None if they do not.
        singles: settings, in the order in which they are preferred.
    """
    found: dict[str, Settings] = {}
    for one in singles:
        key = one[0].partition("=")[0]
        if key not in found and (sufficient := tried(one)):
            found[key] = sufficient
        if len(found) == _MOST_WAYS:
            break
    return [*found.values()] or [_needed(tried, one) for one in islice(filter(None, map(tried, sets)), 1)]


def _needed(tried: Callable[[Settings], Settings | None], settings: Settings) -> Settings:
    """Leave out each of the settings without which the others suffice, the costly ones first."""
    for one in reversed(settings):
        fewer = tuple(other for other in settings if other != one)
        settings = settings if tried(fewer) != fewer else fewer
    return settings


def described(found: Sequence[Settings]) -> str:
    """KEY=VALUE with KEY=VALUE or KEY=VALUE"""
    return " or ".join(" with ".join(one) for one in found)


def with_settings(loaded: LoadedConfig, settings: Settings) -> LoadedConfig:
    """Return the configuration with these settings. Raises ConfigError."""
    pairs = (one.split("=", 1) for one in settings)
    return config.changed(loaded, {key: yaml.safe_load(value) for key, value in pairs})


def of_training(run: RunConfig) -> Iterator[Settings]:
    """Settings to try alone: those that change least first."""
    trainer = run.trainer
    yield from smaller_batches(run)
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


def of_training_together(run: RunConfig, first: Iterable[Settings] = ()) -> Iterator[Settings]:
    """Settings to try together, after those of `first`: those that cost least first."""
    known: Settings = ()
    for one in (*first, *[*smaller_batches(run)][-1:], *savings(run)):
        known = (*known, *one)
        yield known
    if run.trainer.lora is None:
        known = (*known, "trainer.lora.rank=16")
        yield known
    if not run.is_supervised and supervised_steps(run):  # a warm start trains all weights
        yield (*known, "sft.max_steps=0")


def smaller_batches(run: RunConfig) -> Iterator[Settings]:
    """Halve the micro-batch until every shard of fsdp has one row."""
    trainer, shards = run.trainer, run.trainer.mesh.sizes.get("fsdp", 1)
    if trainer.micro_batch_tokens is not None:
        tokens, least = trainer.micro_batch_tokens // 2, shards * max(trainer.length_buckets)
        while tokens >= least:
            yield (f"trainer.micro_batch_tokens={tokens}",)
            tokens //= 2
        return
    rows = trainer.train_micro_batch_size or rows_of_step(run)
    while rows // 2 >= shards:
        rows = rows // 2 // shards * shards
        yield (f"trainer.train_micro_batch_size={rows}",)


def savings(run: RunConfig) -> Iterator[Settings]:
    """Settings that lower what a token takes."""
    if run.model.remat != "decoder":
        yield ("model.remat=decoder",)
    if run.model.dtype == "float32":
        yield ("model.dtype=bfloat16",)
