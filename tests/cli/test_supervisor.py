"""Supervision of real processes: small Python programs that crash, hang, or leave children behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shared.clients.base import HttpClient
from shared.errors import ConfigError, VolleyError, first_error
from shared.process.events import CANNOT_START
from shared.process.exit_codes import AGAIN, describe
from shared.process.ports import free_port
from volley.layout import PROJECT
from volley.local.processes import ProcessSpec, Reaper, last_error
from volley.local.supervisor import RestartPolicy, ServiceFailed, SupervisedProcess, Supervision, keep_running
from volley.session_files import SessionFiles

QUICK = RestartPolicy(pause_s=0.01)
LIVES = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
"""Shows with the file in argv[1] that it is up."""
SERVES_A_MOMENT = """
import pathlib, sys, time
up = pathlib.Path(sys.argv[1])
up.touch()
for _ in range(6000):
    if up.with_suffix(".seen").exists():
        sys.exit(1)
    time.sleep(0.01)
"""
"""Ends as soon as the supervisor has seen that it is up."""


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper.running() as running:
        yield running


@pytest.fixture
def member(tmp_path: Path) -> Callable[..., SupervisedProcess]:
    def make(program: str, *, name: str = "child", stop_s: float = 5.0, start_s: float = 20.0) -> SupervisedProcess:
        flag, seen = tmp_path / f"{name}.up", tmp_path / f"{name}.seen"
        command = (sys.executable, "-c", program, str(flag))
        spec = ProcessSpec(name, command, dict(os.environ), tmp_path / f"{name}.log", stop_s)

        async def up() -> bool:
            if flag.exists():
                seen.touch()
            return flag.exists()

        def prepare() -> None:
            for file in (flag, seen):
                file.unlink(missing_ok=True)

        return SupervisedProcess(spec, up, start_s, prepare)

    return make


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def pid_of(kept: Supervision) -> int:
    assert kept.child is not None
    return kept.child.pid


async def fails(
    member: SupervisedProcess, reaper: Reaper, said: list[str], patience: RestartPolicy | None = None, **more: Any
) -> BaseException:
    """The error that supervision of this process ends with."""
    patience = patience or RestartPolicy()
    try:
        async with asyncio.timeout(120), keep_running([member], reaper, said.append, patience, **more):
            await asyncio.Event().wait()
    except BaseExceptionGroup as group:
        return first_error(group)
    raise AssertionError("supervision ended without an error")


async def test_the_context_ends_what_it_started(member: Callable[..., SupervisedProcess], reaper: Reaper) -> None:
    async with keep_running([member(LIVES, name="a"), member(LIVES, name="b")], reaper, print) as kept:
        pids = [pid_of(one) for one in kept]
        assert all(map(is_alive, pids))
    assert not any(map(is_alive, pids))


async def test_a_process_that_ends_before_it_is_up_fails_the_run(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    error = await fails(member("import sys; print('no such mesh', file=sys.stderr); sys.exit(1)"), reaper, [])
    assert isinstance(error, ServiceFailed)
    assert "child ended with exit code 1 before it was ready: no such mesh" in str(error)


async def test_what_a_process_needs_is_made_before_each_start_and_a_mended_cause_is_no_failure(
    member: Callable[..., SupervisedProcess], reaper: Reaper, tmp_path: Path
) -> None:
    needed, blocked = tmp_path / "needed", tmp_path / "blocked"
    blocked.touch()
    program = (
        f"import os, sys; sys.exit(1) if os.path.exists({str(blocked)!r}) else os.unlink({str(needed)!r}); {LIVES}"
    )
    mended: list[bool] = []

    def mend(_log_start: int) -> bool:
        mended.append(blocked.exists())
        blocked.unlink(missing_ok=True)
        return mended[-1]

    one = dataclasses.replace(member(program), prepare=needed.touch, mend=mend)
    async with keep_running([one], reaper, print, RestartPolicy(pause_s=0.01)) as (kept,):
        first = pid_of(kept)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(kept) != first and not needed.exists())
    assert mended == [True]


def test_missing_and_changed_files_of_a_session_are_written_again_but_not_a_run_that_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    secret, logs = root / "secrets" / "token", root / "logs"
    secret.parent.mkdir(parents=True, mode=0o700)
    logs.mkdir()
    secret.write_text("word", encoding="utf-8")
    secret.chmod(0o600)
    files = SessionFiles.read(root, [secret, root / "absent"], [secret.parent, logs])
    shutil.rmtree(secret.parent)
    shutil.rmtree(logs)
    files.restore()
    assert (secret.read_text(encoding="utf-8"), secret.stat().st_mode & 0o777) == ("word", 0o600)
    assert logs.is_dir()
    for other in ("", "wo", "another"):
        secret.write_text(other, encoding="utf-8")
        files.restore()
        assert (secret.read_text(encoding="utf-8"), secret.stat().st_mode & 0o777) == ("word", 0o600)
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]
    shutil.rmtree(root)
    files.restore()
    assert not root.exists()


async def test_a_process_that_never_answers_fails_the_run(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    error = await fails(member("import time; time.sleep(60)", start_s=0.3), reaper, [])
    assert "did not answer within 0.3 s" in str(error)


async def test_exit_code_2_is_a_wrong_configuration(member: Callable[..., SupervisedProcess], reaper: Reaper) -> None:
    log = "from shared.process import telemetry; telemetry.configure('trainer'); log = telemetry.Log('boot')"
    failure = f"log.error({CANNOT_START!r}, error='ConfigError', detail='data.train is missing')"
    error = await fails(member(f"{log}; {failure}; raise SystemExit(2)"), reaper, [])
    assert isinstance(error, ConfigError)
    assert str(error) == "trainer: data.train is missing"


async def test_a_crashed_process_is_started_again(member: Callable[..., SupervisedProcess], reaper: Reaper) -> None:
    said: list[str] = []
    async with keep_running([member(LIVES)], reaper, said.append) as (kept,):
        first = pid_of(kept)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(kept) != first and is_alive(pid_of(kept)))
    assert said == ["child ended with signal 9 (SIGKILL); restarting it in 0.5 s"]


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGABRT, 128 + signal.SIGKILL, AGAIN])
async def test_a_process_that_something_else_ends_before_it_is_up_is_started_again(
    member: Callable[..., SupervisedProcess], reaper: Reaper, code: int
) -> None:
    """At the first start, and at one after it has answered."""
    said: list[str] = []
    async with keep_running([member(_ends_early_at(1, 3, code))], reaper, said.append, QUICK) as (kept,):
        assert said == [f"child ended with {describe(code)} before it was ready; restarting it in 0.01 s"]
        os.kill(pid_of(kept), signal.SIGKILL)
        await until(lambda: len(said) == 3)
    assert said[2] == f"child ended with {describe(code)} before it was ready; restarting it in 0.04 s"
    assert [(end.code, end.answered) for end in kept.ends] == [(code, False), (-9, True), (code, False)]


def _ends_early_at(*starts_and_code: int) -> str:
    """A process that ends with a code, or by a signal, at some of its starts; at the others it answers and lives."""
    *starts, code = starts_and_code
    return (
        "import os, pathlib, sys, time\n"
        "up = pathlib.Path(sys.argv[1])\n"
        "counted = up.with_suffix('.starts')\n"
        "counted.open('ab').write(b'.')\n"
        f"if counted.stat().st_size in {starts}:\n"
        f"    os.kill(os.getpid(), {-code}) if {code} < 0 else os._exit({code})\n"
        "up.touch()\n"
        "time.sleep(60)\n"
    )


async def test_a_process_that_never_answers_for_a_signal_is_given_up(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    error = await fails(member("import os; os.kill(os.getpid(), 9)"), reaper, said, QUICK)
    assert isinstance(error, ServiceFailed)
    assert "signal 9 (SIGKILL) before it was ready, after 2 restarts" in str(error)
    assert "memory" in error.hint
    assert len(said) == 2


async def test_a_reason_that_the_process_names_is_shown_at_its_restart(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    program = f"import os, sys; print('Error: no port', file=sys.stderr); sys.stderr.flush(); os._exit({AGAIN})"
    error = await fails(member(program), reaper, said, QUICK)
    assert "Error: no port" in str(error)
    assert all("Error: no port; restarting" in line for line in said)
    assert len(said) == 2


async def test_a_process_that_no_longer_gets_ready_is_killed_and_started_again(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    """It has been ready before, so a start that takes too long is a hang."""
    said, starts = list[str](), list[float]()
    one = member("import pathlib, sys, time; sys.argv[2:] or pathlib.Path(sys.argv[1]).touch(); time.sleep(60)")
    silent = dataclasses.replace(one.spec, command=(*one.spec.command, "silent"))

    def prepare() -> None:
        """Let the second start never answer."""
        one.prepare()
        starts.append(0.2 if len(starts) == 1 else one.start_s)
        if len(starts) > 1:
            spec = silent if len(starts) == 2 else one.spec
            kept.member = dataclasses.replace(kept.member, spec=spec, start_s=starts[-1])

    async with keep_running([dataclasses.replace(one, prepare=prepare)], reaper, said.append, QUICK) as (kept,):
        os.kill(pid_of(kept), signal.SIGKILL)
        await until(lambda: len(starts) == 3 and is_alive(pid_of(kept)))
    assert said[1:] == ["child did not answer within 0.2 s; restarting it in 0.02 s"]


@pytest.mark.parametrize(
    "program", ["raise SystemExit(1)", f"raise SystemExit({AGAIN})", "import time; time.sleep(60)"]
)
async def test_only_an_error_of_its_own_is_mended_and_once(
    member: Callable[..., SupervisedProcess], reaper: Reaper, program: str
) -> None:
    """Data that are only slow to load are not set aside."""
    mended: list[bool] = []

    def mend(_log_start: int) -> bool:
        mended.append(True)
        return True

    one = dataclasses.replace(member(program, start_s=1.0 if "sleep" in program else 20.0), mend=mend)
    assert isinstance(await fails(one, reaper, [], QUICK), ServiceFailed)
    assert mended == ([True] if "(1)" in program else [])


async def test_what_is_killed_on_request_is_not_started_again(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    async with keep_running([member(LIVES)], reaper, said.append) as (kept,):
        pid = pid_of(kept)
        reaper.kill_all()
        await until(lambda: not is_alive(pid))
        await asyncio.sleep(0.1)
    assert said == []


async def test_restarts_are_bounded(member: Callable[..., SupervisedProcess], reaper: Reaper) -> None:
    said: list[str] = []
    error = await fails(member(SERVES_A_MOMENT), reaper, said, RestartPolicy(restarts=2, pause_s=0.01))
    assert ", after 2 restarts" in str(error)
    assert len(said) == 2


async def test_the_time_to_get_ready_is_no_service(
    member: Callable[..., SupervisedProcess], reaper: Reaper, tmp_path: Path
) -> None:
    """It fails less than once in a window, by the clock, and has not served at all."""
    one, now = member(SERVES_A_MOMENT), 0.0

    async def up_after_a_minute() -> bool:
        nonlocal now
        now += 0.0 if (tmp_path / "child.seen").exists() else 60.0
        return await one.probe()

    slow = dataclasses.replace(one, probe=up_after_a_minute)
    patience = RestartPolicy(restarts=2, window_s=20.0, pause_s=0.01)
    error = await fails(slow, reaper, [], patience, clock=lambda: now)
    assert ", after 2 restarts in 20 s of service" in str(error)


async def test_a_process_that_fails_rarely_is_restarted_for_ever(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    patience = RestartPolicy(restarts=1, window_s=0.5, pause_s=0.01)
    async with keep_running([member(SERVES_A_MOMENT)], reaper, said.append, patience, clock=count().__next__):
        await until(lambda: len(said) >= 3)
    assert set(said) == {"child ended with exit code 1; restarting it in 0.01 s"}


async def test_a_run_that_makes_steps_between_failures_goes_on(
    member: Callable[..., SupervisedProcess], reaper: Reaper, tmp_path: Path
) -> None:
    """Also where they are as frequent as those of a loop of crashes; pauses grow all the same."""
    said: list[str] = []
    patience = RestartPolicy(restarts=1, pause_s=0.01, longest_pause_s=0.04)
    async with keep_running([member(SERVES_A_MOMENT)], reaper, said.append, patience, progress=lambda: len(said)):
        await until(lambda: len(said) >= 4)
    assert [line.rpartition(" in ")[2] for line in said[:4]] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]


async def test_a_step_that_is_undone_and_made_again_is_no_progress(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    steps = iter([3, 2, 3, 2, 3])
    patience = RestartPolicy(restarts=2, pause_s=0.01)
    error = await fails(member(SERVES_A_MOMENT), reaper, said, patience, progress=lambda: next(steps))
    assert isinstance(error, ServiceFailed)
    assert len(said) == 2


async def test_the_pause_between_restarts_grows_up_to_a_bound(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    said: list[str] = []
    await fails(member(SERVES_A_MOMENT), reaper, said, RestartPolicy(restarts=4, pause_s=0.01, longest_pause_s=0.03))
    assert [line.rpartition(" in ")[2] for line in said] == ["0.01 s", "0.02 s", "0.03 s", "0.03 s"]


async def test_an_error_of_an_earlier_process_is_not_blamed(
    member: Callable[..., SupervisedProcess], reaper: Reaper
) -> None:
    failing = member("import sys; print('out of luck', file=sys.stderr); sys.exit(1)")
    failing.spec.log.write_text('{"level":"error","event":"old trouble"}\n', encoding="utf-8")
    error = await fails(failing, reaper, [])
    assert "out of luck" in str(error)
    assert "old trouble" not in str(error)


SERVES = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_process_that_no_longer_answers_is_killed_and_started_again(reaper: Reaper, tmp_path: Path) -> None:
    port, said = free_port(), list[str]()
    spec = ProcessSpec("web", (sys.executable, "-c", SERVES, str(port)), dict(os.environ), tmp_path / "log")

    async def answers() -> bool:
        with contextlib.suppress(VolleyError):
            async with HttpClient(f"http://127.0.0.1:{port}", timeout_s=1.0) as client:
                return await client.get("/health", attempts=1) == {}
        return False

    patience = RestartPolicy(probe_s=0.3, hung_s=1.5, pause_s=0.01)
    async with keep_running([SupervisedProcess(spec, answers, 20.0)], reaper, said.append, patience) as (kept,):
        first = pid_of(kept)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: pid_of(kept) != first)
        async with asyncio.timeout(60):
            while not await answers():
                await asyncio.sleep(0.05)
        assert not is_alive(first)
    end = "web ended with signal 9 (SIGKILL) after 1.5 s without an answer"
    assert said == ["web has not answered for 1.5 s; killing it", f"{end}; restarting it in 0.01 s"]
    assert [str(one) for one in kept.ends] == [end]


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(
    member: Callable[..., SupervisedProcess], reaper: Reaper, tmp_path: Path
) -> None:
    program = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'grandchild')!r}).write_text(str(child.pid))\n"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    async with keep_running([member(program, stop_s=0.3)], reaper, print) as (kept,):
        pids = [pid_of(kept), int((tmp_path / "grandchild").read_text(encoding="utf-8"))]
        assert all(map(is_alive, pids))
    await until(lambda: not any(map(is_alive, pids)))


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, pathlib, sys\n"
        "from volley.local.processes import Child, ProcessSpec, Reaper\n"
        "async def main():\n"
        "    with Reaper.running() as reaper:\n"
        "        spec = ProcessSpec('child', ('sleep', '60'), dict(os.environ), pathlib.Path(sys.argv[1] + '.log'))\n"
        "        child = await Child.start(spec, reaper)\n"
        "        pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "        await child.wait()\n"
        "asyncio.run(main())\n"
    )
    told = tmp_path / "pid"
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(told))
    await until(lambda: told.exists() and told.read_text(encoding="utf-8") != "")
    supervisor.kill()
    await supervisor.wait()
    pid = int(told.read_text(encoding="utf-8"))
    await until(lambda: not is_alive(pid))


def test_the_reaper_ends_after_the_processes_that_it_kills() -> None:
    """It holds the lock of a run. A process that nobody has waited for stands for one that takes time to end."""
    stubborn = ("/bin/sh", "-c", "trap '' TERM; echo; while :; do sleep 0.05; done")
    program = "from volley import reaper; reaper.GRACE_S, reaper.KILLED_S = 0.1, 60.0; reaper.main()"
    with (
        subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE) as child,
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=PROJECT) as reaper,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        assert reaper.stdin is not None
        reaper.stdin.write(f"+{child.pid}\n".encode())
        reaper.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(0.5)
        assert child.wait(60) == -signal.SIGKILL
        assert reaper.wait(60) == 0


def test_the_last_error_of_a_log_is_found_among_its_events(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        '{"level":"error","event":"worker'
        ' failed","error":"Fenced","detail":"gone"}\n{"level":"info","event":"stopped"}\n',
        encoding="utf-8",
    )
    assert last_error(log) == "worker failed: Fenced: gone"
    log.write_text(
        '{"level":"error","event":"worker failed","service":"trainer","error":"ConfigError","detail":"no such loss"}\n',
        encoding="utf-8",
    )
    assert last_error(log) == "trainer: no such loss"
    log.write_text(
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'jax'\n", encoding="utf-8"
    )
    assert last_error(log) == "ModuleNotFoundError: No module named 'jax'"
    assert last_error(tmp_path / "missing") == ""
