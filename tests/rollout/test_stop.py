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
    """A paused engine would never finish: its requests come back with what they have, within the grace. There are
    three times as many as run at once, so that some are left when it is paused.

    Supervisors signal whole groups: the engine must leave SIGTERM to the service.
    """
    with running_server(tmp_path, models.tiny_config(), "services.limits.grace_s=6") as server:
        engine = server.get("/get_server_info")["pid"]
        server.post("/pause_generation", {"mode": "in_place"})
        started = [server.start(prompt, 200) for prompt in prompts * 4]
        wait_until(lambda: server.status()["queued"] == len(started))
        server.post("/continue_generation", {})
        wait_until(lambda: server.status()["output_tokens"] > 0)
        server.post("/pause_generation", {"mode": "in_place"})
        left = server.status()["running"] + server.status()["queued"]
        os.kill(engine, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        answers = [one.result(60) for one in started]
        aborted = [one for one in answers if one["meta_info"]["finish_reason"]["type"] == "abort"]
        assert len(aborted) == left > 0
        assert any(len(one["output_ids"]) for one in aborted)
        assert server.process.wait(30) == 0
        wait_until(lambda: not _lives(engine))


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
