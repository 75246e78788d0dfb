"""`make test`: pytest in each virtual environment; the last line sums up all of them.

A failure in one suite does not keep the others from running. Arguments go to pytest. The faults of tests/chaos wait
more than they compute, so there are two lanes of suites beside each other; those of the second are shown when they are
over.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.cli.layout import CACHE, PROJECT, python_of

OWN_ENVIRONMENT = ("rollout", "trainer")
"""Folders of tests that need an environment of their own; every other folder runs in base."""
_LANES = (("base", "trainer"), ("chaos", "rollout"))
"""Suites, one after the other: `chaos` is the folder of that name, in base like all other folders."""
_NO_TESTS_COLLECTED = 5


def main(arguments: Sequence[str]) -> int:
    started, counts = time.monotonic(), Counter[str]()
    with ThreadPoolExecutor(1) as beside:
        second = beside.submit(_lane, _LANES[1], arguments, shown=False)
        results = _lane(_LANES[0], arguments, shown=True) | second.result()
    for _, last in results.values():
        counts.update(_counts(last))
    print("\n" + "\n".join(f"{suite:<8} {last}" for suite, (_, last) in results.items()))
    total = ", ".join(f"{n} {what}" for what, n in counts.items()) or "no tests ran"
    elapsed_s = time.monotonic() - started
    print(f"===== {total} in {elapsed_s:.2f}s ({int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}) =====", flush=True)
    return max(0 if code == _NO_TESTS_COLLECTED else code for code, _ in results.values())


def _lane(suites: Sequence[str], arguments: Sequence[str], *, shown: bool) -> dict[str, tuple[int, str]]:
    return {suite: _pytest(suite, arguments, shown=shown) for suite in suites}


def _pytest(suite: str, arguments: Sequence[str], *, shown: bool) -> tuple[int, str]:
    """Exit code and last line of one pytest. Args: shown: its output as it comes, not at its end."""
    environment = suite if suite in OWN_ENVIRONMENT else "base"
    command = [str(python_of(environment)), "-m", "pytest", *_paths(suite), *arguments]
    jax = (
        {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE / f"jax-{environment}")}
        if environment in OWN_ENVIRONMENT
        else {}
    )
    variables = {**jax, **os.environ, "PYTHONUNBUFFERED": "1"}
    lines, last = [f"\n### tests of {suite} in .venvs/{environment}\n"], ""
    with subprocess.Popen(command, cwd=PROJECT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            last = line.strip() or last
            if shown:
                _show(lines)
    _show(lines)
    return process.returncode, last


def _show(lines: list[str]) -> None:
    """In one piece, and emptied."""
    sys.stdout.write("".join(lines))
    sys.stdout.flush()
    lines.clear()


def _paths(suite: str) -> list[str]:
    folders = sorted(path for path in (PROJECT / "tests").iterdir() if any(path.glob("test_*.py")))
    apart = {one for lane in _LANES for one in lane} - {"base"}
    return [
        str(path.relative_to(PROJECT))
        for path in folders
        if (path.name == suite if suite in apart else path.name not in apart)
    ]


def _counts(summary: str) -> dict[str, int]:
    """Numbers of pytest's last line: passed, failed, skipped, …"""
    return {
        what: int(n)
        for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", summary)
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
