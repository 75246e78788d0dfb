"""Lines of logs: JSON in files, the same event as text at a terminal."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.process.events import parse
from shared.process.telemetry import _JsonLines, _TerminalLines

ROOT = Path(__file__).parents[2]
PROGRAM = """
from shared.process import telemetry
telemetry.configure("trainer")
log = telemetry.Log("ledger", run="r")
log.info("step durable", step=3, digest="a b", level="x")
try:
    raise ValueError("no\\x1b[1m")
except ValueError:
    log.exception("worker crashed")
"""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(event: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("volley.ledger", logging.WARNING, "", 0, event, None, None)
    made.created, made.fields = 1795619045.1239, fields
    return made


def run(stderr: int, zone: str = "UTC") -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**os.environ, "TZ": zone}, stderr=stderr, timeout=60
    )
    assert done.returncode == 0


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_a_file_holds_one_json_object_a_line_with_the_time_in_utc(tmp_path: Path, zone: str):
    with (tmp_path / "log").open("wb") as log:
        run(log.fileno(), zone)
    first, second = map(json.loads, (tmp_path / "log").read_text(encoding="utf-8").splitlines())
    assert list(first) == ["time", "level", "service", "logger", "event", "run", "step", "digest", "level_"]
    assert TIME.fullmatch(first["time"])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(first["time"])) < timedelta(minutes=10)
    assert (first["level"], first["service"], first["logger"]) == ("info", "trainer", "volley.ledger")
    assert second["traceback"].endswith("ValueError: no\x1b[1m")


def test_a_terminal_shows_the_same_event_as_text():
    ours, theirs = pty.openpty()
    run(theirs)
    os.close(theirs)
    lines = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert TIME.sub("TIME", lines[0]) == 'TIME INFO    volley.ledger: step durable run=r step=3 digest="a b" level=x'
    assert TIME.sub("TIME", lines[1]) == "TIME ERROR   volley.ledger: worker crashed run=r"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == r"ValueError: no\x1b[1m"


def test_milliseconds_are_cut_and_never_rounded_up():
    assert orjson.loads(_JsonLines("s").format(record("x")))["time"] == "2026-11-25T15:04:05.123Z"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("e000001-s000004", "e000001-s000004"),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("a\nb", r'"a\nb"'),
        (["a", 1], '["a",1]'),
        (None, "null"),
        (0.5, "0.5"),
        (Path("/tmp/x"), '"/tmp/x"'),
        (os.fsdecode(b"\xe9"), r'"\ufffd"'),
        ("\u202eabc", r'"\u202eabc"'),
    ],
)
def test_values_at_a_terminal_cannot_be_taken_for_other_fields(value: object, shown: str):
    assert _TerminalLines().format(record("x", v=value)).endswith(f" volley.ledger: x v={shown}")


@pytest.mark.parametrize("line", ["", "trainer: text", "[1]", "null", '{"cut', b"\xff"])
def test_a_line_of_another_writer_is_no_event(line: str | bytes):
    assert parse(line) == {}
