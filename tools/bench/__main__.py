"""`make bench`: run benchmarks in sequence, each in its own virtual environment, and print a table.

    make bench ARGS="recovery sandbox"

Each ratio compares two figures of the same run on the same machine, so it is comparable between machines.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shared.errors import ConfigError, VolleyError
from volley.layout import PROJECT, python_of, variables_of
from volley.printing import complain, print_block
from volley.program import run_program
from volley.runs.run_file import write_json


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module that prints its results as one JSON object in its last line, and its virtual environment."""

    module: str
    environment: str
    about: str
    timeout_s: float = 900.0


BENCHMARKS = {
    "queue": Benchmark("tools.bench.queue", "base", "the ticket queue against a raw Redis client"),
    "rollout": Benchmark(
        "tools.bench.rollout", "rollout", "tokens/s through HTTP against the engine called in process (aim ≥ 0.95)"
    ),
    "engine": Benchmark(
        "tools.bench.engine", "rollout", "tokens/s of 1, 8, 32 and 64 requests against sglang-jax's own engine", 1800.0
    ),
    "trainer": Benchmark(
        "tools.bench.trainer",
        "trainer",
        "a trainer step against the bare jitted step (aim ≤ 1.10), and packed against one sequence per row",
    ),
    "recovery": Benchmark(
        "tools.bench.recovery", "trainer", "restoring a trainer and replaying its log, by steps since the checkpoint"
    ),
    "sandbox": Benchmark(
        "tools.bench.sandbox", "base", "from the fork to a sandbox's first answer, against a bare Python (aim ≤ 20 ms)"
    ),
    "environments": Benchmark(
        "tools.bench.environments",
        "base",
        "2,000 sessions of the env service against OpenEnv's own server (aim 4x)",
        1800.0,
    ),
    "handover": Benchmark(
        "tools.bench.handover", "base", "weights from the optimizer step to the last server serving them"
    ),
    "generation": Benchmark(
        "tools.bench.generation", "base", "asynchronous against turn-synchronous generation, simulated (aim ≤ 0.36)"
    ),
    "sessions": Benchmark("tools.bench.sessions", "base", "2,048 agents' sessions on one recorder (aim: lag ≤ 50 ms)"),
    "page": Benchmark("tools.bench.page", "base", "first picture of a run of 10,000 steps in Chromium (aim ≤ 300 ms)"),
    "publishing": Benchmark(
        "tools.bench.publishing",
        "base",
        "publishing full and delta weights to one and two servers, against a write and read (aim ≤ 2)",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. Exit code 1 if a benchmark failed."""
    run_program(lambda: _run(_parser().parse_intermixed_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all): {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for an unknown name."""
    names: list[str] = arguments.names
    unknown = sorted(set(names) - BENCHMARKS.keys())
    if unknown:
        raise ConfigError(f"no benchmark {', '.join(unknown)}", f"choose from {', '.join(BENCHMARKS)}")
    results: dict[str, dict[str, Any]] = {}
    failed = []
    for name in names or BENCHMARKS:
        complain(f"{name}: {BENCHMARKS[name].about} …")
        try:
            results |= measured(BENCHMARKS[name])
        except VolleyError as error:
            failed.append(name)
            complain(f"{name} failed: {error}")
    print_block(table(results))
    if arguments.json is not None:
        write_json(arguments.json, results)
    return 1 if failed else 0


def measured(benchmark: Benchmark) -> dict[str, dict[str, Any]]:
    """Run a benchmark: {name: {value, unit, reference, ratio}}. Raises VolleyError with the program's last line."""
    variables = variables_of(benchmark.environment, cpu=True)
    command = [str(python_of(benchmark.environment)), "-m", benchmark.module]
    try:
        done = subprocess.run(
            command,
            cwd=PROJECT,
            env=variables,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=benchmark.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VolleyError(f"{benchmark.module} took longer than {benchmark.timeout_s:g} s") from None
    if done.returncode != 0:
        raise VolleyError(f"exit code {done.returncode}: {_last_line(done.stderr or done.stdout)}")
    try:
        return orjson.loads(_last_line(done.stdout))
    except orjson.JSONDecodeError:
        raise VolleyError(f"the last line of {benchmark.module} is not JSON: {_last_line(done.stdout)!r}") from None


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("benchmark", "value", "reference", "unit", "ratio")]
    for name, result in results.items():
        rows.append(
            (name, _figure(result["value"]), _figure(result["reference"]), result["unit"], _figure(result["ratio"]))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main()
