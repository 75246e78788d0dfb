"""A run with two real rollout servers, one of which lies about what it computes: that one is named, the other never."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from shared.process.ports import free_port
from shared.run import archive
from shared.types import Group
from tests.support.net import wait_http
from tests.support.stack import Training, training
from volley.layout import PROJECT, python_of, variables_of
from volley.reporting import jsonl
from volley.verify.command import verify

N_STEPS = 10
SETTINGS = (
    f"trainer.max_steps={N_STEPS}",
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


def test_a_server_with_a_scaled_layer_is_named_within_a_few_steps(tmp_path):
    with training(tmp_path, *SETTINGS) as run:
        run.wait_for(r"^step +1/", 500)
        with joined(run, "scaled") as wrong:
            assert run.wait(700) == 0, run.text()
        rows = jsonl.read(run.folder.metrics)
        groups = [
            Group.decode(one)
            for version in archive.versions(run.folder.archive)
            for one in archive.read(run.folder.archive, run.folder.name, version)
        ]
    assert verify(run.folder)["ok"]
    by_server = [{span.server for t in group.trajectories for span in t.all_spans()} for group in groups]
    assert len(set().union(*by_server)) == 2
    checked = [(row["step"], one) for row in rows for one in row["spot_checks"]]
    used = [step for step, one in checked if one["url"] == wrong]
    named = [step for step, one in checked if "fault" in one]
    assert named, rows
    assert named[0] <= used[0] + 4
    assert named[-1] == used[-1]
    assert {one["url"] for _, one in checked if "fault" in one} == {wrong}
    assert max(one["ratio"] for _, one in checked if one["url"] != wrong) < 1
    text = "".join(path.read_text(encoding="utf-8") for path in run.folder.logs.glob("trainer*.log"))
    assert "server computes something else" in text
