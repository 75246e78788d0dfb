"""The command as a user calls it: each mistake is one line that names the thing, and an exit code."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import ports, runs
from services.cli.layout import PROJECT
from shared.config import load
from shared.errors import ConfigError
from shared.schema import Services

CONFIG = "configs/quickstart.yaml"


def volley(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--config", "missing.yaml"], "missing.yaml"),
        (["train", "--config", CONFIG, "trainer.max_stepz=3"], "unknown key trainer.max_stepz"),
        (["train", "--config", CONFIG, "trainer.max_steps=many"], "trainer.max_steps='many'"),
        (["train", "--config", CONFIG, "trainer.max_steps"], "key.path=value"),
        (["train", "--config", CONFIG, "data.train=/missing/train.jsonl"], "data.train=/missing/train.jsonl"),
        (["train", "--config", CONFIG, "model.path=./missing"], "model.path missing"),
        (["train"], "neither a run's folder nor --config"),
        (["up", "trainer.max_steps=3"], "neither a run's folder nor --config"),
        (["up", "/missing"], "/missing: no such folder"),
        (["up", "configs"], "its run.json is missing"),
        (["up", "--config", CONFIG, "configs"], "key.path=value"),
        (["soak", "--minutes", "0"], "too short"),
        (["report", "/missing"], "/missing"),
        (["status", "/missing"], "/missing"),
        (["verify", "/missing"], "/missing"),
        (["replay", "/missing", "--from-step", "1"], "/missing"),
        (["bench", "warp"], "no benchmark warp"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], named: str) -> None:
    done = volley(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("volley: ")
    assert named in done.stderr.replace(f"{PROJECT}/", "")


def test_help_lists_the_commands() -> None:
    done = volley("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "up", "quickstart", "report", "status", "verify", "replay", "soak"))


def test_going_on_with_a_finished_run_shows_its_report(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"run: {{name: r, dir: {tmp_path}}}\nmodel: {{path: configs/models/tiny}}\ndata: {{env: e}}\n")
    with runs.claimed(load([config])) as (folder, record, _):
        runs.write_record(folder, dataclasses.replace(record, finished=True))
        folder.metrics.write_text('{"step": 1, "time": 5.0, "version": "e000001-s000001"}\n')
    done = volley("up", str(folder.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("run r is finished\n")
    assert "e000001-s000001" in done.stdout
    refused = volley("up", str(folder.path), "trainer.groups_per_step=11")
    assert refused.returncode == 2
    assert "groups_per_step (was 8, now 11) may not change" in refused.stderr


def test_status_of_a_service_that_is_not_there(tmp_path: Path) -> None:
    done = volley("status", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "not ready" in done.stdout


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        services = Services.model_validate({"env": {"port": port}})
        with pytest.raises(ConfigError, match=rf"services\.env\.port={port}"):
            ports.choose(services, {"env": {"port": port}}, {"env": 1})


def test_free_ports_are_distinct_and_named_ones_are_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    services = Services.model_validate({"trainer": {"port": free}})
    chosen = ports.choose(services, {"trainer": {"port": free}}, {"env": 1, "rollout": 3, "orchestrator": 1, "trainer": 1})
    numbers = [port for found in chosen.values() for port in found]
    assert chosen["trainer"] == [free]
    assert len(chosen["rollout"]) == 3
    assert len(set(numbers)) == len(numbers) == 6
    assert ports.urls(services, chosen)["rollout-2"] == f"http://127.0.0.1:{chosen['rollout'][2]}"
