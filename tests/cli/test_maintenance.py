"""Workflows, hooks, versions and titles of commits: the files of maintainers agree with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools import release, titles
from volley.layout import PROJECT

GITHUB = PROJECT / ".github"
WORKFLOWS = sorted([*GITHUB.rglob("*.yml"), PROJECT / ".pre-commit-config.yaml"])
CI = (GITHUB / "workflows/ci.yml", PROJECT / ".ci/run")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_files_of_the_forge_name_what_exists(path: Path) -> None:
    assert isinstance(yaml.safe_load(text(path)), dict)
    targets = set(re.findall(r"^([a-z-]+):", text(PROJECT / "Makefile"), re.M))
    assert set(re.findall(r"\bmake (?:--no-print-directory )?([a-z-]+)", text(path))) <= targets
    assert all((PROJECT / "tools" / f"{name}.py").is_file() for name in re.findall(r"-m tools\.(\w+)", text(path)))
    pinned = re.findall(r"uses: (?!\./)(\S+)", text(path))
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in pinned)


def test_workflows_get_no_permission_that_they_do_not_name() -> None:
    assert all("permissions" in yaml.safe_load(text(path)) for path in GITHUB.glob("workflows/*.yml"))


def test_all_parts_of_the_long_tests_run_after_a_merge() -> None:
    workflow, run = map(text, CI)
    parts = yaml.safe_load(workflow)["jobs"]["long"]["strategy"]["matrix"]["part"]
    assert parts == list(range(len(parts)))
    assert f"matrix.part }}}}/{len(parts)}" in workflow
    assert f"% {len(parts)}))/{len(parts)}" in run


def test_versions_agree() -> None:
    assert set(release.versions().values()) == {release.versions()["pyproject.toml"]}


def test_a_tag_without_its_version_or_changelog_is_not_released(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n', encoding="utf-8")
    (tmp_path / "CITATION.cff").write_text("version: 0.2.0\n", encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0] - 2027-01-05\n", encoding="utf-8")
    assert release.problems("v0.2.0", tmp_path) == []
    assert len(release.problems("v0.3.0", tmp_path)) == 3


@pytest.mark.parametrize(
    ("title", "accepted"),
    [
        ("rollout: reject an empty prompt", True),
        ("trainer, queue: commit after the ledger", True),
        ("Merge branch 'ledger'", True),
        ("tests: " + "x" * 65, True),
        ("tests: " + "x" * 66, False),
        ("Reject an empty prompt", False),
        ("rollout: reject an empty prompt.", False),
    ],
)
def test_a_commit_title_begins_with_its_part_and_is_short(title: str, accepted: bool) -> None:
    assert (titles.problem(title) is None) == accepted
