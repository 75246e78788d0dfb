"""However a run ends early, nothing it started is left: Ctrl-C, a killed supervisor, inputs that turn out wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest

from shared.run import archive
from shared.types import Group
from tests.support.stack import continued, training
from volley.reporting import jsonl
from volley_proof.verify.command import verify

pytestmark = pytest.mark.timeout(400)
simulated_and_real = pytest.mark.parametrize("simulated", [True, pytest.param(False, marks=pytest.mark.long)])


@simulated_and_real
def test_ctrl_c_stops_everything_and_says_how_to_go_on(tmp_path: Path, simulated: bool) -> None:
    with training(tmp_path, simulated=simulated) as run:
        run.wait_for(r"^all services answer")
        run.process.send_signal(signal.SIGINT)
        assert run.wait(90) == 130
        assert run.leftovers() == []
        assert "continues run" in run.text()


@pytest.mark.long
def test_sigterm_between_steps_with_open_connections_and_the_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    with training(tmp_path, "trainer.max_steps=3") as first, contextlib.ExitStack() as links:
        first.wait_for(r"^step +1/3", 300)
        for url in orjson.loads(first.folder.processes.read_bytes())["urls"].values():
            address = urlsplit(url)
            link = links.enter_context(socket.create_connection((address.hostname, address.port)))
            link.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(120) == 143
        assert first.leftovers() == []
    with continued(tmp_path) as second:
        assert second.wait(400) == 0, second.text()
        assert "DONE: steps=3" in second.text()
    for log, wanted in (("sft", [1, 2]), ("metrics", [1, 2, 3]), ("evals", [0, 3])):
        assert [row["step"] for row in jsonl.read(first.folder.path / f"{log}.jsonl")] == wanted
    assert first.folder.plot.stat().st_size > 0
    result = verify(first.folder)
    assert result["ok"], result["violations"]


@simulated_and_real
def test_nothing_outlives_a_killed_supervisor_and_the_next_one_waits_for_that(tmp_path: Path, simulated: bool) -> None:
    with training(tmp_path, simulated=simulated) as run:
        run.wait_for(r"^all services answer")
        left = [run.service(name) for name in ("redis", "env", "trainer", "rollout", "orchestrator")]
        run.process.kill()
        run.process.wait()
        with continued(tmp_path, simulated=simulated) as second:
            second.wait_for(r"^run system in .*: starting services")
            assert not any(map(exists, left))
            second.wait_for(r"^all services answer")
        assert run.leftovers(30) == []


def test_a_run_that_was_stopped_before_its_first_step_is_started_again_with_other_settings(tmp_path: Path) -> None:
    settings = ["trainer.max_steps=2", "trainer.groups_per_step=8"]
    with training(tmp_path, "trainer.groups_per_step=1000", simulated=True) as first:  # no step is ever trained
        first.wait_for(r"^held-out after step 0")
        first.wait_for(r"^all services answer")
        first.process.send_signal(signal.SIGINT)
        assert first.wait(90) == 130
    assert [row["step"] for row in jsonl.read(first.folder.evals)] == [0, 0]  # of two environments
    assert jsonl.read(first.folder.metrics) == []
    with training(tmp_path, *settings, "grpo_config.num_generations=4", simulated=True) as second:
        assert second.wait(120) == 0, second.text()
        assert "has trained nothing yet: its configuration is replaced (grpo_config.num_generations: 2" in second.text()
    assert [row["step"] for row in jsonl.read(first.folder.evals)] == [0, 0, 2, 2]
    result = verify(first.folder)
    assert result["ok"], result["violations"]
    root = first.folder.archive
    payloads = [one for version in archive.versions(root) for one in archive.read(root, "system", version)]
    assert [len(Group.decode(one).trajectories) for one in payloads] == [4] * 16


def test_two_servers_never_write_one_queue_even_if_nobody_is_left_to_end_the_first(tmp_path: Path) -> None:
    with training(tmp_path, simulated=True) as run:
        run.wait_for(r"^all services answer")
        orphan = run.service("redis")
        os.kill(run.service("reaper"), signal.SIGKILL)
        run.process.kill()
        run.process.wait()
        with continued(tmp_path, simulated=True) as second:
            assert second.wait(120) == 1, second.text()
            assert f"another server is using {run.folder.redis}" in second.text()
        assert exists(orphan)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect_refusal(tmp_path, f"services.trainer.port={port}", 2, f"services.trainer.port={port}")


def test_an_unreachable_redis(tmp_path: Path) -> None:
    expect_refusal(tmp_path, "services.redis_url=redis://127.0.0.1:1", 1, "services.redis_url")


def test_an_unknown_environment(tmp_path: Path) -> None:
    expect_refusal(tmp_path, "data.env=chess", 2, "chess", "data.env_config={}")


def test_a_setting_that_only_the_environment_knows_to_be_wrong(tmp_path: Path) -> None:
    expect_refusal(tmp_path, "data.env_config.talk=loud", 2, "talk")


def test_a_missing_data_file(tmp_path: Path) -> None:
    expect_refusal(
        tmp_path, "data.train=/missing.jsonl", 2, "data.train=/missing.jsonl", "data.env=gsm8k", "data.env_config={}"
    )


def expect_refusal(folder: Path, override: str, code: int, named: str, *more: str) -> None:
    """One line that names the thing, the exit code, and nothing left."""
    with training(folder, override, *more) as run:
        assert run.wait(120) == code, run.text()
        errors = run.errors.read_text(encoding="utf-8")
        assert errors.count("\n") <= 2, errors  # the error and its hint
        assert errors.startswith("volley: ")
        assert named in errors
        assert run.leftovers() == []
