"""Numbers of lines on the pages: at most a tenth off those of the tree, so that few changes have to edit them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT

EXAMPLES = re.findall(r"\]\(\.\./([^)#]+)\), (\d+) lines", (ROOT / "docs" / "packages.md").read_text(encoding="utf-8"))
PROCESSES = re.findall(
    r"^\| ([a-z ]+) \| (\d+) \| ([\d,]+) \|$", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.M
)


def test_the_imports_of_each_process_are_those_of_the_page() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.sizes", "--json"], cwd=ROOT, capture_output=True, check=True)
    found = json.loads(done.stdout)
    measured = {**found["processes"], "one quickstart": found["one quickstart"]}
    stated = {name: [int(modules), int(lines.replace(",", ""))] for name, modules, lines in PROCESSES}
    assert stated == {name: pytest.approx(figures, rel=0.1) for name, figures in measured.items()}


def test_the_lines_of_each_example_are_those_of_the_page() -> None:
    assert len(EXAMPLES) >= 8
    measured = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path, _ in EXAMPLES}
    assert {path: int(lines) for path, lines in EXAMPLES} == pytest.approx(measured, rel=0.1)
