"""The dashboard in headless Chromium: pages, states, keyboard, accessibility, hostile text and large archives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from shared.files.locks import try_lock
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


def browse(scenario: str, root: Path, folder: Path) -> dict[str, Any]:
    """Return what the browser saw; it must not have complained."""
    python = environment("browser", ["playwright", "axe-playwright-python"])
    server = subprocess.Popen(
        [sys.executable, "-m", "volley", "dashboard", str(root)], stdout=subprocess.PIPE, cwd=folder
    )
    try:
        assert server.stdout is not None
        link = server.stdout.readline().split()[-1].decode()
        command = [str(python), str(BROWSE), scenario, str(CHROMIUM), link, str(folder), str(root)]
        done = subprocess.run(command, capture_output=True, timeout=500)
        assert done.returncode == 0, done.stderr.decode()
    finally:
        server.terminate()
        server.wait(20)
    seen: dict[str, Any] = orjson.loads(done.stdout.splitlines()[-1])
    assert (seen["console"], seen["foreign_requests"], seen["overflow"]) == ([], [], [])
    assert seen["violations"] == [], "\n".join(map(str, seen["violations"]))
    return seen


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_large_archives_and_hostile_text_in_a_browser(root: Path, tmp_path: Path) -> None:
    seen = browse("large", root, tmp_path)
    assert seen["total"] >= MANY
    assert seen["title"] == "r · ticket 90001 · Volley"
    assert seen["raw"] is False
    assert seen["drawn_at_first"] < LONG / 10 < LONG == seen["last_position"] - 2
    assert seen["chosen_by_keys"] == [3, 4]


@pytest.fixture
def in_each_state(tmp_path: Path) -> Iterator[Path]:
    """A finished, a failed and a stopped run, and one on which this process works."""
    root = tmp_path / "runs"
    make(root / "r").rename(root / "finished")
    record = orjson.loads((root / "finished/run.json").read_bytes())
    for name, changes in {"failed": {"failed": "the trainer has no memory"}, "stopped": {}, "live": {}}.items():
        shutil.copytree(root / "finished", root / name)
        (root / name / "run.json").write_bytes(orjson.dumps({**record, "finished": False, **changes}))
        (root / name / "logs/trainer.log").write_text("a line\n" * 99, encoding="utf-8")
    with (root / "live/.lock").open("wb") as lock:
        assert try_lock(lock.fileno())
        yield root


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_pages_of_runs_in_each_state_on_a_screen_and_a_phone(in_each_state: Path, tmp_path: Path) -> None:
    seen = browse("states", in_each_state, tmp_path)
    words = {"finished": "finished", "failed": "failed", "stopped": "stopped", "live": "starting"}
    assert seen["states"] == {
        f"{name} {width}": [f"{name} · {word} · Volley", word, word, word]
        for name, word in words.items()
        for width in (390, 1440)
    }
    before, after = seen["place"]
    assert after == before
    assert (before[0], before[1][:13], bool(before[2]), before[3] > 0) == (["settings"], "Configuration", True, True)
    assert seen["at_the_end"] == ["live · finished · Volley", "finished", "finished"]
