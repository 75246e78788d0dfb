"""Services that end by themselves leave a trace, and not every trace is a defect."""

from __future__ import annotations

import traceback
from pathlib import Path

import orjson

from shared.errors import Fenced
from tools.chaos.logs import crashes, deaths, failed_with
from volley.local.supervisor import ServiceExit


def test_crashes_are_found_and_expected_ends_are_not(tmp_path: Path):
    crashed = {
        "event": "worker crashed",
        "level": "error",
        "traceback": "Traceback\n  File x\nRuntimeError: handler is closed\n",
    }
    quoting = {"event": "worker failed", "error": "Fenced", "detail": "worker crashed"}
    (tmp_path / "env.log").write_bytes(b"\n".join(map(orjson.dumps, (quoting, crashed))))
    (tmp_path / "trainer.log").write_bytes(
        orjson.dumps({"event": "did not end in time: ended by force", "after_s": 10})
    )
    (tmp_path / "rollout-0.log").write_text(
        "Traceback (most recent call last):\n  File x\nKeyError: 'y'\n", encoding="utf-8"
    )
    (tmp_path / "redis.log").write_bytes(orjson.dumps(quoting))
    assert crashes(tmp_path) == [
        "env: worker crashed: x: RuntimeError: handler is closed",
        "rollout-0: KeyError: 'y'",
        "trainer: did not end in time: ended by force",
    ]


def test_a_crash_with_several_exceptions_is_named_by_the_last_of_them(tmp_path: Path):
    try:
        orjson.loads("{")
    except ValueError as error:
        inner = error
    try:
        raise ExceptionGroup("unhandled errors", [ValueError("first"), ExceptionGroup("more", [inner])])
    except ExceptionGroup:
        event = {"event": "worker crashed", "traceback": traceback.format_exc()}
    (tmp_path / "env.log").write_bytes(orjson.dumps(event))
    (line,) = crashes(tmp_path)
    assert line.startswith("env: worker crashed: ")
    assert f'{Path(__file__).name}", line' in line
    assert line.endswith(f": {inner}")


def test_ends_that_are_neither_kills_nor_explained():
    killed, failed = ServiceExit("env", -9), ServiceExit("trainer", 1)
    hung, faulted = ServiceExit("env", -9, hung_s=120.0), ServiceExit("rollout-0", -11)
    assert deaths([killed, hung, failed, faulted]) == [
        "env ended with signal 9 (SIGKILL) after 120 s without an answer",
        "rollout-0 ended with signal 11 (SIGSEGV)",
    ]


def test_why_a_worker_ended_is_read_from_its_events_after_the_start_of_the_process(tmp_path: Path):
    log, earlier = tmp_path / "trainer.log", orjson.dumps({"event": "worker failed", "error": "Fenced"}) + b"\n"
    quoting = orjson.dumps({"event": "waiting", "reason": '"error":"Fenced"'}) + b"\n"
    log.write_bytes(earlier + quoting)
    assert failed_with(log, 0, Fenced)
    assert not failed_with(log, len(earlier), Fenced)
