"""Tracing of a service's process, if the run or the environment names a collector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from shared import packages
from shared.process.telemetry import REGISTRY, Counter, Log

_ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SPANS = Counter(
    "volley_trace_spans",
    "Spans of traces that ended, and those of them that were sent or failed; the others wait or were dropped",
    ["state"],
    registry=REGISTRY,
)
_log = Log("traces")


def traced(service: str, run: str, collector: str | None) -> AbstractContextManager[None]:
    """Return a context in which the process's spans are sent to a collector, if there is one.

    Args:
        collector: as the configuration names it; the variables of OpenTelemetry may name one too, or turn tracing off.

    Raises ConfigError if the configuration names one and no installed package sends spans.
    """
    if not is_wanted(collector, os.environ):
        return nullcontext()
    sending = packages.part("traces", required=collector is not None)
    if sending is None:
        _log.warning("no traces: no installed package sends them", needs=packages.OWNERS["traces"])
        return nullcontext()
    return sending(service, run, collector, lambda state, n: _SPANS.labels(state).inc(n))


def is_wanted(collector: str | None, environ: Mapping[str, str]) -> bool:
    """True if spans are to be sent: to `collector`, or to the one in the variables of OpenTelemetry."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if collector is not None:
        return True
    return environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and any(environ.get(name) for name in _ADDRESSES)
