"""Send the spans of a process to a collector, if OpenTelemetry's SDK is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

from shared.errors import ConfigError
from shared.process.telemetry import Log

_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
_REQUIREMENTS = "'opentelemetry-sdk>=1.36' 'opentelemetry-exporter-otlp-proto-http>=1.36'"
_log = Log("traces")


@contextlib.contextmanager
def sending(service: str, run: str, collector: str | None, count: Callable[[str, int], None]) -> Iterator[None]:
    """Send spans to a collector until the end of the block.

    Args:
        collector: its address, http://HOST:4318; None for the one in OpenTelemetry's variables of the environment.
        count: counts spans by state: those that ended, and those of them that were sent or failed.

    Raises ConfigError if `collector` is given and OpenTelemetry is not installed.
    """
    if not _is_installed():
        if collector is not None:
            raise ConfigError(
                "run.traces is set, and OpenTelemetry is not installed",
                f"install it: pip install {_REQUIREMENTS}; or leave out run.traces",
            )
        _log.warning("no traces: OpenTelemetry is not installed", needs=_REQUIREMENTS)
        yield
        return
    from volley_traces.export import tracing_to

    with tracing_to(collector, service, run, count):
        yield


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        return False
