"""`volley train` under a pty, with real services around a simulated engine and learner: the screen at the end, and
after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.terminal import TerminalProgram, in_terminal
from volley.layout import PROJECT

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import sys
from volley.commands import train
from volley.local.stack import StackSeams
from tools.chaos.arena import SIMULATED
raise SystemExit(train.main(["configs/chaos.yaml"], sys.argv[1:], StackSeams(SIMULATED), prove=True))
"""


def command(folder: Path, *overrides: str) -> list[str]:
    small = ["services.rollout_replicas=1", "data.n_eval_tasks=4", f"run.dir={folder}"]
    return [sys.executable, "-c", PROGRAM, *small, *overrides]


def variables(term: str = "xterm-256color") -> dict[str, str]:
    hidden = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"TERM": term, "PYTHONPATH": str(PROJECT)}


def until(program: TerminalProgram, condition: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition(program.text()):
        assert program.process.poll() is None, program.screen().text()
        assert time.monotonic() < deadline, program.screen().text()
        time.sleep(0.1)


def ended(program: TerminalProgram) -> int:
    return program.process.wait(120)


def test_a_run_leaves_its_phases_the_curve_and_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with in_terminal(command(tmp_path, "trainer.max_steps=3"), 100, variables()) as program:
        code = ended(program)
    screen, text = program.screen(), program.screen().text()
    assert code == 0, text
    assert not screen.cursor_hidden
    kinds = [line.split()[1] for line in text.splitlines() if line.startswith("✓")]
    assert kinds[0] == "services"
    assert sorted(kinds[1:]) == ["RL", *["evaluation"] * 4]  # of two environments, before and after
    assert "held-out success, ░ 95% interval" in text
    assert "6 groups trained exactly once, none lost (verified)." in " ".join(text.split())
    assert text.splitlines()[-1].startswith("DONE: steps=3 ")
    assert "━" not in text  # no bar is left


def test_ctrl_c_leaves_the_terminal_whole_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    with in_terminal(command(tmp_path, "trainer.max_steps=100000"), 60, variables()) as program:
        until(program, lambda text: "reward" in text)
        program.process.send_signal(signal.SIGINT)
        assert ended(program) == 130
    screen = program.screen()
    assert not screen.cursor_hidden
    told = "".join(screen.text().split())  # the folder's name is longer than a line
    assert "stoppedbySIGINT;redis,env,rollout-0,orchestrator,trainerhaveended." in told
    assert f"`volleyup{tmp_path}/chaos`continuesrunchaosfromstep" in told
    assert "━" not in told


@pytest.mark.long
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    with in_terminal(command(tmp_path, "trainer.max_steps=1"), 60, variables("dumb")) as program:
        assert ended(program) == 0
    text = program.text().replace("\r\n", "\n")
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\nall services answer after " in text
    assert "\nstep 1/1  loss " in text
