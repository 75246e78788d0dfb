"""Which tests `make test` and `make test-long` run, and the line that sums them up."""

from __future__ import annotations

import pytest

from tools import testing
from volley.layout import PROJECT


@pytest.mark.parametrize("long", [False, True])
def test_no_folder_of_tests_is_forgotten(long: bool) -> None:
    folders = {path.relative_to(PROJECT / "tests").parts[0] for path in (PROJECT / "tests").rglob("test_*.py")}
    paths = [path for suite in testing.suites(long=long) for path in suite.paths]
    assert len(paths) == len(set(paths))
    assert all((PROJECT / "tests" / path).exists() for path in paths)
    marked = {folder for folder in folders if is_marked_long(folder)} if long else folders
    assert marked <= set(paths)


def is_marked_long(folder: str) -> bool:
    return any(
        "mark.long" in path.read_text(encoding="utf-8") for path in (PROJECT / "tests" / folder).rglob("test_*.py")
    )


def test_the_suites_that_need_jax_have_its_environment() -> None:
    environments = {suite.name: suite.environment for suite in testing.suites(long=False)}
    assert {name: environment for name, environment in environments.items() if environment != "base"} == {
        "trainer": "trainer",
        "rollout": "rollout",
    }


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
