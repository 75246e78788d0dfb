"""Check titles of commits: the part, a colon, an imperative, at most 72 characters. Needs only the standard library.

`--file MESSAGE` checks a message that is being written (git's hook commit-msg); `A..B` checks new commits.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

LONGEST = 72
_SINCE = "2026-11-30T00:00:00Z"
"""Earlier commits were made before the rule."""
_TITLE = re.compile(r"[\w./`-]+(?:[, ]+[\w./`-]+){0,3}: \S.*[^.\s]")
_BY_GIT = ("Merge ", 'Revert "', "fixup! ", "squash! ", "amend! ")


def problem(title: str) -> str | None:
    """Reason why a title is refused, or None."""
    if title.startswith(_BY_GIT):
        return None
    if len(title) > LONGEST:
        return f"{len(title)} characters, at most {LONGEST} are allowed"
    if not _TITLE.fullmatch(title):
        return 'begin with the part, as in "rollout: reject an empty prompt", without a final period'
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tools.titles")
    parser.add_argument("commits", nargs="?", help="range of commits, such as origin/main..HEAD")
    parser.add_argument("--file", type=Path, help="file with the message of a commit")
    asked = parser.parse_args()
    titles = (
        asked.file.read_text(encoding="utf-8").splitlines()[:1] if asked.file else _of_range(asked.commits or "HEAD^!")
    )
    return report(titles)


def report(titles: Iterable[str]) -> int:
    """Print the refused titles. Returns the exit code."""
    refused = [(title, why) for title in titles if (why := problem(title))]
    for title, why in refused:
        print(f"commit title refused: {title}\n  {why}")
    return min(1, len(refused))


def _of_range(commits: str) -> list[str]:
    command = ["git", "log", "--no-merges", f"--since-as-filter={_SINCE}", "--format=%s", commits]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.splitlines()


if __name__ == "__main__":
    raise SystemExit(main())
