"""Signs of life on standard error: lines into a pipe, one rewritten line on a terminal, results untouched."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from tests.support.terminal import in_terminal
from volley.layout import PROJECT
from volley.printing import json_output, print_lines, print_result
from volley.reporting import working as module
from volley.reporting.working import working

_PROGRAM = """
import sys
from volley.printing import print_lines
from volley.reporting import working
working._FIRST_S = working._EACH_S = 0.02
with working.working("counting") as tell:
    tell("step 1\\x1b[2J")
    sys.stdin.readline()
    print_lines("a result")
    sys.stdin.readline()
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
        [sys.executable, "-c", _PROGRAM],
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        seen = b""
        for shown in (b"counting: step 1", b"a result\r\n\r\x1b[2Kcounting"):
            while shown not in seen:
                block = _read(own)
                assert block, seen
                seen += block
            process.stdin.write(b"\n")
            process.stdin.flush()
        while block := _read(own):
            seen += block
        process.wait(30)
    os.close(own)
    lines = seen.decode().split("\r\n")
    assert "counting: step 1\\x1b[2J (" in lines[0]
    assert lines[0].endswith("\r\x1b[2Ka result")
    assert lines[1].endswith("\r\x1b[2Kthe end")


_DRAWS = """
import sys, threading
from volley.printing import print_lines, show_status
from volley.reporting import working
drawn = threading.Event()
def draw(line):
    show_status(line)
    drawn.set()
working._FIRST_S, working._EACH_S, working.show_status = 0.0, 0.0, draw
sys.setswitchinterval(1e-6)
with working.working("counting"):
    for n in range(300):
        drawn.clear()
        drawn.wait()
        print_lines(f"line {n}")
"""


def test_no_line_is_lost_while_the_status_is_drawn() -> None:
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(PROJECT)}
    with in_terminal([sys.executable, "-c", _DRAWS], 40, environment) as program:
        assert program.process.wait(120) == 0
    assert "counting" in program.text()
    assert program.screen().text().splitlines() == [f"line {n}" for n in range(300)]


_GOES_ON = """
import sys
from contextlib import suppress
from volley.printing import outlive_output, print_lines, show_status
outlive_output(True)
with suppress(OSError):
    show_status("counting")
sys.stdin.readline()
print_lines("a line")
raise SystemExit(7)
"""


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_command_outlives_the_terminal_of_its_status(on_terminal: bool) -> None:
    own, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", _GOES_ON],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=theirs if on_terminal else subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        while b"counting" not in _read(own):
            assert process.poll() is None
        os.close(own)
        out, _ = process.communicate(b"\n", timeout=60)
    assert process.returncode == 7
    assert on_terminal or out == b"a line\n"


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the program has ended
        return b""
