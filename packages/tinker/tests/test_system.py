"""`volley tinker` with the real `tinker` SDK: training, sampling, and a trainer killed before every optimizer step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.process.ports import free_port
from tests.support.foreign import environment
from tests.support.net import wait_http
from tests.support.stack import random_model
from volley.layout import PROJECT
from volley_tinker import futures

KEY = "tml-a-key-of-the-test"
CLIENT = Path(__file__).with_name("tinker_client.py")
START_S, STEPS = 300, 3

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]


@contextlib.contextmanager
def server(base: Path, folder: Path, port: int) -> Iterator[int]:
    """Yield the id of the process of `volley tinker`."""
    command = [sys.executable, "-m", "volley", "tinker", base, "--folder", folder, "--port", port, "--api-key", KEY]
    with subprocess.Popen([*map(str, command), "--context-length", "64"], cwd=PROJECT) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready", START_S)
            yield process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def trainer_of(pid: int) -> int:
    """Return the id of the trainer that `volley tinker` started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    named = {int(one): Path(f"/proc/{one}/cmdline").read_bytes() for one in children}
    return next(one for one, line in named.items() if b"volley_tinker.server" in line)


def played(python: Path, base: Path, port: int, pid: int, *, kills: bool) -> dict[str, Any]:
    variables = {"TINKER_BASE_URL": f"http://127.0.0.1:{port}", "TINKER_API_KEY": KEY}
    command = [str(python), str(CLIENT), base.name, str(STEPS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8", "bufsize": 1}
    with subprocess.Popen(command, env={**os.environ, **variables}, **pipes) as client:
        assert client.stdout is not None
        assert client.stdin is not None
        for step in range(STEPS):
            assert client.stdout.readline() == f"pass {step}\n"
            if kills:
                os.kill(trainer_of(pid), signal.SIGKILL)
            client.stdin.write("on\n")
        found = json.loads(client.stdout.readline())
        assert client.wait(60) == 0
    return found


def weights(folder: Path, name: str) -> list[str]:
    """Return the checksums of a model's weights after each optimizer step."""
    with contextlib.closing(futures.connect(folder / futures.DATABASE, read_only=True)) as connection:
        rows = connection.execute("SELECT weights FROM ledger WHERE owner = ? AND weights != '' ORDER BY seq", (name,))
        return [one for (one,) in rows]


def test_the_sdk_trains_and_samples_and_killed_trainers_change_no_bit(tmp_path: Path):
    python, base, port = environment("tinker", ["tinker==0.38.0"]), random_model(tmp_path / "tiny"), free_port()
    folder = tmp_path / "server"
    with server(base, folder, port) as pid:
        plain, killed = (played(python, base, port, pid, kills=kills) for kills in (False, True))
    assert weights(folder, plain["model"]) == weights(folder, killed["model"])
    assert len(set(weights(folder, plain["model"]))) == STEPS
    assert plain["losses"] == killed["losses"]
    assert plain["losses"] == sorted(plain["losses"], reverse=True)
    assert [*futures.problems(folder)] == []
    for found in (plain, killed):
        np.testing.assert_allclose(found["scored"], found["trained"], atol=1e-4)
        assert found["reloaded"] == found["trained"]
        assert np.abs(np.array(found["base"]) - found["scored"]).max() > 0.01
        assert found["samples"][0] == found["samples"][1]
        assert len(found["sampled_logprobs"]) == 4
        assert sorted(one.rpartition("/")[2].partition("-")[0] for one in found["checkpoints"]) == ["ephemeral", "kept"]
        assert "gspo" in found["refused"]
    command = [sys.executable, "-m", "volley", "verify", str(folder)]
    assert subprocess.run(command, cwd=PROJECT, check=False).returncode == 0
