"""`make test` and `make test-long`: pytest in each virtual environment; the last line sums up all of them.

A failure in one suite does not keep the others from running. Arguments go to pytest. Faults wait more than they
compute, and the real engine and trainer compute more than they wait, so there are lanes of suites beside each other;
those of all but the first are shown when they are over.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.cli.layout import PROJECT, python_of, variables_of

LONG = "--long"
_NO_TESTS_COLLECTED = 5
_FUZZ_CASES = "2000"
"""Generated requests to a service in the long tests; `make fuzz` sends 5,000."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One pytest: folders beneath tests/, what else it is told, and in which environment it runs."""

    name: str
    folders: tuple[str, ...]
    environment: str = "base"
    options: tuple[str, ...] = ("-m", "not long")
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


_FAULTS = ("chaos", "system")
_STACK = ("cli", "docs")
_APART = {*_FAULTS, *_STACK, "rollout", "trainer"}
_LONG = ("-m", "long")


def lanes(*, long: bool) -> tuple[tuple[Suite, ...], ...]:
    """Suites, one after the other in each lane. A folder that is named nowhere else belongs to `base`."""
    folders = {path.name for path in (PROJECT / "tests").iterdir() if any(path.glob("test_*.py"))}
    rest = tuple(sorted(folders - _APART))
    if long:
        fuzz = Suite("fuzz", ("fuzz/test_services.py",), options=(), variables={"VOLLEY_FUZZ_CASES": _FUZZ_CASES})
        beside = Suite("long", (*rest, *_STACK, "system"), options=_LONG)
        trainer = Suite("trainer", ("trainer",), "trainer", options=_LONG)
        return (Suite("chaos", ("chaos",), options=_LONG), trainer, fuzz), (beside,)
    base, stack = Suite("base", rest), Suite("stack", _STACK)
    trainer, rollout = Suite("trainer", ("trainer",), "trainer"), Suite("rollout", ("rollout",), "rollout")
    return (base,), (trainer,), (rollout,), (Suite("faults", _FAULTS),), (stack,)


def main(arguments: Sequence[str]) -> int:
    started, counts = time.monotonic(), Counter[str]()
    first, *others = lanes(long=LONG in arguments)
    given = [argument for argument in arguments if argument != LONG]
    with ThreadPoolExecutor(len(others)) as beside:
        later = [beside.submit(_lane, lane, given, shown=False) for lane in others]
        results = _lane(first, given, shown=True)
        for lane in later:
            results |= lane.result()
    for _, last in results.values():
        counts.update(_counts(last))
    print("\n" + "\n".join(f"{suite:<8} {last}" for suite, (_, last) in results.items()))
    total = ", ".join(f"{n} {what}" for what, n in counts.items()) or "no tests ran"
    elapsed_s = time.monotonic() - started
    print(f"===== {total} in {elapsed_s:.2f}s ({int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}) =====", flush=True)
    return max(0 if code == _NO_TESTS_COLLECTED else code for code, _ in results.values())


def _lane(suites: Sequence[Suite], arguments: Sequence[str], *, shown: bool) -> dict[str, tuple[int, str]]:
    return {suite.name: _pytest(suite, arguments, shown=shown) for suite in suites}


def _pytest(suite: Suite, arguments: Sequence[str], *, shown: bool) -> tuple[int, str]:
    """Exit code and last line of one pytest. Args: shown: its output as it comes, not at its end."""
    paths = [f"tests/{folder}" for folder in suite.folders]
    command = [str(python_of(suite.environment)), "-m", "pytest", *suite.options, *paths, *arguments]
    lines, last = [f"\n### tests of {suite.name} in .venvs/{suite.environment}\n"], ""
    with subprocess.Popen(command, cwd=PROJECT, env=_variables(suite), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            last = line.strip() or last
            if shown:
                _show(lines)
    _show(lines)
    return process.returncode, last


def _variables(suite: Suite) -> dict[str, str]:
    """What runs in `base` starts services of both other environments, and leaves JAX's variables to these."""
    jax = variables_of(suite.environment, cpu=True) if suite.environment != "base" else {}
    return {**jax, **os.environ, **suite.variables, "PYTHONUNBUFFERED": "1"}


def _show(lines: list[str]) -> None:
    """In one piece, and emptied."""
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
    lines.clear()


def _counts(summary: str) -> dict[str, int]:
    """Numbers of pytest's last line: passed, failed, skipped, …"""
    return {
        what: int(n)
        for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", summary)
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
