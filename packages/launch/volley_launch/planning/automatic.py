"""Values for settings that a run's configuration leaves out, chosen from its data, its model and the machine.

A value that the user gave is never changed. A run that has begun keeps the values that it was started with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError
from shared.models.config import ModelConfig
from shared.planning.micro_batch import rows_of_step
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from volley.choices import is_given
from volley.runs.run_file import read_record
from volley_launch.accelerators import check_device, find_accelerators
from volley_launch.planning.devices import Devices, local, this_host
from volley_launch.planning.evaluation import PlannedDevices, evaluate
from volley_launch.planning.quantities import show_bytes
from volley_launch.planning.remedies import Search

_UNIT = 64
"""Contexts are multiples of this number of tokens, so that similar data give equal ones."""
_ANSWER = 256
"""Default length of one answer in tokens, where prompts are known."""
_OBSERVATION = 128
"""Tokens of an environment's reply that the context leaves room for, in each turn after the first."""
_SERVER = ("trainer", "rollout")
_CONTEXT, _BUCKETS = "rollout.engine.context_length", "trainer.length_buckets"
_RESPONSE, _TURNS = "grpo_config.max_response_length", "orchestrator.max_turns"
_ROWS, _TOKENS = "trainer.train_micro_batch_size", "trainer.micro_batch_tokens"
_REQUESTS, _POOL = "rollout.engine.max_running_requests", "rollout.engine.max_total_tokens"
_DEVICE, _DTYPE, _REMAT = "rollout.engine.device", "model.dtype", "model.remat"
_FEWEST_REQUESTS = 4
_OF_MEMORY = ("training", "pool", "host")
_SHORTEST_ROW = 512


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Number of a data set's prompts, and the length of the longest one in tokens, as the model reads it."""

    n: int
    longest: int


def fit(
    loaded: LoadedConfig,
    model: ModelConfig,
    prompts: PromptLengths | None = None,
    devices: PlannedDevices | None = None,
    *,
    packs: bool = False,
) -> LoadedConfig:
    """Choose values for settings that are left out; the result's `choices` has the reason of each.

    If `prompts` is given, lengths follow them and the model, and device and number format the machine. Sizes of batches
    follow the memory of `devices` (default: this machine's), if the defaults do not fit. With `packs`, a CPU trains one
    row of packed sequences at a time. Raises ConfigError if the prompts do not fit the model.
    """
    loaded = _begun(loaded)
    if prompts is not None:
        loaded = _on_device(loaded)
        loaded = _with_lengths(loaded, model, prompts)
    if packs:
        loaded = _with_one_shape(loaded)
    return _in_memory(loaded, model, devices or _devices(loaded.config))


def shortages(
    loaded: LoadedConfig, model: ModelConfig, devices: PlannedDevices | None = None
) -> dict[str, ConfigError]:
    """Compare the run with the memory of `devices` (default: this machine's).

    Returns an error for `training`, for the `pool` of a rollout server and for the whole `host`, whichever do not fit.
    It names two settings with which they do.
    """
    if (devices := devices or _devices(loaded.config)) is None:
        return {}
    problems = evaluate(loaded.config, model, devices).problems
    search = Search(loaded, model, devices, frozenset(problems))
    return {
        part: ConfigError(one.reason, one.hint or search.find(part))
        for part, one in problems.items()
        if part in _OF_MEMORY
    }


def _choose(loaded: LoadedConfig, reason: str, **values: Any) -> LoadedConfig:
    """Set values for which none is given, by key with `__` for dots."""
    named = {key.replace("__", "."): value for key, value in values.items()}
    missing = {key: value for key, value in named.items() if not is_given(loaded, key)}
    if not missing:
        return loaded
    changed = config.changed(loaded, missing)
    return replace(changed, choices={**loaded.choices, **dict.fromkeys(missing, reason)})


def _begun(loaded: LoadedConfig) -> LoadedConfig:
    """Take the values with which the run of this folder was started, if it has begun."""
    record = read_record(RunFolder(loaded.config.run.folder.absolute()))
    if record is None:
        return loaded
    keys = (_CONTEXT, _BUCKETS, _RESPONSE, _TURNS, _ROWS, _TOKENS, _REQUESTS, _POOL, _DEVICE, _DTYPE, _REMAT)
    values = {key: record.config[key] for key in keys if key in record.config and not is_given(loaded, key)}
    return config.changed(loaded, values) if values else loaded


def _on_device(loaded: LoadedConfig) -> LoadedConfig:
    """Use an accelerator of this machine that JAX of the installed environments can use."""
    if is_given(loaded, _DEVICE) or loaded.config.services.rollout_urls or loaded.config.rollout.engine.is_external:
        return loaded
    for kind in ("gpu", "tpu"):
        with suppress(ConfigError):
            if find_accelerators(kind, os.environ).names:
                check_device(kind, _SERVER)
                loaded = _choose(loaded, f"this machine has a {kind.upper()}", rollout__engine__device=kind)
                return _choose(loaded, f"matrix units of {kind.upper()}s compute in bfloat16", model__dtype="bfloat16")
    return loaded


def _with_lengths(loaded: LoadedConfig, model: ModelConfig, prompts: PromptLengths) -> LoadedConfig:
    """Choose the lengths of answers and of the context from the longest prompt. Raises ConfigError."""
    most = model.max_position_embeddings
    if is_given(loaded, _CONTEXT):
        most = min(most, loaded.config.rollout.engine.context_length)
    if prompts.longest >= most:
        limit = f"{_CONTEXT}={most}" if is_given(loaded, _CONTEXT) else f"the model reads at most {most}"
        folder = loaded.config.run.folder
        is_begun = RunFolder(folder.absolute()).record.exists()
        other = f", or choose another run.name: {folder} is a run with this length" if is_begun else ""
        raise ConfigError(
            f"the longest prompt has {prompts.longest} tokens, and {limit}", f"leave out the longest prompts{other}"
        )
    answer = min(_ANSWER, most - prompts.longest)
    loaded = _choose(loaded, "usual length of an answer", grpo_config__max_response_length=answer)
    turns, answer = loaded.config.orchestrator.max_turns, loaded.config.grpo_config.max_response_length
    wanted = prompts.longest + turns * answer + (turns - 1) * _OBSERVATION
    context = min(most, _UNIT * math.ceil(wanted / _UNIT))
    longest = f"the longest of {prompts.n} prompts has {prompts.longest} tokens"
    of_turns = f"{turns} answers" if turns > 1 else "an answer"
    reason = f"{longest}, with room for {of_turns} of {answer}"
    return _choose(loaded, reason, rollout__engine__context_length=context)


def _with_one_shape(loaded: LoadedConfig) -> LoadedConfig:
    """Choose one shape of micro-batches on CPUs: a row of packed sequences, as long as the context or more."""
    if loaded.config.rollout.engine.device != "cpu" or is_given(loaded, _BUCKETS):
        return loaded
    row = max(_SHORTEST_ROW, loaded.config.rollout.engine.context_length)
    reason = f"one compiled shape, at least as long as {_CONTEXT}"
    loaded = _choose(loaded, reason, trainer__length_buckets=[row])
    if is_given(loaded, _ROWS):
        return loaded
    return _choose(loaded, "one packed row at a time fits a CPU's caches best", trainer__micro_batch_tokens=row)


def _in_memory(loaded: LoadedConfig, model: ModelConfig, devices: PlannedDevices | None) -> LoadedConfig:
    """Choose sizes of batches with which the run fits into memory; none if the defaults fit, or nothing does."""
    if devices is None or not _lacks(loaded, model, devices):
        return loaded
    limit = f"{show_bytes(devices.trainer.type.memory)} of memory"
    for values in _smaller(loaded):
        tried = _choose(loaded, f"{limit}, and the default needs more", **values)
        with suppress(ConfigError):
            if tried is not loaded and not _lacks(tried, model, devices):
                return tried
    return loaded


def _lacks(loaded: LoadedConfig, model: ModelConfig, devices: PlannedDevices) -> bool:
    return not evaluate(loaded.config, model, devices).problems.keys().isdisjoint(_OF_MEMORY)


def _devices(run: RunConfig) -> PlannedDevices | None:
    """Return this machine's devices for the run; None if another machine or a mesh has a part in it."""
    if run.services.rollout_urls or run.trainer.mesh.n_devices > 1 or run.services.trainer.num_processes > 1:
        return None
    device = run.rollout.engine.device
    serves = not run.is_supervised and not run.rollout.engine.is_external
    if device == "cpu":
        here = this_host()
        return PlannedDevices(here, here if serves else None)
    with suppress(ConfigError):
        here = local(device)
        one = Devices(here.type, 1)
        return PlannedDevices(one, one if serves else None, is_shared=serves and here.count == 1)
    return None


def _smaller(loaded: LoadedConfig) -> Iterator[Mapping[str, Any]]:
    """Values to try, those that cost least time first: smaller micro-batches, recomputation, fewer requests at once."""
    run = loaded.config
    found: dict[str, Any] = {}
    if not is_given(loaded, _ROWS) and not is_given(loaded, _TOKENS):
        rows = rows_of_step(run)
        while rows > 1:
            rows //= 2
            found["trainer__train_micro_batch_size"] = rows
            yield dict(found)
    if not is_given(loaded, _REMAT):
        for remat in ("block", "decoder"):
            found["model__remat"] = remat
            yield dict(found)
    requests = run.rollout.engine.max_running_requests
    while not is_given(loaded, _REQUESTS) and not run.is_supervised and requests > _FEWEST_REQUESTS:
        requests //= 2
        found["rollout__engine__max_running_requests"] = requests
        yield dict(found)
