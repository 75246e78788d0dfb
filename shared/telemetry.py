"""One structured event a line on stderr, and Prometheus metrics. Services never print.

Event fields follow one vocabulary: run, ticket, episode, step, version; durations end in _s.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

__all__ = ["REGISTRY", "Counter", "Gauge", "Histogram", "Log", "configure", "exposition"]

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)  # memory, file descriptors and CPU time of the process
_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}


class _Lines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "t": time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}",
            "level": _LEVELS.get(record.levelno, "info"),
            "service": self._service,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(event, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()


class Log:
    """A logger whose calls take an event name and fields: log.info("published", ticket=3)."""

    def __init__(self, name: str, **fields: Any) -> None:
        self._logger = logging.getLogger(f"volley.{name}")
        self._fields = fields

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Like `error`, with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        self._logger.log(level, event, extra={"fields": {**self._fields, **fields}}, exc_info=exc_info)


def configure(service: str, level: int = logging.INFO) -> None:
    """Routes all logging of the process to stderr as JSON lines; libraries only from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("volley").setLevel(level)


def exposition() -> bytes:
    """All metrics of the process in Prometheus' text format."""
    return generate_latest(REGISTRY)
