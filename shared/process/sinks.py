"""Fan-out of a run's metrics to sinks: Prometheus, trackers.

The files of a run (`metrics.jsonl`, `sft.jsonl`, `evals.jsonl`) are the record of account: their writer first writes a
line there, and then sends it here. `volley verify` reads only the files.

Invariants: a sink never raises into training and never delays it. Each has its own thread and bounded queue; a line
that a sink cannot take is counted and dropped. A sink gets lines in the order of the run, each at most once: it misses
those that a killed process could not send, and keeps those of steps that were undone later.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Full, Queue
from typing import Any, Literal, Protocol

import orjson

from shared import packages
from shared.process.telemetry import REGISTRY, Counter, Log

__all__ = ["Line", "LineKind", "MetricsFanout", "MetricsSink", "PrometheusSink"]

type LineKind = Literal["step", "supervised", "warm_start", "evaluation"]
"""Source of a line: metrics.jsonl; sft.jsonl, in a supervised run or in a warm start; evals.jsonl."""
type Line = Mapping[str, Any]

_MOST_QUEUED = 1024
_CLOSE_S = 2.0
"""Time for all sinks together to write queued lines when the process ends, in seconds."""
_LINES = Counter(
    "volley_metrics_sink_lines",
    "Lines of metrics by sink and by what became of them: written, failed or dropped (its queue is full)",
    ["sink", "outcome"],
    registry=REGISTRY,
)
_log = Log("sinks")


class MetricsSink(Protocol):
    """Receiver of a run's metrics. Its methods are called from one thread of its own, and may block and raise."""

    name: str

    def write(self, kind: LineKind, line: Line) -> None:
        """Take one line, as it is in the file; the copy belongs to the sink."""
        ...

    def close(self) -> None:
        """Flush buffered lines; no line follows."""
        ...


class PrometheusSink:
    """Show lines at `/metrics`; `show` sets the process's series."""

    name = "prometheus"

    def __init__(self, show: Callable[[LineKind, Line], None]) -> None:
        self._show = show

    def write(self, kind: LineKind, line: Line) -> None:
        self._show(kind, line)

    def close(self) -> None:
        """Do nothing: no lines are buffered."""


class MetricsFanout:
    """The sinks of one process."""

    def __init__(self, sinks: Sequence[MetricsSink] = ()) -> None:
        self._threads = [_SinkThread(sink) for sink in sinks]

    @classmethod
    @contextmanager
    def opened(cls, sinks: Sequence[MetricsSink], folder: Path | None = None) -> Iterator[MetricsFanout]:
        """Open the sinks, and close them at the end within `_CLOSE_S`.

        Args:
            folder: of the run; packages then add their sinks (group `volley.sinks`).

        Raises ConfigError for a package that cannot be loaded.
        """
        added = [] if folder is None else [make(folder) for make in packages.loaded(packages.SINKS).values()]
        fanout = cls([*sinks, *added])
        try:
            yield fanout
        finally:
            fanout.close()

    def send(self, kind: LineKind, line: Line) -> None:
        """Hand a line to every sink. Neither raises nor waits."""
        try:
            text = orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:  # the files cannot hold it either
            for thread in self._threads:
                thread.failed(error)
            return
        for thread in self._threads:
            thread.send(kind, text)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.ask_to_end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _SinkThread:
    """A sink, its queue and the thread that empties it; None in the queue ends it."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink, self._queue = sink, Queue[tuple[LineKind, bytes] | None](_MOST_QUEUED)
        self._has_failed = self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def send(self, kind: LineKind, text: bytes) -> None:
        try:
            self._queue.put_nowait((kind, text))
        except Full:
            self._count("dropped")
            if not self._has_dropped:
                self._has_dropped = True
                _log.warning("sink is too slow: lines are dropped", sink=self._sink.name, queued=_MOST_QUEUED)

    def ask_to_end(self) -> None:
        try:
            self._queue.put_nowait(None)
        except Full:
            _log.warning("sink is too slow: its last lines are dropped", sink=self._sink.name)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("sink did not end in time", sink=self._sink.name, queued=self._queue.qsize())

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, text = item
            if self._tried(self._sink.write, kind, orjson.loads(text)):
                self._count("written")
        self._tried(self._sink.close)

    def _tried[*A](self, call: Callable[[*A], object], *args: *A) -> bool:
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever a sink raises, training goes on
            self.failed(error)
            return False
        return True

    def failed(self, error: BaseException) -> None:
        self._count("failed")
        if not self._has_failed:
            self._has_failed = True
            detail = "".join(traceback.format_exception_only(error)).strip()
            _log.warning("sink failed", sink=self._sink.name, detail=detail)

    def _count(self, outcome: str) -> None:
        _LINES.labels(self._sink.name, outcome).inc()
