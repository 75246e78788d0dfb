"""The benchmark of starts: whose CPU time it counts, and what it makes of several starts."""

import os
import signal
import subprocess
import sys

from shared.process.ports import free_port
from shared.run.folder import RunFolder
from tools.bench import startup
from tools.bench.startup import StartCost

BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
SERVICE = f"""
import subprocess, sys
{BURN}
subprocess.run([sys.executable, "-c", {BURN!r}])
told = "print('burnt', flush=True)\\ninput()"
subprocess.Popen([sys.executable, "-c", {BURN!r} + told], stdin=subprocess.PIPE).wait()
"""


def test_the_cost_is_of_the_process_and_of_all_it_started(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with (folder.logs / "env.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        assert startup.leaders(folder) == {"env": process.pid}
        cost = startup.cost_so_far(process.pid)
        assert cost.cpu_s >= 0.55, "its own, an ended child's and a running child's, by the clock's ticks"
        assert cost.wall_s >= 0.5
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_medians_stand_beside_those_of_the_reference():
    starts = [{"env": StartCost(cpu_s, 10 * cpu_s)} for cpu_s in (3.0, 1.0, 2.0)]
    results = startup.summarize(starts, {"env": StartCost(4.0, 40.0)})
    assert (results["startup_env_cpu"].value, results["startup_env_cpu"].ratio) == (2.0, 0.5)
    assert (results["startup_env_wall"].value, results["startup_env_wall"].unit) == (20.0, "s")


def test_a_service_that_does_not_answer_is_not_ready():
    assert not startup.is_ready(f"http://127.0.0.1:{free_port()}")
