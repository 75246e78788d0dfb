"""`make test` and `make test-long`: run pytest in each virtual environment.

The last line sums up the results. A suite is one pytest. Enough suites run at once to keep two cores busy, for most of
them often wait for processes. The longest start first, so that all end at about the same time. Each suite's output is
shown at its end; a failure does not stop the others. Failed tests run again at the end, with nothing beside them. One
that then passes had too little time: it is named, and does not fail the whole. More than 40 do not run again. Arguments
go to pytest; `--part 0/2` (conftest.py) runs half of the tests. `--changed`, or `--changed=REVISION`, runs the test
files that a change reaches (tools/changed.py). After `--minutes=N` the suites that still run are interrupted and no
other starts; the suites' lines say so, and only tests that failed until then fail the whole.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import PurePath

from shared.process.utf8 import print_what_can_be_printed
from tools.changed import reached_tests
from volley.layout import PROJECT, python_of, variables_of

LONG, CHANGED, MINUTES = "--long", "--changed", "--minutes"
_TESTS_FAILED, _NO_TESTS_COLLECTED = 1, 5
_BESIDE = 4
_MOST_AGAIN = 40
_AGAIN_S = 300.0
"""Time after the end given by `--minutes` in which failed tests may run again; cut off, they stay failed."""
_TEARDOWN_S = 120.0
"""Time for an interrupted pytest to end what its tests have started."""
_LONG_BESIDE = 2
"""Long suites start whole stacks, and compare throughput and memory."""
_FUZZ_CASES = "2000"
"""Generated requests per service in the long tests; `make fuzz` sends 5,000."""
CUT = "time is up"


@dataclass(frozen=True, slots=True)
class Suite:
    """One pytest: paths in the project, its virtual environment, options and environment variables."""

    name: str
    paths: tuple[str, ...]
    environment: str = "base"
    options: tuple[str, ...] = ("-m", "not long")
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def suites(*, long: bool) -> tuple[Suite, ...]:
    """Suites, longest first. Short folders share a suite."""
    return _long() if long else _short()


def _short() -> tuple[Suite, ...]:
    uvicorn = "tests/shared/test_connection.py"  # sglang-jax pins another one
    trainer = ("tests/trainer", *_of_packages("trainer"))
    others = _others(())
    sandbox = tuple(path for path in others if path.startswith("packages/sandbox/"))
    named = (
        *(Suite(f"trainer{n}", files, "trainer") for n, files in enumerate(_halves(trainer), 1)),
        Suite("packages", tuple(path for path in others if path.startswith("packages/") and path not in sandbox)),
        Suite("rollout", ("tests/rollout", uvicorn, *_of_packages("rollout")), "rollout"),
        Suite("cli", ("tests/cli", "tests/docs")),
        Suite("sandbox", sandbox),
        Suite("shared", ("tests/shared", "tests/queue")),
        Suite("system", ("tests/system",)),
        Suite("env", ("tests/env",)),
        Suite("fuzz", ("tests/fuzz",)),
        Suite("chaos", ("tests/chaos",)),
    )
    return (*named, Suite("rest", _others(named)))


def _long() -> tuple[Suite, ...]:
    only = ("-m", "long")
    fuzz = Suite("fuzz", ("tests/fuzz/test_services.py",), options=(), variables={"VOLLEY_FUZZ_CASES": _FUZZ_CASES})
    apart = (
        Suite("chaos", ("tests/chaos",), options=only),
        Suite("rollout", ("tests/rollout", *_of_packages("rollout")), "rollout", only),
        Suite("trainer", ("tests/trainer", *_of_packages("trainer")), "trainer", only),
    )
    return (Suite("rest", _others(apart), options=only), *apart, fuzz)


def _others(named: Sequence[Suite]) -> tuple[str, ...]:
    """Folders and files of tests for the environment `base` that are in no other suite."""
    taken = {path for suite in named for path in suite.paths} | {"tests/trainer", "tests/rollout"}
    taken.update(_of_packages("trainer"), _of_packages("rollout"))
    folders = [*PROJECT.glob("tests/*"), *PROJECT.glob("packages/*/tests/*")]
    found = {
        str(path.relative_to(PROJECT)) for path in folders if path.match("test_*.py") or any(path.rglob("test_*.py"))
    }
    return tuple(sorted(found - taken))


def _halves(folders: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Two lists of the folders' test files of about the same size: the trainer's suite is the longest by far."""
    files = [file for folder in folders for file in (PROJECT / folder).rglob("test_*.py")]
    names = [str(file.relative_to(PROJECT)) for file in sorted(files, key=lambda file: (file.stat().st_size, file))]
    return tuple(names[::2]), tuple(names[1::2])


def _of_packages(environment: str) -> tuple[str, ...]:
    """Folders with the packages' tests for an environment other than `base`."""
    return tuple(str(path.relative_to(PROJECT)) for path in sorted(PROJECT.glob(f"packages/*/tests/{environment}")))


def main(arguments: Sequence[str]) -> int:
    print_what_can_be_printed()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
    started, wanted = time.monotonic(), suites(long=LONG in arguments)
    for revision in _values(CHANGED, arguments):
        wanted = narrowed(wanted, reached_tests(PROJECT, revision or None))
    ends_at = started + 60 * min(map(_minutes, _values(MINUTES, arguments)), default=inf)
    own = (LONG, CHANGED, MINUTES)
    given = [argument for argument in arguments if argument.partition("=")[0] not in own]
    print(f"tests of {', '.join(suite.name for suite in wanted)}; each suite is shown when it is over", flush=True)
    results: dict[str, tuple[int, str]] = {}
    with ThreadPoolExecutor(_LONG_BESIDE if LONG in arguments else _BESIDE) as workers:
        running = {workers.submit(_pytest, suite, given, ends_at): suite for suite in wanted}
        for done in as_completed(running):
            suite, (code, output) = running[done], done.result()
            print(f"\n### tests of {suite.name} in .venvs/{suite.environment}\n\n{output}", end="", flush=True)
            results[suite.name] = code, output
    codes = {name: code for name, (code, _) in results.items()} | _again(wanted, results, given, ends_at + _AGAIN_S)
    summaries = {name: summary(output) for name, (_, output) in results.items()}
    print("\n" + "\n".join(f"{suite.name:<8} {summaries[suite.name]}" for suite in wanted))
    print(total([*summaries.values()], time.monotonic() - started), flush=True)
    return int(any(code not in (0, _NO_TESTS_COLLECTED) for code in codes.values()))  # below 0: ended by a signal


def _minutes(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise SystemExit(f"{MINUTES}={given}: write a number, such as {MINUTES}=20") from None


def _values(name: str, arguments: Sequence[str]) -> list[str]:
    """Values of an option given as `--name=value`; empty for one without a value."""
    return [one.removeprefix(name).removeprefix("=") for one in arguments if one.partition("=")[0] == name]


def _again(
    wanted: Sequence[Suite], results: Mapping[str, tuple[int, str]], arguments: Sequence[str], ends_at: float
) -> dict[str, int]:
    """Run failed tests again, one suite after another. Returns the exit codes of these suites."""
    failed = dict[str, list[str]]()
    for suite in wanted:
        code, output = results[suite.name]
        names, counts = failures(output), _counts(summary(output))
        if code == _TESTS_FAILED and len(names) == sum(counts.get(what, 0) for what in ("failed", "error", "errors")):
            failed[suite.name] = names
    if sum(map(len, failed.values())) > _MOST_AGAIN:
        return {}
    codes: dict[str, int] = {}
    for suite in wanted:
        if names := failed.get(suite.name):
            code, output = _pytest(replace(suite, paths=tuple(names)), arguments, ends_at)
            passed = code == 0 and CUT not in output
            codes[suite.name] = 0 if passed else _TESTS_FAILED
            print(f"\n### failed tests of {suite.name} again, alone\n\n{output}", end="", flush=True)
            if passed:
                print("\n".join(f"PASSED ALONE {name}" for name in names), flush=True)
    return codes


def has_failed(output: str) -> bool:
    """True if a line of pytest's progress, such as `tests/test_a.py ..F. [10%]`, or its summary has a failure."""
    return bool(failures(output) or re.search(r"^\S+\.py [.sxX]*[FE]", output, re.MULTILINE))


def failures(output: str) -> list[str]:
    """Names of failed tests in pytest's summary."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::[^\s\[]+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)


def narrowed(wanted: Sequence[Suite], files: Sequence[str]) -> tuple[Suite, ...]:
    """Suites with these test files only, without those that have none."""
    kept = [
        replace(
            suite, paths=tuple(file for file in files if any(PurePath(file).is_relative_to(of) for of in suite.paths))
        )
        for suite in wanted
    ]
    return tuple(suite for suite in kept if suite.paths)


def _pytest(suite: Suite, arguments: Sequence[str], ends_at: float) -> tuple[int, str]:
    """Exit code and output of one pytest, interrupted at `ends_at` (seconds of `time.monotonic`)."""
    if time.monotonic() >= ends_at:
        return 0, f"{CUT}: not started\n"
    command = [str(python_of(suite.environment)), "-m", "pytest", *suite.options, *suite.paths, *arguments]
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        env=_variables(suite),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as running:
        try:
            output, _ = running.communicate(timeout=None if ends_at == inf else max(ends_at - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return _cut(running)
    return running.returncode, output


def _cut(running: subprocess.Popen[str]) -> tuple[int, str]:
    """Interrupt a pytest. Returns its output, and 0 or 1: whether a test has failed until then."""
    running.send_signal(signal.SIGINT)
    try:
        output, _ = running.communicate(timeout=_TEARDOWN_S)
    except subprocess.TimeoutExpired:
        running.kill()
        output, _ = running.communicate()
    return _TESTS_FAILED if has_failed(output) else 0, f"{output}\n{CUT}: interrupted\n"


def _variables(suite: Suite) -> dict[str, str]:
    """Environment variables of a suite. Suites in `base` start services of the others, which set JAX's variables."""
    jax = variables_of(suite.environment, cpu=True) if suite.environment != "base" else {}
    return {**jax, **os.environ, **suite.variables, "PYTHONUNBUFFERED": "1"}


def summary(output: str) -> str:
    """Summary line of pytest, which output of its threads and children may follow, and whether it was cut off."""
    lines = output.split("\n")
    found = next((line for line in reversed(lines) if re.search(r" in \d+\.\d+s\b", line)), "no summary")
    return f"{found} {CUT}" if CUT in output else found


def total(summaries: Sequence[str], elapsed_s: float) -> str:
    """Sum of all summaries, in the format of pytest's."""
    counts = Counter[str]()
    for one in summaries:
        counts.update(_counts(one))
    sums = ", ".join(f"{n} {what}" for what, n in counts.items()) or "no tests ran"
    return f"===== {sums} in {elapsed_s:.2f}s ({int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}) ====="


def _counts(line: str) -> dict[str, int]:
    """Numbers of pytest's summary line: passed, failed, skipped, …"""
    return {
        what: int(n)
        for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)", line)
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
