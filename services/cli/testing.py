"""`make test`: pytest in each virtual environment, one after the other; the last line sums up all of them.

A failure in one environment does not keep the others from running. Arguments go to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from services.cli.layout import CACHE, PROJECT, python_of

OWN_ENVIRONMENT = ("rollout", "trainer")
"""Folders of tests that need an environment of their own; every other folder runs in base."""
_NO_TESTS_COLLECTED = 5


def main(arguments: Sequence[str]) -> int:
    started, counts, codes = time.monotonic(), Counter[str](), []
    summaries = []
    for environment in ("base", *OWN_ENVIRONMENT):
        print(f"\n### tests in .venvs/{environment}", flush=True)
        code, last = _pytest(environment, arguments)
        codes.append(0 if code == _NO_TESTS_COLLECTED else code)
        counts.update(_counts(last))
        summaries.append(f"{environment:<8} {last}")
    total = ", ".join(f"{n} {what}" for what, n in counts.items()) or "no tests ran"
    elapsed_s = time.monotonic() - started
    print("\n" + "\n".join(summaries))
    print(f"===== {total} in {elapsed_s:.2f}s ({int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}) =====", flush=True)
    return max(codes)


def _pytest(environment: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and last line of one pytest, whose output is shown as it comes."""
    command = [str(python_of(environment)), "-m", "pytest", *_paths(environment), *arguments]
    jax = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(CACHE / f"jax-{environment}")} if environment in OWN_ENVIRONMENT else {}
    variables = {**jax, **os.environ, "PYTHONUNBUFFERED": "1"}
    last = ""
    with subprocess.Popen(command, cwd=PROJECT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
    return process.returncode, last


def _paths(environment: str) -> list[str]:
    folders = sorted(path for path in (PROJECT / "tests").iterdir() if any(path.glob("test_*.py")))
    own = environment if environment in OWN_ENVIRONMENT else None
    return [str(path.relative_to(PROJECT)) for path in folders if (path.name == own if own else path.name not in OWN_ENVIRONMENT)]


def _counts(summary: str) -> dict[str, int]:
    """Numbers of pytest's last line: passed, failed, skipped, …"""
    return {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", summary)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
