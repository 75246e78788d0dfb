"""The commands that the documentation shows, as blocks of lines, and a folder in which they can be run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
)
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"\s{2,}#\s.*$")
_STATE = re.compile(r"^(curl|eval|umask|for|[A-Z]+=\$\(|\w+\(\))")


@dataclass(frozen=True)
class Block:
    """One fenced block. `lines` are whole commands, without comments; a `script` is one whose lines need each other."""

    page: str
    lines: tuple[str, ...]

    @property
    def script(self) -> bool:
        return any(_STATE.match(line) for line in self.lines)

    def __str__(self) -> str:
        return f"{self.page}: {self.lines[0][:40]}"


def first_example() -> str:
    """The environment of the tutorial."""
    return example_of("docs/quickstart.md")


def example_of(page: str) -> str:
    """First block of Python of a page."""
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def blocks() -> list[Block]:
    """Every block of the pages without a language, or with that of a shell: all others are data, code or pictures."""
    found = []
    for page in PAGES:
        for _, language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
            if language in ("", "sh", "bash", "shell", "console"):
                found.append(Block(page.name, _lines(text)))
    return found


def _lines(text: str) -> tuple[str, ...]:
    whole = text.replace("\\\n", " ")
    return tuple(line for raw in whole.splitlines() if (line := _COMMENT.sub("", raw).strip().removeprefix("$ ")))


def yaml_of(page: str, key: str) -> str:
    """The YAML block of a page that begins with `key`."""
    text = next(path for path in PAGES if path.name == page).read_text(encoding="utf-8")
    return next(body for _, language, body in _FENCE.findall(text) if language == "yaml" and body.startswith(key))
