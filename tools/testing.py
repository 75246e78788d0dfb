"""`make test` and `make test-long`: pytest in each virtual environment; the last line sums up all of them.

A suite is one pytest. As many run beside each other as keep two cores busy, since most of them wait for processes part
of the time; the longest begins first, so that all end at about the same time. Each is shown when it is over, and a
failure in one does not keep the others from running. Arguments go to pytest; `--part 0/2` of tests/conftest.py runs
half of the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from shared.process.utf8 import print_what_can_be_printed
from volley.layout import PROJECT, python_of, variables_of

LONG = "--long"
_NO_TESTS_COLLECTED = 5
_BESIDE = 5
_LONG_BESIDE = 2
"""Long suites start whole stacks, and compare throughput and memory."""
_FUZZ_CASES = "2000"
"""Generated requests to a service in the long tests; `make fuzz` sends 5,000."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One pytest: what of tests/, what else it is told, and in which environment it runs."""

    name: str
    paths: tuple[str, ...]
    environment: str = "base"
    options: tuple[str, ...] = ("-m", "not long")
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def suites(*, long: bool) -> tuple[Suite, ...]:
    """The longest first. Folders share a suite where one of them is too short for a pytest of its own."""
    return _long() if long else _short()


def _short() -> tuple[Suite, ...]:
    named = (
        Suite("trainer", ("trainer",), "trainer"),
        Suite("system", ("system",)),
        Suite("env", ("env",)),
        Suite("rollout", ("rollout", "shared/test_connection.py"), "rollout"),  # sglang-jax pins another uvicorn
        Suite("cli", ("cli", "docs")),
        Suite("shared", ("shared", "queue")),
        Suite("chaos", ("chaos",)),
        Suite("fuzz", ("fuzz",)),
    )
    return (*named, Suite("rest", _others(named)))


def _long() -> tuple[Suite, ...]:
    only = ("-m", "long")
    fuzz = Suite("fuzz", ("fuzz/test_services.py",), options=(), variables={"VOLLEY_FUZZ_CASES": _FUZZ_CASES})
    apart = (
        Suite("chaos", ("chaos",), options=only),
        Suite("rollout", ("rollout",), "rollout", only),
        Suite("trainer", ("trainer",), "trainer", only),
    )
    return (Suite("rest", _others(apart), options=only), *apart, fuzz)


def _others(named: Sequence[Suite]) -> tuple[str, ...]:
    """Folders of tests/ that have tests and are named nowhere, but for rollout's, which needs its own environment."""
    taken = {path for suite in named for path in suite.paths} | {"rollout"}
    found = {path.name for path in (PROJECT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    return tuple(sorted(found - taken))


def main(arguments: Sequence[str]) -> int:
    print_what_can_be_printed()
    started, wanted = time.monotonic(), suites(long=LONG in arguments)
    given = [argument for argument in arguments if argument != LONG]
    print(f"tests of {', '.join(suite.name for suite in wanted)}; each suite is shown when it is over", flush=True)
    results: dict[str, tuple[int, str]] = {}
    with ThreadPoolExecutor(_LONG_BESIDE if LONG in arguments else _BESIDE) as workers:
        running = {workers.submit(_pytest, suite, given): suite for suite in wanted}
        for done in as_completed(running):
            suite, (code, output) = running[done], done.result()
            print(f"\n### tests of {suite.name} in .venvs/{suite.environment}\n\n{output}", end="", flush=True)
            results[suite.name] = code, summary(output)
    print("\n" + "\n".join(f"{suite.name:<8} {results[suite.name][1]}" for suite in wanted))
    print(total([last for _, last in results.values()], time.monotonic() - started), flush=True)
    return max(0 if code == _NO_TESTS_COLLECTED else code for code, _ in results.values())


def _pytest(suite: Suite, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of one pytest."""
    paths = [f"tests/{path}" for path in suite.paths]
    command = [str(python_of(suite.environment)), "-m", "pytest", *suite.options, *paths, *arguments]
    environment = _variables(suite)
    ran = subprocess.run(
        command,
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return ran.returncode, ran.stdout


def _variables(suite: Suite) -> dict[str, str]:
    """What runs in `base` starts services of both other environments, and leaves JAX's variables to these."""
    jax = variables_of(suite.environment, cpu=True) if suite.environment != "base" else {}
    return {**jax, **os.environ, **suite.variables, "PYTHONUNBUFFERED": "1"}


def summary(output: str) -> str:
    """pytest's last line; what its threads and children say later comes after it."""
    lines = output.split("\n")
    return next((line for line in reversed(lines) if re.search(r" in \d+\.\d+s\b", line)), "no summary")


def total(summaries: Sequence[str], elapsed_s: float) -> str:
    """One line as pytest's last, of all of them."""
    counts = Counter[str]()
    for one in summaries:
        counts.update(_counts(one))
    sums = ", ".join(f"{n} {what}" for what, n in counts.items()) or "no tests ran"
    return f"===== {sums} in {elapsed_s:.2f}s ({int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}) ====="


def _counts(line: str) -> dict[str, int]:
    """Numbers of pytest's last line: passed, failed, skipped, …"""
    return {
        what: int(n)
        for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", line)
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
