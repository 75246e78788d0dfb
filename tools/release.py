"""Check that a tag may be released: the versions agree with it and the changelog has its section.

`python3 -m tools.release v0.2.0`; needs only the standard library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Reasons against the release of a tag."""
    version = tag.removeprefix("v")
    found = [f"{name} has the version {has}" for name, has in versions(root).items() if has != version]
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", _text(root / "CHANGELOG.md"), re.M):
        found.append(f"CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`")
    return found


def versions(root: Path = ROOT) -> dict[str, str]:
    """Versions by file: of the core, its packages and the citation."""
    projects = [root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    named = {str(path.relative_to(root)): tomllib.loads(_text(path))["project"]["version"] for path in projects}
    cited = re.search(r"^version: (.+)$", _text(root / "CITATION.cff"), re.M)
    return {**named, "CITATION.cff": cited[1] if cited else "none"}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    against = problems(sys.argv[1])
    print(*against, sep="\n", end="\n" if against else "")
    raise SystemExit(bool(against))
