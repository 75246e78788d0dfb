"""The end of the service, of one that no other test uses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from shared.process.events import CANNOT_START, parse
from tests.rollout.server import running_server, wait_until
from tests.support import models


def test_sigterm_returns_partial_answers_and_leaves_nothing(tmp_path: Path, prompts: list[list[int]]) -> None:
    """A paused engine would never finish: its requests come back with what they have, within the grace.

    Supervisors signal whole groups: the engine must leave SIGTERM to the service.
    """
    with running_server(tmp_path, models.tiny_config()) as server:
        engine = server.get("/get_server_info")["pid"]
        running = server.start(prompts[0], 200)
        wait_until(lambda: server.status()["running"] == 1)
        server.post("/pause_generation", {})
        os.kill(engine, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.process.wait(30) == 0
        wait_until(lambda: not _lives(engine), 10)


def test_a_model_that_is_not_computed_is_one_line_and_a_code(tmp_path: Path) -> None:
    model = models.write_hf(tmp_path / "model", models.tiny_config(architectures=["NoSuchModel"]))
    command = [sys.executable, "-m", "services.rollout", "--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {model}}}\ndata: {{env: none}}\nservices: {{rollout: {{port: 0}}}}\n", encoding="utf-8"
    )
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=200, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if parse(line).get("event") == CANNOT_START]
    assert len(lines) == 1
    assert "NoSuchModel" in lines[0]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
