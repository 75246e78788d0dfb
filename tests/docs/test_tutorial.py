"""The tutorial's commands run in order in an empty folder, and print what the page shows."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SAVED = re.compile(r"Save this as `([\w.]+)`")
_DURATION, _NUMBER, _DRAWN = (
    re.compile(r"(\d+ min )?[\d.]+ s\b"),
    re.compile(r"[-+]?\d[\d,.e+-]*"),
    re.compile(r"[\s░█·─]+"),
)


def steps() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, text, name) of the page's blocks: `file`, `shell`, or `output` of the shell block before."""
    for found in _BLOCK.finditer(PAGE):
        language, text = found.groups()
        if language in ("python", "yaml"):
            yield "file", text, _SAVED.findall(PAGE[: found.start()])[-1]
        else:
            yield ("output" if language == "text" else "shell"), text, ""


def shape(line: str) -> str:
    """Return a line without what differs between runs and machines: numbers, durations, drawings, width of columns."""
    return _DRAWN.sub(" ", _NUMBER.sub("#", _DURATION.sub("# s", line))).strip()


def missing(page: str, printed: str) -> list[str]:
    """Return the lines of the page that the output does not have, in this order; `…` stands for any lines."""
    rest = iter(shape(line) for line in printed.splitlines())
    return [line for line in page.splitlines() if line.strip("…") and shape(line) not in rest]


def test_a_line_of_the_page_may_differ_in_numbers_but_not_in_words_or_order() -> None:
    page = "…\nrose from 26.0% to 93.0% in 1 min 12 s\n  16  ·  ░█░ · 93.0%"
    assert missing(page, "first\nrose from 25% to 9.1% in 51.7 s\n 4 ░░█░ 7%\n") == []
    assert missing(page, " 4 ░░█░ 7%\nrose from 25% to 9.1% in 51.7 s\n") == ["  16  ·  ░█░ · 93.0%"]
    assert missing("fell to 3", "rose to 3") == ["fell to 3"]


def test_each_output_follows_commands_and_each_file_has_a_name() -> None:
    kinds = [kind for kind, *_ in steps()]
    assert kinds[0] == "shell"
    assert all(before == "shell" for before, kind in itertools.pairwise(kinds) if kind == "output")
    assert [name for kind, _, name in steps() if kind == "file"] == ["compass.py", "compass.yaml"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    for name in ("configs", ".venvs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script, outputs = ["set -e"], {}
    for n, (kind, text, name) in enumerate(steps()):
        if kind == "file":
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif kind == "shell":
            script.append(f"{{\n{text}}} > out-{n} 2>&1")
        else:
            outputs[n - 1] = text
    # The target is the repository's: without installing anything, and with its run in this folder.
    target = f"make -f {ROOT}/Makefile -o install quickstart ARGS=run.dir={tmp_path}/runs"
    lines = "\n".join(script).replace("make quickstart", target)
    done = subprocess.run(["bash", "-c", lines], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=800)
    printed = {path.name: path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("out-*"))}
    assert done.returncode == 0, [text[-3000:] for text in printed.values()][-1]
    assert {n: missing(text, printed[f"out-{n}"]) for n, text in outputs.items()} == {n: [] for n in outputs}
