"""Judge samples of memory, file descriptors and Redis after the warm-up.

The first third is warm-up: JAX fills its compilation cache, allocators and connection pools reach their size.

- *Memory* is judged by its peaks, one per twentieth of the time, because it varies within every step. It grows if the
  whole 99 % interval of its slope is above the limit. The limit is `LIMIT_MB_PER_HOUR` (3.4 GB in a week; a lower one
  would drown in what allocators retain in half an hour), plus `KEPT_MB_PER_STEP` for processes that write or read
  checkpoints: TensorStore (up to 0.1.86 at least) loses a reference to every object that it converts from JSON to
  Python, and Orbax requests metrics and paths of arrays that way.
- *File descriptors* grow if the interval is above 0 and amounts to two or more over the measured time.
- *Redis* may hold (cap + K·B) groups of the size of the largest measured entry, where cap = (η + 1)·B groups may be in
  flight and K·B are trained but not durable; plus what it used without the stream after the warm-up, and 64 kB for data
  that comes and goes with groups (leases, notices, scripts used for the first time). Connections and their buffers are
  not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import batched
from typing import Any

from shared.schema import RunConfig
from shared.services import kind_of
from tools.soak.samples import ProcessUsage, QueueUsage
from tools.soak.trend import trend

LIMIT_MB_PER_HOUR = 20.0
KEPT_MB_PER_STEP = {"trainer": 0.1, "rollout": 0.02}
WARM_UP = 1 / 3
_MB = 1e6
_GROWN_FDS = 2.0
_BESIDE_GROUPS = 2**16
_PARTS = 20


@dataclass(frozen=True, slots=True)
class SoakSample:
    """One sample. `time`: seconds since the start. `step`: newest durable step."""

    time: float
    step: int
    services: dict[str, ProcessUsage]
    queue: QueueUsage


def judged(samples: Sequence[SoakSample], config: RunConfig) -> dict[str, Any]:
    """Result as a dictionary; `problems` is empty if nothing grows."""
    end = samples[-1].time
    after = [sample for sample in samples if sample.time >= end * WARM_UP]
    steps_per_hour = (after[-1].step - after[0].step) / (end - after[0].time) * 3600
    services = {name: _service(name, after, _allowed(name, steps_per_hour)) for name in after[0].services}
    redis = _redis(after, config)
    problems = [problem for service in services.values() for problem in service.pop("problems")] + redis.pop("problems")
    if after[-1].step <= after[0].step:
        problems.append("no step was trained after the warm-up")
    return {
        "ok": not problems,
        "minutes": round(end / 60, 2),
        "measured_minutes": round((end - after[0].time) / 60, 2),
        "samples": len(after),
        "steps": after[-1].step,
        "steps_measured": after[-1].step - after[0].step,
        "services": services,
        "redis": redis,
        "problems": problems,
    }


def _allowed(name: str, steps_per_hour: float) -> float:
    """Allowed growth of memory in MB per hour."""
    return LIMIT_MB_PER_HOUR + KEPT_MB_PER_STEP.get(kind_of(name), 0.0) * steps_per_hour


def _service(name: str, samples: Sequence[SoakSample], allowed_mb_per_hour: float) -> dict[str, Any]:
    rows = [(sample.time / 3600, sample.services[name]) for sample in samples if name in sample.services]
    hours, usages = [hour for hour, _ in rows], [one for _, one in rows]
    peaks = _peaks([(hour, one.memory / _MB) for hour, one in rows])
    memory = trend([hour for hour, _ in peaks], [mb for _, mb in peaks])
    fds = trend(hours, [one.fds for one in usages])
    grown = fds.low * (hours[-1] - hours[0])
    n_starts = len({one.pid for one in usages})
    problems = []
    if memory.low > allowed_mb_per_hour:
        problems.append(f"{name}: memory grows by {memory.slope:.0f} MB an hour, {allowed_mb_per_hour:.0f} are allowed")
    if grown >= _GROWN_FDS:
        problems.append(f"{name}: file descriptors grow by {fds.slope:.0f} an hour")
    if n_starts > 1:
        problems.append(f"{name}: restarted {n_starts - 1} times")
    return {
        "mb_start": round(peaks[0][1], 1),
        "mb_end": round(peaks[-1][1], 1),
        "mb_max": round(max(mb for _, mb in peaks), 1),
        "mb_per_hour": {key: round(value, 2) for key, value in asdict(memory).items()},
        "mb_per_hour_allowed": round(allowed_mb_per_hour, 1),
        "fds_min": min(one.fds for one in usages),
        "fds_max": max(one.fds for one in usages),
        "fds_flat": grown < _GROWN_FDS,
        "threads_max": max(one.threads for one in usages),
        "problems": problems,
    }


def _peaks(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Largest value with its time in each of `_PARTS` equal parts of the samples; with few samples, all of them."""
    size = max(1, len(rows) // _PARTS)
    return [max(part, key=lambda row: row[1]) for part in batched(rows, size) if len(part) == size]


def _redis(samples: Sequence[SoakSample], config: RunConfig) -> dict[str, Any]:
    """Figures of Redis; sizes are in bytes."""
    queues = [sample.queue for sample in samples]
    n_entries = (config.grpo_config.off_policy_steps + 2) * config.trainer.groups_per_step
    entry = max((q.stream / q.n_entries for q in queues if q.n_entries), default=0.0)
    base = queues[0].used - queues[0].clients - queues[0].stream + _BESIDE_GROUPS
    bound, largest = base + n_entries * entry, max(q.used - q.clients for q in queues)
    problems = []
    if largest > bound:
        problems.append(f"redis: {largest / _MB:.2f} MB are above the bound of {bound / _MB:.2f} MB")
    if max(q.n_entries for q in queues) > n_entries:
        problems.append(f"redis: the stream held {max(q.n_entries for q in queues)} groups, more than {n_entries}")
    return {
        "data_max": largest,
        "bound": round(bound),
        "empty": base,
        "entry": round(entry),
        "entries_bound": n_entries,
        "entries_max": max(q.n_entries for q in queues),
        "keys_max": max(q.n_keys for q in queues),
        "used_max": max(q.used for q in queues),
        "problems": problems,
    }
