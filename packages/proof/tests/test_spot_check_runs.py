"""A run with two real rollout servers, one of which lies about what it computes: that one is named, the other never."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from shared.process.ports import free_port
from tests.support.net import wait_http
from tests.support.stack import Training, training
from volley.layout import PROJECT, python_of, variables_of
from volley.reporting import jsonl
from volley_proof.verify.command import verify

SETTINGS = (
    "trainer.max_steps=400",
    "trainer.spot_checks=1",
    "data.n_eval_tasks=1",
    "sft.max_steps=1",
)

pytestmark = [pytest.mark.timeout(1500), pytest.mark.long]


@contextlib.contextmanager
def joined(run: Training, fault: str) -> Iterator[str]:
    """Another rollout server of the run, with a fault; yields its address."""
    port, folder = free_port(), run.folder
    command = [str(python_of("rollout")), "-m", "tests.support.wrong_rollout"]
    command += ["--config", str(folder.config), "--config", str(folder.services), f"services.rollout.port={port}"]
    variables = variables_of("rollout", cpu=True) | {"VOLLEY_TEST_FAULT": fault}
    log = (folder.logs / "wrong.log").open("wb")
    with log, subprocess.Popen(command, cwd=PROJECT, env=os.environ | variables, stderr=log) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/health", 300)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def checked(run: Training) -> list[tuple[int, dict]]:
    """Steps with the servers checked in them."""
    rows = jsonl.read(run.folder.metrics) if run.folder.metrics.exists() else []
    return [(row["step"], one) for row in rows for one in row["spot_checks"]]


def test_a_server_with_a_scaled_layer_is_named_within_a_few_steps(tmp_path):
    with training(tmp_path, *SETTINGS) as run:
        run.wait_for(r"^redis answers")
        with joined(run, "scaled") as wrong:
            deadline = time.monotonic() + 600
            while len([1 for _, one in checked(run) if "fault" in one]) < 3:
                assert time.monotonic() < deadline, run.text()
                assert run.process.poll() is None, run.text()
                time.sleep(0.5)
            run.process.send_signal(signal.SIGINT)
            run.wait(200)
    assert verify(run.folder)["ok"]
    used = [step for step, one in checked(run) if one["url"] == wrong]
    named = [step for step, one in checked(run) if "fault" in one]
    assert named[0] <= used[0] + 4
    assert {one["url"] for _, one in checked(run) if "fault" in one} == {wrong}
    others = [one["ratio"] for _, one in checked(run) if one["url"] != wrong]
    assert 0 < max(others) < 1
    log = (run.folder.logs / "trainer.log").read_text(encoding="utf-8")
    assert "server computes something else" in log
