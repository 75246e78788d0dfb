"""Ten minutes of soak of the real stack: everything is measured, and nothing but memory may seem to grow: whether that
grows is judged over half an hour (`make soak`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from volley.layout import PROJECT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_ten_minutes_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.soak", "--minutes", "10", "--json", f"run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", timeout=1150, check=False)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    result = orjson.loads(done.stdout)
    assert [problem for problem in result["problems"] if "memory grows" not in problem] == []
    assert result["ok"] == (result["problems"] == [])
    assert result["steps_measured"] > 0
    assert result["services"].keys() == {"redis", "env", "trainer", "rollout-0", "orchestrator", "supervisor"}
    assert all(service["mb_max"] > 1 and service["fds_max"] > 5 for service in result["services"].values())
    assert 0 < result["redis"]["entries_max"] <= result["redis"]["entries_bound"] == 12
    assert orjson.loads((tmp_path / "soak" / "soak.json").read_bytes()) == result
