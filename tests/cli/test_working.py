"""Signs of life on standard error: lines into a pipe, one rewritten line on a terminal, results untouched."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from volley.layout import PROJECT
from volley.printing import json_output, print_lines, print_result
from volley.reporting import working as module
from volley.reporting.working import working

_PROGRAM = """
import sys, time
from volley.printing import print_lines
from volley.reporting import working
working._FIRST_S = working._EACH_S = 0.02
with working.working("counting") as tell:
    tell("step 1\\x1b[2J")
    time.sleep(0.3)
    print_lines("a result")
    time.sleep(0.3)
print_lines("the end")
"""


def test_a_pipe_gets_lines_and_the_result_stays_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_FIRST_LINE_S", 0.01)
    monkeypatch.setattr(module, "_EACH_LINE_S", 0.01)
    shown = ""
    with json_output(), working("counting") as tell:
        tell("step 3 of 4")
        deadline = time.monotonic() + 30
        while "step 3 of 4" not in shown and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
        print_lines("a note")
        print_result({"n": 1})
    assert shown.startswith("counting")
    assert capsys.readouterr().out == '{\n  "n": 1\n}\n'


def test_a_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("counting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_one_line_that_is_removed() -> None:
    own, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], cwd=PROJECT, env=environment, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while block := _read(own):
            seen += block
        process.wait(30)
    os.close(own)
    lines = seen.decode().split("\r\n")
    assert "counting: step 1\\x1b[2J (" in lines[0]
    assert lines[0].endswith("\r\x1b[2Ka result")
    assert lines[1].endswith("\r\x1b[2Kthe end")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the program has ended
        return b""
