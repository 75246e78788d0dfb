"""Structured logging to stderr, and Prometheus metrics. Services never print.

An event has a time (ISO-8601, UTC, milliseconds), a level, a logger, a name and fields. In files and pipes it is a line
of JSON, on a terminal a line of text. Fields use one vocabulary: run, ticket, episode, step, version; durations end in
_s.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shared.process import tracing
from shared.text import without_halves
from shared.visible import visible, visible_json

__all__ = ["REGISTRY", "Counter", "Gauge", "Histogram", "Log", "Totals", "configure", "exposition"]

disable_created_metrics()  # a second series per counter, unknown to Prometheus' text format
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)  # memory, file descriptors and CPU time of the process
_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "error",
}
_WORD = re.compile(r"[\w./:@%+,-]+")


class _JsonLines(logging.Formatter):
    """One JSON object a line: time, level, service, logger, event, fields, traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": _time(record),
            "level": _level(record),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if trace_id := tracing.trace_id():
            event["trace_id"] = trace_id
        event |= {f"{name}_" if name in event else name: value for name, value in _fields(record).items()}
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return _json(event)


class _TerminalLines(logging.Formatter):
    """The same event as text: `TIME LEVEL LOGGER: EVENT name=value`, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {visible(name)}={_value(value)}" for name, value in _fields(record).items())
        head = f"{_time(record)} {_level(record).upper():7} {record.name}:"
        line = f"{head} {visible(record.getMessage())}{fields}"
        trace = self.formatException(record.exc_info).splitlines() if record.exc_info else []
        return "\n".join([line, *map(visible, trace)])


def _time(record: logging.LogRecord) -> str:
    utc = datetime.fromtimestamp(record.created, UTC).replace(tzinfo=None)
    return utc.isoformat(timespec="milliseconds") + "Z"


def _level(record: logging.LogRecord) -> str:
    return _LEVELS.get(record.levelno, "info")


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _value(value: object) -> str:
    """Return a plain word unchanged, anything else as JSON."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else _json(value)


def _json(value: object) -> str:
    try:
        text = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:  # a name of a file that is not UTF-8, or an integer beyond 64 bits
        text = without_halves(json.dumps(value, default=str).encode()).decode()
    return visible_json(text)


class _StreamHandler(logging.StreamHandler[Any]):
    """Write straight to the stream's file; after a line that a full disk cut, start a new line."""

    _is_cut = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or lose it: a service neither ends nor waits because of its log."""
        text = ("\n" * self._is_cut + self.format(record) + "\n").encode()
        written = 0
        try:
            self.stream.flush()
            while written < len(text):
                written += os.write(self.stream.fileno(), text[written:])
        except OSError:
            self._is_cut = (self._is_cut and not written) or 0 < written < len(text)
        else:
            self._is_cut = False


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
    """Route all logging of the process to stderr; libraries only from warning on.

    Lines are text where stderr is a terminal, else JSON.
    """
    handler = _StreamHandler(sys.stderr)
    handler.setFormatter(_TerminalLines() if sys.stderr.isatty() else _JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("volley").setLevel(level)


class Totals(Collector):
    """A counter whose total is counted elsewhere; it restarts when that total does."""

    def __init__(self, name: str, help_text: str, label: str) -> None:
        self._name, self._help, self._label = name, help_text, label
        self._totals: Mapping[str, float] = {}
        REGISTRY.register(self)

    def set(self, totals: Mapping[str, float]) -> None:
        """Args: totals: by value of the label."""
        self._totals = dict(totals)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=[self._label])
        for value, total in self._totals.items():
            family.add_metric([value], total)
        yield family


def exposition(accept: str = "") -> tuple[bytes, str]:
    """Return all metrics of the process and their media type.

    OpenMetrics if the client's Accept header asks for it, else Prometheus' text format.
    """
    try:
        encode, media_type = choose_encoder(_by_preference(accept))
    except (TypeError, ValueError):  # for an invalid version
        encode, media_type = choose_encoder("")
    return encode(REGISTRY), media_type


def _by_preference(accept: str) -> str:
    """Sort the accepted types by q, which the library ignores, up to the text format, which is always available."""
    ranges = sorted((part for part in accept.split(",") if _quality(part) > 0), key=_quality, reverse=True)
    plain = next((i for i, part in enumerate(ranges) if part.partition(";")[0].strip() == "text/plain"), len(ranges))
    return ",".join(ranges[: plain + 1])


def _quality(media_range: str) -> float:
    """Return q (RFC 9110, 12.4.2); 0 if it is not a number."""
    for parameter in media_range.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
