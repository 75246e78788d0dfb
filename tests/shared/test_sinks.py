"""Sinks of metrics: they get what the files hold, and nothing that they do reaches training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from shared.process import sinks
from shared.process.sinks import MetricsFanout
from shared.process.telemetry import REGISTRY
from tests.support.sinks import KeepingSink, raising


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def counted(name: str, outcome: str) -> float:
    labels = {"sink": name, "outcome": outcome}
    return REGISTRY.get_sample_value("volley_metrics_sink_lines_total", labels) or 0.0


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_sink_gets_every_line_in_order_as_the_file_holds_it():
    one, two = KeepingSink("one"), KeepingSink("two")
    with MetricsFanout.opened([one, two]) as fanout:
        for step in range(100):
            fanout.send("step", {"step": step, "loss": np.float32(0.5), "kl": float("nan")})
    assert one.lines == two.lines == [("step", {"step": n, "loss": 0.5, "kl": None}) for n in range(100)]
    assert (one.closed, two.closed) == (True, True)
    assert counted("one", "written") == 100


@pytest.mark.parametrize(
    "error", [OSError(28, "disk full"), Unprintable(), SystemExit(1), KeyboardInterrupt(), MemoryError()]
)
def test_a_sink_that_fails_is_logged_once_and_counted_and_the_others_go_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
):
    name = f"bad {type(error).__name__}"
    bad, good = KeepingSink(name, raising(error)), KeepingSink("good")
    with caplog.at_level(logging.WARNING), MetricsFanout.opened([bad, good]) as fanout:
        for step in range(5):
            fanout.send("evaluation", {"step": step})
    assert (len(good.lines), bad.closed) == (5, True)
    assert (counted(name, "failed"), counted(name, "written")) == (5, 0)
    assert messages(caplog) == ["sink failed"]


def test_a_sink_that_fails_for_a_while_goes_on_afterwards():
    def write(line: Mapping[str, Any]) -> None:
        if line["step"] < 3:
            raise ConnectionError("away")

    sink = KeepingSink("back", write)
    with MetricsFanout.opened([sink]) as fanout:
        for step in range(6):
            fanout.send("step", {"step": step})
    assert [line["step"] for _, line in sink.lines] == [3, 4, 5]


def test_a_sink_that_hangs_delays_nothing_and_keeps_a_bounded_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sinks, "_CLOSE_S", 0.2)
    released = threading.Event()
    hung, good = KeepingSink("hung", lambda line: released.wait(60)), KeepingSink("beside")
    n = sinks._MOST_QUEUED + 500
    with caplog.at_level(logging.WARNING):
        started = time.monotonic()
        with MetricsFanout.opened([hung, good]) as fanout:
            for step in range(n):
                fanout.send("step", {"step": step})
                while fanout._threads[1]._queue.qsize() > 100:
                    time.sleep(0.001)
            assert fanout._threads[0]._queue.qsize() == sinks._MOST_QUEUED
            while len(good.lines) < n:
                time.sleep(0.001)
        assert time.monotonic() - started < 30
    released.set()
    assert len(good.lines) == n
    assert counted("hung", "dropped") >= 499
    assert messages(caplog)[0] == "sink is too slow: lines are dropped"
    assert messages(caplog).count("sink is too slow: lines are dropped") == 1


def test_a_sink_cannot_change_what_another_or_the_caller_has():
    def spoil(line: Any) -> None:
        line["ends"].clear()

    line, good = {"step": 1, "ends": {"answered": 1.0}}, KeepingSink("later")
    with MetricsFanout.opened([KeepingSink("spoiling", spoil), good]) as fanout:
        fanout.send("step", line)
    assert line["ends"] == good.lines[0][1]["ends"] == {"answered": 1.0}


@pytest.mark.parametrize("sinks_of", [list, lambda: [KeepingSink("strict")]])
def test_a_line_that_is_no_json_raises_nothing(sinks_of: Callable[[], list[KeepingSink]]):
    with MetricsFanout.opened(sinks_of()) as fanout:
        fanout.send("step", {"step": 2**70})
        fanout.send("step", {1: 2})  # type: ignore[dict-item]
