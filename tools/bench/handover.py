"""Time of a weight hand-over in a run of the quickstart's stack.

It spans from the end of the optimizer step until the last server serves the weights:

- `record`: the trainer makes its commit record and ledger durable.
- `commit_queue`: the trainer acknowledges the groups.
- `chunk`: the trainer makes the version that servers load (copy from the device, digests, deltas).
- `pull`, `stage`: a server loads it (verify, place on devices, checksum, probe) while it continues to decode.
- `pause`: a server does not decode.
- `total`: all of it, for the slowest server.

Reference of `chunk` is a plain write of the parameters with fsync, of `stage` a plain read, on the same disk.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import VolleyError
from shared.run.checkpoint_files import newest
from tools.bench.result import BenchResult, emit, seconds_per_call
from volley.layout import PROJECT
from volley.reporting import jsonl

N_STEPS, N_WARM = 8, 2
_OVERRIDES = (
    "run.name=bench",
    f"trainer.max_steps={N_STEPS}",
    "sft.max_steps=1",
    "sft.n_demonstrations=32",
    "data.n_eval_tasks=1",
    "trainer.groups_per_step=2",
    "grpo_config.num_generations=4",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        command = [
            sys.executable,
            "-m",
            "volley",
            "train",
            "--config",
            "configs/quickstart.yaml",
            f"run.dir={root}",
            *_OVERRIDES,
        ]
        done = subprocess.run(
            command, cwd=PROJECT, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode != 0:
            raise VolleyError(f"the run failed: {done.stderr.strip()}")
        rows = [
            row for row in jsonl.read(root / "bench" / "handovers.jsonl") if row["step"] > N_WARM and row["servers"]
        ]
        checkpoint = newest(root / "bench" / "checkpoints")
        assert checkpoint is not None
        write_s, read_s = _plain_write_s(checkpoint / "params", root / "plain"), _plain_read_s(checkpoint / "params")
    emit(summarize(rows, write_s, read_s))


def summarize(rows: Sequence[Mapping[str, Any]], write_s: float, read_s: float) -> dict[str, BenchResult]:
    """Medians over the steps of the slowest server, in milliseconds."""

    def median(seconds: Sequence[float]) -> float:
        return 1000 * statistics.median(seconds)

    def of_servers(*keys: str) -> float:
        return median(
            [max(sum(server["timings"].get(key, 0.0) for key in keys) for server in row["servers"]) for row in rows]
        )

    parts = ("record_s", "commit_s", "take_s", "chunk_s", "publish_s")
    total = median([sum(row[part] for part in parts) for row in rows])
    return {
        "handover_record": BenchResult(median([row["record_s"] for row in rows]), "ms"),
        "handover_chunk": BenchResult(median([row["take_s"] + row["chunk_s"] for row in rows]), "ms", 1000 * write_s),
        "handover_commit_queue": BenchResult(median([row["commit_s"] for row in rows]), "ms"),
        "handover_pull": BenchResult(of_servers("pull_s"), "ms"),
        "handover_stage": BenchResult(of_servers("read_s", "place_s", "checksum_s", "probe_s"), "ms", 1000 * read_s),
        "handover_pause": BenchResult(of_servers("pause_s"), "ms"),
        "handover_total": BenchResult(total, "ms", 1000 * (write_s + read_s)),
    }


def _plain_write_s(folder: Path, target: Path) -> float:
    """Seconds to write the same files, each with fsync."""
    target.mkdir()
    contents = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]

    def write() -> None:
        for i, data in enumerate(contents):
            with (target / str(i)).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    return seconds_per_call(write)


def _plain_read_s(folder: Path) -> float:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return seconds_per_call(lambda: [path.read_bytes() for path in paths])


if __name__ == "__main__":
    main()
