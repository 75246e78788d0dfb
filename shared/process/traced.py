"""Tracing of a service's process, if the run or the environment names a collector."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

from shared.errors import ConfigError
from shared.process.telemetry import REGISTRY, Counter, Log

_ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
_REQUIREMENTS = "'opentelemetry-sdk>=1.36' 'opentelemetry-exporter-otlp-proto-http>=1.36'"
_SPANS = Counter(
    "volley_trace_spans",
    "Spans of traces that ended, and those of them that were sent or failed; the others wait or were dropped",
    ["state"],
    registry=REGISTRY,
)
_log = Log("traces")


@contextlib.contextmanager
def traced(service: str, run: str, collector: str | None) -> Iterator[None]:
    """Send the process's spans to a collector until the end of the block, if there is one.

    Args:
        collector: as the configuration names it; the variables of OpenTelemetry may name one too, or turn tracing off.

    Raises ConfigError if the configuration names one and OpenTelemetry is not installed.
    """
    if not is_wanted(collector, os.environ):
        yield
        return
    if not _is_installed():
        if collector is not None:
            raise ConfigError(
                "run.traces is set, and OpenTelemetry is not installed",
                f"install it: pip install {_REQUIREMENTS}; or leave out run.traces",
            )
        _log.warning("no traces: OpenTelemetry is not installed", needs=_REQUIREMENTS)
        yield
        return
    from shared.process.trace_export import tracing_to

    with tracing_to(collector, service, run, lambda state, n: _SPANS.labels(state).inc(n)):
        yield


def is_wanted(collector: str | None, environ: Mapping[str, str]) -> bool:
    """True if spans are to be sent: to `collector`, or to the one in the variables of OpenTelemetry."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if collector is not None:
        return True
    return environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and any(environ.get(name) for name in _ADDRESSES)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        return False
