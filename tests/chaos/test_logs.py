"""Services that end by themselves leave a trace, and not every trace is a defect."""

from __future__ import annotations

from pathlib import Path

import orjson

from tools.chaos.logs import crashes, deaths


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
    (tmp_path / "rollout-0.log").write_text("Traceback (most recent call last):\n  File x\nKeyError: 'y'\n")
    (tmp_path / "redis.log").write_bytes(orjson.dumps(quoting))
    assert crashes(tmp_path) == [
        "env: worker crashed: RuntimeError: handler is closed",
        "rollout-0: KeyError: 'y'",
        "trainer: did not end in time: ended by force",
    ]


def test_ends_that_are_neither_kills_nor_explained():
    killed, failed = (
        "env ended with signal 9; restarting it in 0.1 s",
        "trainer ended with exit code 1; restarting it in 0.1 s",
    )
    hung, faulted = (
        "env has not answered for 120 s; killing it",
        "rollout-0 ended with signal 11; restarting it in 0.1 s",
    )
    assert deaths([killed, hung, failed, faulted]) == [hung, faulted]
