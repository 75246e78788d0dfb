"""Prometheus metrics of the service, and the worker that updates the gauges."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from services.rollout.engines.base import Engine, EngineStatus, GenerateResult
from shared.errors import DecodeError, Unavailable
from shared.process.telemetry import REGISTRY, Counter, Gauge, Histogram, Log, Totals
from shared.types import WeightVersion

PERIOD_S = 1.0
_log = Log("metrics")
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
TOKENS = Counter("volley_rollout_tokens", "Tokens handled", ["kind"], registry=REGISTRY)
FINISHED = Counter("volley_rollout_requests", "Requests ended", ["finish"], registry=REGISTRY)
STAGE_SECONDS = Histogram(
    "volley_rollout_stage_seconds", "Verifying and loading weights", buckets=_BUCKETS, registry=REGISTRY
)
PAUSE_SECONDS = Histogram(
    "volley_rollout_pause_seconds", "Decoding stood still for a commit", buckets=_BUCKETS, registry=REGISTRY
)
DISTRUSTED = Counter(
    "volley_rollout_weights_distrusted", "Times that what served was not what was loaded", registry=REGISTRY
)
AVOIDED = Counter(
    "volley_rollout_sources_avoided", "Sources of weights left out for a while, by why", ["why"], registry=REGISTRY
)
PULLED = Counter("volley_rollout_pulled_bytes", "Bytes of weights that were pulled and kept", registry=REGISTRY)
_REQUESTS = Gauge("volley_rollout_engine_requests", "Requests in the engine", ["state"], registry=REGISTRY)
_FREE = Gauge("volley_rollout_free_kv_tokens", "Free slots of the key/value pool", registry=REGISTRY)
_STEPS = Totals("volley_rollout_engine_steps", "Steps of the engine since its start", "kind")
_COMPILATIONS = Totals("volley_rollout_engine_compilations", "Shapes the engine has compiled since its start", "what")
_EPOCH = Gauge("volley_rollout_weights_epoch", "Epoch of the serving weights; NaN while none serve", registry=REGISTRY)
_STEP = Gauge("volley_rollout_weights_step", "Step of the serving weights; NaN while none serve", registry=REGISTRY)


def count(result: GenerateResult) -> None:
    TOKENS.labels("prompt").inc(result.prompt_tokens)
    TOKENS.labels("cached").inc(result.cached_tokens)
    TOKENS.labels("output").inc(len(result.output_ids))
    FINISHED.labels(result.finish.type).inc()


async def observe(engine: Engine) -> None:
    """Worker that reads the engine's status once a second, if it answers."""
    while True:
        try:
            _show(await engine.status())
        except Unavailable as error:
            _log.warning("engine metrics not updated", detail=str(error))
        await asyncio.sleep(PERIOD_S)


def _show(status: EngineStatus) -> None:
    _REQUESTS.labels("running").set(status.running)
    _REQUESTS.labels("queued").set(status.queued)
    _FREE.set(status.free_kv_tokens)
    _COMPILATIONS.set({"shape": status.compilations})
    _STEPS.set(status.steps)
    epoch, step = _numbers(status.current)
    _EPOCH.set(epoch)
    _STEP.set(step)


def _numbers(version: str | None) -> tuple[float, float]:
    """Return a version's epoch and step as values, because a label would make a series of each version."""
    with suppress(DecodeError):
        if version is not None:
            known = WeightVersion.parse(version)
            return known.epoch, known.step
    return math.nan, math.nan
