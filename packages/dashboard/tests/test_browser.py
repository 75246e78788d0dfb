"""The dashboard in headless Chromium: pages, keyboard, accessibility, hostile text and large archives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from shared.run.archive import Archive
from shared.types import Group, Trajectory, Turn, VersionSpan, WeightVersion
from tests.support.foreign import environment
from tests.support.small_run import make
from volley.layout import PROJECT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LONG, MANY = 100_000, 10_000
BROWSE = PROJECT / "tests" / "support" / "browse.py"


def episode(ticket: int, sample: int, n: int, text: bool = False) -> Trajectory:
    """An episode of n tokens after three of the prompt, in one turn."""
    version = str(WeightVersion(1, 0))
    mask = np.r_[np.zeros(3, np.uint8), np.ones(n, np.uint8)]
    logprobs = np.where(mask, -0.5, 0).astype(np.float32)
    ids = (np.arange(n + 3) % 90).astype(np.int32)
    turns = (Turn(0, 3, "prompt"), Turn(3, n + 3, "assistant"))
    name = "<img src=x onerror=\"document.title='broken'\">\u202e\x1b" if text else f"train/{ticket}"
    spans = (VersionSpan(version, 3, n + 3),)
    return Trajectory(ticket, sample, 0, "toy", name, 3, ids, mask, logprobs, spans, turns, 1.0, True, "completed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with two further archived steps: one long episode, and many small ones."""
    folder = tmp_path / "runs" / "r"
    make(folder)
    archive = Archive(folder / "archive", "r")
    archive.claim(9)
    long = Group(90_001, "toy", "train/long", (episode(90_001, 0, LONG), episode(90_001, 1, 5, text=True)))
    archive.write(WeightVersion(9, 6), [long.encode()])
    for step in range(10):
        tickets = range(10_000 + 100 * step, 10_100 + 100 * step)
        groups = [
            Group(t, "toy", f"train/{t}", tuple(episode(t, i, 4) for i in range(MANY // 1000))).encode()
            for t in tickets
        ]
        archive.write(WeightVersion(9, 7 + step), groups)
    return tmp_path / "runs"


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_pages_work_in_a_browser(root: Path, tmp_path: Path) -> None:
    python = environment("browser", ["playwright", "axe-playwright-python"])
    server = subprocess.Popen(
        [sys.executable, "-m", "volley", "dashboard", str(root)], stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        assert server.stdout is not None
        link = server.stdout.readline().split()[-1].decode()
        command = [str(python), str(BROWSE), str(CHROMIUM), link, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, timeout=250)
        assert done.returncode == 0, done.stderr.decode()
    finally:
        server.terminate()
        server.wait(20)
    seen = orjson.loads(done.stdout.splitlines()[-1])
    assert seen["console"] == []
    assert seen["violations"] == [], "\n".join(map(str, seen["violations"]))
    assert seen["total"] >= MANY
    assert seen["title"] == "r · ticket 90001 · Volley"
    assert seen["raw"] is False
    assert seen["drawn_at_first"] < LONG / 10 < LONG == seen["last_position"] - 2
    assert seen["chosen_by_keys"] == [3, 4]
    assert seen["foreign_requests"] == []
