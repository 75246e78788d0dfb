"""Which tests `make test` and `make test-long` run, and the line that sums them up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import testing
from tools.changed import Sources
from volley.layout import PROJECT


@pytest.mark.parametrize("long", [False, True])
def test_no_file_of_tests_is_forgotten(long: bool) -> None:
    paths = [PROJECT / path for suite in testing.suites(long=long) for path in suite.paths]
    assert len(paths) == len(set(paths))
    assert all(path.exists() for path in paths)
    files = [*PROJECT.glob("tests/**/test_*.py"), *PROJECT.glob("packages/*/tests/**/test_*.py")]
    wanted = [file for file in files if not long or "mark.long" in file.read_text(encoding="utf-8")]
    assert [file for file in wanted if not any(file.is_relative_to(path) for path in paths)] == []


def test_the_suites_that_need_jax_have_its_environment() -> None:
    environments = {suite.name: suite.environment for suite in testing.suites(long=False)}
    assert {name: environment for name, environment in environments.items() if environment != "base"} == {
        "trainer1": "trainer",
        "trainer2": "trainer",
        "rollout": "rollout",
    }


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("shared/codec.py", {"tests/test_codec.py", "tests/test_run.py", "tests/test_limit.py"}),
        ("services/env/app.py", {"tests/test_run.py"}),
        ("services/env/pages/start.html", {"tests/test_pages.py"}),
        ("tests/support/runs.py", {"tests/test_run.py"}),
        ("tests/test_codec.py", {"tests/test_codec.py"}),
        ("packages/extra/volley_extra/part.py", {"tests/test_packages.py", "tests/test_limit.py"}),
        ("packages/extra/volley_extra/inner.py", {"tests/test_packages.py", "tests/test_limit.py"}),
        ("packages/extra/volley_extra/other.py", set()),
        ("volley/__init__.py", {"tests/test_run.py"}),
        ("docs/left.md", set()),
    ],
)
def test_a_change_reaches_what_imports_starts_or_reads_it(tmp_path: Path, changed: str, reached: set[str]) -> None:
    files = {
        "shared/codec.py": "",
        "services/env/__main__.py": "",
        "services/env/app.py": "from shared import codec",
        "volley/local/stack.py": 'command = ["-m", module]',
        "volley/__main__.py": 'COMMANDS = ["volley.commands.train"]',
        "volley/commands/train.py": "import volley.local.stack",
        "tests/support/runs.py": 'command = ["-m", "volley"]',
        "tests/test_run.py": "from tests.support import runs",
        "tests/test_codec.py": "from shared.codec import pack",
        "tests/test_pages.py": 'page = ROOT / "services/env/pages/start.html"',
        "packages/extra/pyproject.toml": '[project.entry-points."volley.parts"]\nextra = "volley_extra.part:open_it"',
        "packages/extra/volley_extra/part.py": "from shared import codec\nfrom volley_extra import inner",
        "packages/extra/volley_extra/inner.py": "",
        "packages/extra/volley_extra/other.py": "",
        "shared/packages.py": 'SECTIONS = "volley.sections"',
        "volley/__init__.py": "",
        "tests/test_packages.py": "from shared import packages",
        "tests/test_limit.py": 'monkeypatch.setattr("volley_extra.part._LIMIT", 1)',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = Sources(tmp_path).reached([changed])
    assert {name for name in found if name.startswith("tests/test_")} == reached


def test_the_last_line_sums_up_what_pytest_says() -> None:
    outputs = [
        "...\n==== 5 passed, 2 skipped, 1 deselected in 12.30s ====\nan engine says something later\n",
        "==== 1 failed, 7 passed in 61.02s (0:01:01) ====\n",
        "killed\n",
    ]
    lines = [testing.summary(output) for output in outputs]
    assert lines == [
        "==== 5 passed, 2 skipped, 1 deselected in 12.30s ====",
        "==== 1 failed, 7 passed in 61.02s (0:01:01) ====",
        "no summary",
    ]
    total = testing.total(lines, 75.0)
    assert total == "===== 12 passed, 2 skipped, 1 deselected, 1 failed in 75.00s (1:15) ====="


SOMETIMES = """
import pathlib

import pytest


def test_sound():
    assert True


def test_slow():
    seen = pathlib.Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first


@pytest.mark.parametrize("text", ["a - b"])
def test_wrong(text):
    assert {wrong}
"""


@pytest.mark.parametrize(("wrong", "code"), [("text", 0), ("not text", 1)])
def test_a_failed_test_runs_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, code: int
) -> None:
    file = tmp_path / "test_sometimes.py"
    file.write_text(SOMETIMES.replace("{wrong}", wrong), encoding="utf-8")
    suite = testing.Suite("sometimes", (str(file),), options=())
    monkeypatch.setattr(testing, "suites", lambda long: (suite,))
    assert testing.main([]) == code
    shown = capsys.readouterr().out
    assert "### failed tests of sometimes again, alone" in shown
    again = shown.partition("again, alone")[2]
    assert "test_sound" not in again
    named = [line for line in again.splitlines() if line.startswith("PASSED ALONE")]
    assert len(named) == (code == 0)


def test_failed_tests_are_read_from_the_summary() -> None:
    output = "FAILED a/test_b.py::test_c[d - e] - assert [1]\nERROR a/test_b.py::test_f - OSError\nERROR of a service\n"
    assert testing.failures(output) == ["a/test_b.py::test_c[d - e]", "a/test_b.py::test_f"]


SLOW = """
import time


def test_quick():
    assert {right}


def test_slow():
    {slow}
"""
STUBBORN = """
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""


@pytest.mark.parametrize(("right", "code"), [("1", 0), ("0", 1)])
def test_what_still_runs_at_the_end_of_the_time_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: str, code: int
) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(SLOW.replace("{right}", right).replace("{slow}", "time.sleep(60)"), encoding="utf-8")
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the project's take seconds to load
    running, later = (
        testing.Suite(name, (str(file),), options=("-c", os.devnull), variables=bare) for name in ("running", "later")
    )
    monkeypatch.setattr(testing, "suites", lambda long: (running, later))
    monkeypatch.setattr(testing, "_BESIDE", 1)
    assert testing.main(["--minutes=0.2"]) == code
    shown = capsys.readouterr().out
    first, _, second = shown.partition("### tests of later")
    assert f"{testing.CUT}: interrupted" in first
    assert ("1 passed" in first) == (code == 0)
    assert ("1 failed" in first) == (code == 1)
    assert f"{testing.CUT}: not started" in second
    assert ("again, alone" in second) == (code == 1)


@pytest.mark.parametrize(("right", "code"), [("1", 0), ("0", 1)])
def test_a_suite_that_cannot_be_interrupted_keeps_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], right: str, code: int
) -> None:
    file = tmp_path / "test_stubborn.py"
    file.write_text(SLOW.replace("{right}", right).replace("    {slow}", STUBBORN), encoding="utf-8")
    bare = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    suite = testing.Suite("stubborn", (str(file),), options=("-c", os.devnull), variables=bare)
    monkeypatch.setattr(testing, "suites", lambda long: (suite,))
    monkeypatch.setattr(testing, "_TEARDOWN_S", 1.0)
    assert testing.main(["--minutes=0.2"]) == code
    assert f"no summary {testing.CUT}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "output", "returned"),
    [
        (-9, "tests/test_a.py ...", 1),
        (3, "INTERNALERROR", 1),
        (5, "==== 3 deselected in 0.10s ====", 0),
        (1, "FAILED a.py::t - x\nERROR b.py - boom\n==== 1 failed, 1 error in 1.00s ====", 1),
    ],
)
def test_no_end_of_a_suite_but_success_is_success(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, returned: int
) -> None:
    ends = {"good": (0, "==== 1 passed in 1.00s ===="), "other": (code, output)}
    monkeypatch.setattr(testing, "suites", lambda long: tuple(testing.Suite(name, ()) for name in ends))
    monkeypatch.setattr(testing, "_pytest", lambda suite, arguments, ends_at: ends[suite.name])
    assert testing.main([]) == returned
