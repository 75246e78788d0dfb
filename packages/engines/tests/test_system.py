"""Runs from start to end on servers of SGLang's or vLLM's protocol with a numpy model; one is restarted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.process.ports import free_port
from tests.support.net import wait_http
from tests.support.stack import random_model, training
from volley.layout import PROJECT, python_of
from volley.reporting import jsonl
from volley_proof.verify.command import format_result, verify

N_STEPS = 3

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@contextlib.contextmanager
def server(kind: str, port: int, folder: Path) -> Iterator[None]:
    command = [str(python_of("rollout")), "-m", "tests.support.foreign_servers", kind, str(port), str(folder)]
    with subprocess.Popen(command, cwd=PROJECT) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/health")
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_run_is_proven_with_weights_as_reported_by_the_server(tmp_path: Path, kind: str) -> None:
    folder, port = random_model(tmp_path / "model"), free_port()
    engine = [f"rollout.engine.kind={kind}", f"rollout.engine.url=http://127.0.0.1:{port}"]
    with (
        server(kind, port, folder),
        training(tmp_path / "run", f"trainer.max_steps={N_STEPS}", *engine) as run,
    ):
        assert run.process.wait(800) == 0, run.text()
        result = verify(run.folder)
    assert result["violations"] == []
    assert result["reported"] == [f"weights as reported by the server: engine {kind} has no audit"]
    assert format_result(result).endswith("each trained exactly once, with weights as reported by the server")
    largest = [row["logprob_abs_diff_current_max"] for row in jsonl.read(run.folder.metrics)]
    assert 0 < max(value for value in largest if value is not None) <= 1e-4


def test_a_run_goes_on_after_its_server_was_restarted(tmp_path: Path) -> None:
    folder, port = random_model(tmp_path / "model"), free_port()
    engine = ["rollout.engine.kind=sglang", f"rollout.engine.url=http://127.0.0.1:{port}"]
    with training(tmp_path / "run", f"trainer.max_steps={N_STEPS}", *engine) as run:
        with server("sglang", port, folder):
            run.wait_for(r"step +1/", 400)
        with server("sglang", port, folder):
            assert run.process.wait(800) == 0, run.text()
    assert verify(run.folder)["violations"] == []
