"""However a run ends early, nothing it started is left: Ctrl-C, a killed supervisor, inputs that turn out wrong."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.support.stack import training

pytestmark = pytest.mark.timeout(400)


def test_ctrl_c_stops_everything_and_the_run_can_go_on(tmp_path: Path) -> None:
    with training(tmp_path, "trainer.max_steps=2") as first:
        first.wait_for(r"^all services answer")
        first.process.send_signal(signal.SIGINT)
        assert first.wait(90) == 130
        assert first.leftovers() == []
        assert "continues run" in first.text()
    with training(tmp_path, "trainer.max_steps=2") as second:
        assert second.wait() == 0, second.text()


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        run.wait_for(r"^all services answer")
        run.process.kill()
        assert run.leftovers(30) == []


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
    expect_refusal(tmp_path, "data.train=/missing.jsonl", 2, "data.train=/missing.jsonl", "data.env=gsm8k", "data.env_config={}")


def expect_refusal(folder: Path, override: str, code: int, named: str, *more: str) -> None:
    """One line that names the thing, the exit code, and nothing left."""
    with training(folder, override, *more) as run:
        assert run.wait(120) == code, run.text()
        errors = run.errors.read_text()
        assert errors.count("\n") == 1, errors
        assert errors.startswith("volley: ")
        assert named in errors
        assert run.leftovers() == []
