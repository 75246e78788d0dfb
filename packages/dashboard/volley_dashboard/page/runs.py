"""Runs below the folders that a dashboard shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shared.errors import NotFound
from shared.run.folder import RunFolder
from volley.runs.run_file import began
from volley_python.client.run_reader import RunReader, RunSummary

_MOST_RUNS = 1000


class Runs:
    """Runs in folders; a folder may be that of one run, or hold those of several.

    A run keeps its name: only a second folder of the same name gets a number, in the order of the paths.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.absolute() for root in roots]
        self._open: dict[str, RunReader] = {}

    def summaries(self) -> list[RunSummary]:
        """Return all runs, the newest first."""
        found = [self._opened(name, path).summary() for name, path in self._names().items()]
        return sorted(found, key=lambda one: -one.created)

    def open(self, name: str) -> RunReader:
        """Raises NotFound."""
        path = self._names().get(name)
        if path is None:
            raise NotFound(f"there is no run {name[:100]}", "the page `/` lists the runs")
        return self._opened(name, path)

    def warm(self) -> None:
        """Read the newest run before somebody asks for it."""
        with suppress(OSError, ValueError):
            name, path = max(self._names().items(), key=lambda one: (one[1] / "run.json").stat().st_mtime)
            self._opened(name, path).glance()

    def _opened(self, name: str, path: Path) -> RunReader:
        known, folder = self._open.get(name), RunFolder(path)
        if known is None or (known.folder, known.began) != (folder, began(folder)):
            known = self._open[name] = RunReader(name, folder)
        return known

    def _names(self) -> dict[str, Path]:
        """Folders by the name under which they are shown."""
        names: dict[str, Path] = {}
        for path in islice(self._folders(), _MOST_RUNS):
            name, n = path.name, 2
            while name in names:
                name, n = f"{path.name}~{n}", n + 1
            names[name] = path
        return names

    def _folders(self) -> Iterator[Path]:
        for root in self._roots:
            inner = [root] if (root / "run.json").exists() else _children(root)
            yield from (path for path in inner if (path / "run.json").is_file())


def _children(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
