"""What a run shows while it goes: phases from recorded events, the live display on a screen, plain lines in pipes."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.terminal import Screen
from volley.local.supervisor import ServiceState
from volley.printing import keep_lost_in, outlive_output
from volley.reporting.display import shown
from volley.reporting.progress import Activity, PlainLines, ProgressDisplay
from volley_dashboard.terminal.live import LiveDisplay
from volley_dashboard.terminal.phases import PhaseRow, RunPhases

SERVICES = ("redis", "env", "rollout-0", "orchestrator", "trainer")
WAITING = Activity(
    {"groups_per_step": 16, "episodes_running": 96}, {"phase": "waiting", "step": 7, "waiting_groups": 9}
)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def phases(clock: Clock) -> RunPhases:
    return RunPhases(15, clock)


def sft(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, "max_steps": 600, "loss": 5.0 / step, "time": 1000.0 + 0.1 * step} | fields


def step(n: int, **fields: Any) -> dict[str, Any]:
    record = {"step": n, "reward_mean": 0.1 * n, "success": 0.06 * n, "tokens": 1000, "tokens_per_sec": 812.3}
    return record | {"time": 2000.0 + 5 * n} | fields


def evaluation(n: int, success: float) -> dict[str, Any]:
    return {"step": n, "success": success, "n_tasks": 200, "failed": 0, "elapsed_s": 5.2}


def start(display: RunPhases | ProgressDisplay, clock: Clock) -> None:
    for name in SERVICES:
        display.service(name, "pending")
    for name in SERVICES:
        display.service(name, "starting")
        clock.now += 2.0
        display.service(name, "up")


def test_services_that_start_are_named_until_all_answer(phases: RunPhases, clock: Clock) -> None:
    for name in SERVICES:
        phases.service(name, "pending")
    phases.service("redis", "starting")
    assert phases.service("redis", "up") == []
    assert phases.rows() == [PhaseRow("services", "1/5 answer, starting: env, rollout-0, orchestrator, trainer", 1, 5)]
    clock.now += 12.5
    ended = [line for name in SERVICES[1:] for line in phases.service(name, "up")]
    assert ended == ["✓ services        12.5 s  redis, env, rollout-0, orchestrator, trainer answer"]
    assert phases.rows() == []


def test_a_service_that_dies_is_shown_until_it_answers_again(phases: RunPhases, clock: Clock) -> None:
    start(phases, clock)
    phases.service("rollout-0", "down")
    assert phases.rows() == [PhaseRow("services", "4/5 answer, starting again: rollout-0", 4, 5)]
    phases.service("rollout-0", "starting")
    clock.now += 8.0
    assert phases.service("rollout-0", "up") == ["✓ rollout-0        8.0 s  answers again"]
    assert phases.rows() == []


def test_services_that_are_stopped_are_named_until_they_have_ended(phases: RunPhases, clock: Clock) -> None:
    start(phases, clock)
    phases.activity(WAITING)
    for name in SERVICES:
        phases.service(name, "stopping")
    phases.service("trainer", "down")
    assert phases.rows() == [PhaseRow("stopping", "redis, env, rollout-0, orchestrator")]


def test_services_that_wait_for_others_to_end_are_not_shown_as_starting(phases: RunPhases, clock: Clock) -> None:
    start(phases, clock)
    for name in SERVICES[2:]:
        phases.service(name, "stopping")
        phases.service(name, "down")
    assert phases.rows() == [PhaseRow("stopping", "redis, env")]
    phases.service("env", "stopping")
    phases.service("env", "down")
    assert phases.rows() == [PhaseRow("stopping", "redis")]
    phases.service("env", "starting")
    assert phases.rows()[0].name == "services"


def test_a_warm_start_tells_its_loss_and_the_time_left(phases: RunPhases, clock: Clock) -> None:
    phases.activity(Activity({}, {"phase": "warm start", "waiting_for": "env: no such task yet"}))
    assert phases.rows() == [PhaseRow("warm start", "env: no such task yet")]
    for n in range(1, 101):
        phases.record("sft", sft(n))
    assert phases.rows() == [PhaseRow("warm start", "100/600  0:50 left  loss 0.0500", 100, 600)]
    clock.now += 61.0
    assert phases.record("sft", sft(600)) == ["✓ warm start   1 min 1 s  600 steps, loss 5.0000 → 0.0083"]


def test_steps_tell_their_figures_and_what_the_next_one_waits_for(phases: RunPhases) -> None:
    phases.activity(WAITING)
    for n in range(1, 8):
        assert phases.record("step", step(n)) == []
    assert phases.rows() == [
        PhaseRow("RL", "7/15  0:40 left  reward +0.700  success 42%  812 tokens/s", 7, 15),
        PhaseRow("step 8", "9/16 groups, running episodes: 96", 9, 16),
    ]


@pytest.mark.parametrize(
    ("phase", "row"),
    [
        ("training", PhaseRow("step 8", "is trained")),
        ("paused", PhaseRow("step 8", "paused on request")),
        ("saving", PhaseRow("checkpoint", "of step 7")),
    ],
)
def test_the_trainer_s_phase_is_told(phases: RunPhases, phase: str, row: PhaseRow) -> None:
    phases.activity(Activity({}, {"phase": phase, "step": 7}))
    assert phases.rows() == [PhaseRow("RL", "7/15", 7, 15), row]


def test_rl_ends_with_one_line(phases: RunPhases, clock: Clock) -> None:
    phases.activity(Activity({}, {"phase": "waiting", "step": 0}))
    clock.now += 83.0
    lines = [line for n in range(1, 16) for line in phases.record("step", step(n))]
    assert lines == ["✓ RL          1 min 23 s  15 steps, reward +0.100 → +1.500, 15,000 tokens trained"]
    assert phases.rows() == []


def test_a_step_that_was_undone_and_trained_again_counts_once(phases: RunPhases) -> None:
    for n in (1, 2, 3, 2, 3):
        phases.record("step", step(n))
    (line,) = phases.record("step", step(15))
    assert "4 steps, " in line
    assert "4,000 tokens trained" in line


def test_a_run_that_goes_on_tells_which_steps_it_saw(phases: RunPhases) -> None:
    phases.record("step", step(14))
    (line,) = phases.record("step", step(15))
    assert "steps 14–15, " in line


def test_an_evaluation_is_counted_task_by_task_and_ends_with_its_interval(phases: RunPhases) -> None:
    phases.activity(Activity({"evaluating_step": 3, "evaluated": [120, 200]}, {}))
    assert phases.rows() == [PhaseRow("evaluation", "120/200 tasks, after step 3", 120, 200)]
    assert phases.record("evaluation", evaluation(3, 0.395)) == [
        "✓ evaluation       5.2 s  success 39.5% (33.0–46.4) of 200 tasks, after step 3"
    ]


def test_a_stall_tells_what_is_waited_for_until_there_is_news(phases: RunPhases) -> None:
    phases.quiet("the run is waiting; trainer waits for groups")
    assert phases.rows() == [PhaseRow("waiting", "the run is waiting; trainer waits for groups")]
    phases.record("step", step(1))
    assert all(row.name != "waiting" for row in phases.rows())


def drive(display: ProgressDisplay, clock: Clock, look: Callable[[], None] = lambda: None) -> None:
    """A whole run, with a service that dies."""
    start(display, clock)
    look()
    display.activity(Activity({}, {"phase": "warm start"}))
    for n in (1, 2, 600):
        display.record("sft", sft(n))
    look()
    display.record("evaluation", evaluation(0, 0.29))
    for n in range(1, 16):
        display.activity(Activity(WAITING.run | {"evaluating_step": n, "evaluated": [n, 200]}, WAITING.trainer))
        display.record("step", step(n))
        look()
    display.say("rollout-0 ended with signal 9; restarting it in 0.5 s")
    display.service("rollout-0", "down")
    display.quiet("the run is running; trainer waits for orchestrator: too few groups; " * 3)
    look()
    display.service("rollout-0", "starting")
    display.service("rollout-0", "up")
    display.record("evaluation", evaluation(15, 0.975))
    look()


def terminal(columns: int) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    environment = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
    return Console(file=written, force_terminal=True, width=columns, _environ=environment), written


def screen_of(written: io.StringIO, columns: int) -> Screen:
    screen = Screen(columns)
    screen.feed(written.getvalue().replace("\n", "\r\n"))  # as a terminal's driver does
    return screen


SPINNER = set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
STAYED = [
    "✓ services        10.0 s  redis, env, rollout-0, orchestrator, trainer answer",
    "✓ warm start       0.0 s  600 steps, loss 5.0000 → 0.0083",
    "✓ evaluation       5.2 s  success 29.0% (23.2–35.6) of 200 tasks, after step 0",
    "✓ RL               0.0 s  15 steps, reward +0.100 → +1.500, 15,000 tokens trained",
    "rollout-0 ended with signal 9; restarting it in 0.5 s",
    "✓ rollout-0        0.0 s  answers again",
    "✓ evaluation       5.2 s  success 97.5% (94.3–98.9) of 200 tasks, after step 15",
]


def test_at_a_terminal_the_lines_stay_and_the_rows_go(clock: Clock) -> None:
    console, written = terminal(100)
    seen: list[str] = []
    with LiveDisplay.opened(15, console, clock) as display:

        def look() -> None:
            display.refresh()
            seen.append(screen_of(written, 100).text())

        drive(display, clock, look)
    screen = screen_of(written, 100)
    assert screen.text().splitlines() == STAYED
    assert not screen.cursor_hidden
    assert any("7/15  0:40 left  reward +0.700  success 42%  812 tokens/s" in text for text in seen)
    assert any("4/5 answer, starting again: rollout-0" in text for text in seen)


def test_no_line_is_lost_while_another_thread_draws(clock: Clock) -> None:
    """The rows change all the time, so that a line written with an old count of them would land on an older line."""
    console, written = terminal(80)
    ended = threading.Event()
    with LiveDisplay.opened(10**6, console, clock) as display:

        def draw() -> None:
            while not ended.wait(0.001):  # the lock is not fair
                display.refresh()

        thread = threading.Thread(target=draw)
        thread.start()
        for n in range(300):
            display.activity(WAITING if n % 2 else Activity())
            display.say(f"line {n}")
        ended.set()
        thread.join()
    assert screen_of(written, 80).text().splitlines() == [f"line {n}" for n in range(300)]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_row_is_wider_than_the_terminal(columns: int, clock: Clock) -> None:
    """Else the lines above would be overwritten: the display goes up by as many lines as it has rows."""
    console, written = terminal(columns)
    with LiveDisplay.opened(15, console, clock) as display:
        drive(display, clock, display.refresh)
    assert "".join(screen_of(written, columns).text().split()) == "".join("".join(STAYED).split())


@pytest.mark.parametrize("columns", [40, 80])
def test_where_it_is_narrow_the_figures_are_cut_and_not_the_names(columns: int, clock: Clock) -> None:
    console, written = terminal(columns)
    rows: list[str] = []
    with LiveDisplay.opened(15, console, clock) as display:

        def look() -> None:
            display.refresh()
            rows.extend(line for line in screen_of(written, columns).text().splitlines() if line[:1] in SPINNER)

        drive(display, clock, look)
    assert {line[2:].split(maxsplit=1)[0] for line in rows} >= {"services", "RL", "step", "evaluation", "waiting"}
    assert any(line.endswith("…") for line in rows)


def test_the_cursor_is_back_after_an_error(clock: Clock) -> None:
    console, written = terminal(80)
    with suppress(RuntimeError), LiveDisplay.opened(15, console, clock) as display:
        display.service("env", "starting")
        raise RuntimeError
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


class GoneTerminal(io.StringIO):
    """What is written fails while it is `gone`."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def test_a_terminal_that_is_gone_stops_nothing_and_the_log_gets_the_lines(clock: Clock, tmp_path: Path) -> None:
    written = GoneTerminal()
    keep_lost_in(tmp_path / "volley.log")
    console = Console(file=written, force_terminal=True, width=100, _environ={"TERM": "xterm-256color"})
    with suppress(ZeroDivisionError), LiveDisplay.opened(15, console, clock) as display:
        start(display, clock)
        written.gone = True
        drive(display, clock, display.refresh)
        raise ZeroDivisionError  # and not the terminal's error
    outlive_output(False)
    assert "reward" not in written.getvalue()
    assert "success 97.5%" in (tmp_path / "volley.log").read_text(encoding="utf-8").splitlines()[-1]


def test_the_cursor_is_back_after_an_error_of_the_drawing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    console, written = terminal(80)
    with suppress(ZeroDivisionError), LiveDisplay.opened(15, console, clock) as display:
        display.service("env", "starting")
        monkeypatch.setattr("volley_dashboard.terminal.live._WIDEST_BAR", None)  # no bar can be drawn
        with pytest.raises(TypeError):
            display.refresh()
        monkeypatch.undo()
        raise ZeroDivisionError
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l")


def test_no_color_is_honoured(clock: Clock) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, _environ={"NO_COLOR": "1", "TERM": "xterm"})
    with LiveDisplay.opened(15, console, clock) as display:
        drive(display, clock, display.refresh)
    assert "\x1b[3" not in written.getvalue()
    assert "\x1b[38" not in written.getvalue()


def test_in_a_pipe_every_event_is_a_plain_line(clock: Clock) -> None:
    said: list[str] = []
    drive(PlainLines(15, said.append, clock), clock)
    assert all(line.isprintable() for line in said)
    assert said[:6] == [*(f"{name} answers after 2.0 s" for name in SERVICES), "all services answer after 10.0 s"]
    assert sum(line.startswith("step ") for line in said) == 15
    assert any(line.startswith("held-out after step 15: success 97.5% (94.3–98.9)") for line in said)
    assert any(line.startswith("no news for 30 s; the run is running; trainer waits for") for line in said)
    assert max(map(len, said)) > 80  # nothing is wrapped


def test_all_services_answer_once_and_only_when_all_are_up(clock: Clock) -> None:
    said: list[str] = []
    display = PlainLines(15, said.append, clock)
    for name in ("a", "b"):
        display.service(name, "pending")
    events: list[tuple[str, ServiceState]] = [("a", "starting"), ("a", "up"), ("a", "down"), ("b", "starting")]
    for name, state in [*events, ("b", "up")]:
        display.service(name, state)
    assert not any(line.startswith("all services") for line in said)
    for _ in range(2):
        for state in ("starting", "up", "down"):
            display.service("a", state)
    assert [line.startswith("all services") for line in said].count(True) == 1


def test_standard_output_that_is_no_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(15) as display:
        display.service("env", "starting")
        display.service("env", "up")
    assert isinstance(display, PlainLines)
    assert capsys.readouterr().out.startswith("env answers after ")
