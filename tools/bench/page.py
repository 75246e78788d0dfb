"""First picture of a run of 10,000 steps: from navigation to the first chart, with a fresh server each time.

Needs Chromium, and playwright, which uv installs for `browser.py`. The runs' folder is made here, without training.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from shared.config import load
from shared.errors import Unavailable
from shared.run.archive import Archive
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from tools.bench.result import BenchResult, emit
from volley.runs.record import claimed, mark_finished
from volley_python.installing.uv import find_uv

STEPS, TRIALS = 10_000, 5
_BROWSER = Path(__file__).with_name("browser.py")
_PLAYWRIGHT = "playwright==1.61.0"
_CURVES = (
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "staleness_mean",
    "clip_fraction",
    "effective_share",
    "step_s",
    "wait_s",
)
_OTHERS = 60
"""Further values of a line, as many as a real run has."""


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise Unavailable("Chromium is not installed", "install it, or leave out this benchmark")
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "runs" / "long")
        seen = [look(Path(folder) / "runs", chromium) for _ in range(TRIALS)]
    middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
    emit(
        {
            "page: first picture (aim ≤ 300 ms)": BenchResult(middle["picture_ms"], "ms"),
            "page: the same, fastest": BenchResult(min(one["picture_ms"] for one in seen), "ms"),
            "page: CPU of the server": BenchResult(middle["server_ms"], "ms"),
            "page: CPU of the browser's page": BenchResult(middle["task_ms"], "ms"),
            "page: of it, scripts": BenchResult(middle["script_ms"], "ms"),
            "page: requests": BenchResult(middle["requests"], "count"),
            "page: sent": BenchResult(middle["bytes"] / 1000, "kB"),
        }
    )


def make_run(path: Path) -> None:
    """Make the folder of a finished run of STEPS steps."""
    path.mkdir(parents=True)
    tree = {
        "run": {"name": path.name, "dir": str(path.parent)},
        "model": {"path": "tiny"},
        "data": {"env": "toy"},
        "trainer": {"max_steps": STEPS},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with claimed(load([path / "config.yaml"])) as claim:
        folder = RunFolder(path)
        folder.metrics.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines()))
        evaluations = (
            {"step": i, "success": i / STEPS, "n_tasks": 200, "reward_mean": 0.5} for i in range(0, STEPS, 100)
        )
        (path / "evals.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in evaluations))
        Archive(folder.archive, path.name).claim(1)
        log = CommitLog(folder.archive, path.name)
        log.fence(1)
        log.append(TrainerState(1, STEPS, STEPS, (), STEPS, 0, 0, "rl", ((1, 0),)), "0" * 64)
        mark_finished(claim.folder, claim.record)


def lines() -> Iterator[Mapping[str, Any]]:
    rng = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        values = {name: float(value) for name, value in zip(_CURVES, rng.random(len(_CURVES)), strict=True)}
        others = {f"other_{i}": float(value) for i, value in enumerate(rng.random(_OTHERS))}
        reward = step / STEPS + float(rng.normal()) / 10
        yield {"step": step, "version": f"e000001-s{step:06d}", "time": 1.8e9 + 3 * step, "tokens": 4096} | {
            "reward_mean": reward,
            **values,
            **others,
        }


def look(root: Path, chromium: str) -> dict[str, float]:
    """Start a server, open the run's page, and return the figures of `browser.py` and the server's CPU time."""
    server = subprocess.Popen([sys.executable, "-m", "volley", "dashboard", str(root)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        link = server.stdout.readline().split()[-1].decode()
        command = [
            str(find_uv()),
            "run",
            "--no-project",
            "--with",
            _PLAYWRIGHT,
            "python",
            str(_BROWSER),
            chromium,
            link,
        ]
        done = subprocess.run([*command, f"/proc/{server.pid}/stat"], capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise Unavailable(f"the browser failed: {done.stderr.decode().strip()[-500:]}")
        return orjson.loads(done.stdout)
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
