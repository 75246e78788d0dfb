"""A short soak of the real stack: too short to judge growth, long enough to see that everything is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from services.cli.layout import PROJECT

pytestmark = pytest.mark.timeout(600)


def test_a_minute_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "soak", "--minutes", "1", "--json", f"run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = orjson.loads(done.stdout)
    assert result["ok"] == (done.returncode == 0)
    assert result["steps_measured"] > 0
    assert result["services"].keys() == {"redis", "env", "trainer", "rollout-0", "orchestrator", "supervisor"}
    assert all(service["mb_max"] > 1 and service["fds_max"] > 5 for service in result["services"].values())
    assert 0 < result["redis"]["entries_max"] <= result["redis"]["entries_bound"] == 12
    assert not any("restarted" in problem for problem in result["problems"])
    assert orjson.loads((tmp_path / "soak" / "soak.json").read_bytes()) == result
