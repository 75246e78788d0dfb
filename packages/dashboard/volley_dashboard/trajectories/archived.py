"""Archived episodes of one run: search them, read them token by token, and describe them as records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import NotFound, VolleyError
from shared.run import commits, token_values
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.types import Trajectory, WeightVersion
from volley.reporting.jsonl import read
from volley.runs.run_file import name_of
from volley_dashboard.trajectories import episodes, files
from volley_dashboard.trajectories.index import EpisodeIndex, Filters, undone
from volley_python.folder import survey

if TYPE_CHECKING:
    from shared.models.chat import ChatTokenizer

type Row = Mapping[str, Any]
"""Row of the index: see `volley_dashboard.trajectories.index`."""
_FILES_AT_ONCE = 8


class ArchivedEpisodes:
    """The episodes that a run's trainer has archived. Its methods may be called from several threads.

    `damaged` names the archived files that cannot be read, with the reason.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.run = folder, name_of(folder)
        self.index = EpisodeIndex(folder, self.run)

    @classmethod
    def open(cls, path: Path) -> ArchivedEpisodes:
        """Open those of a run's folder. Raises ConfigError if it is not one, or holds files that no run writes."""
        RunFolder(path).check()
        folder = RunFolder(path.absolute())
        survey.check(folder)
        return cls(folder)

    @property
    def damaged(self) -> Mapping[str, str]:
        return self.index.damaged

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        return episodes.tokenizer_of(self.folder)

    @property
    def head(self) -> TrainerState | None:
        """State of the newest step; None if there is none, or it cannot be read."""
        try:
            return commits.newest(self.folder)
        except VolleyError:
            return None

    def refresh(self) -> Iterator[int]:
        """Index new files. Yields after each few of them how many remain."""
        while remaining := self.index.refresh(most_files=_FILES_AT_ONCE):
            yield remaining

    def find(self, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Index new files, and return the rows that meet the filters. Raises ConfigError for a wrong filter.

        Args:
            filters: values by the fields of `Filters`.
        """
        wanted = Filters.of(filters)
        self.index.refresh()
        return self.rows(wanted)

    def rows(self, filters: Filters) -> list[dict[str, Any]]:
        """Return the rows that meet the filters, by step, version, ticket and sample, each with `undone`."""
        found = list(self.index.every(filters))
        return [row | {"undone": flag} for row, flag in zip(found, undone(found, self.head), strict=True)]

    def read(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Trajectory]]:
        """Yield the trajectories of rows, in their order; those of one version together. Raises DecodeError."""
        wanted: dict[str, dict[tuple[int, int], Row]] = {}
        for row in rows:
            wanted.setdefault(row["version"], {})[row["ticket"], row["sample"]] = row
        for version, samples in wanted.items():
            tickets = {ticket for ticket, _ in samples}
            groups = episodes.read_groups(self.folder, self.run, WeightVersion.parse(version), tickets)
            found = {(one.ticket, one.sample_index): one for group in groups for one in group.trajectories}
            yield from ((row, found[key]) for key, row in samples.items() if key in found)

    def answers(self, rows: Sequence[Row]) -> list[str]:
        """Return the beginning of the last answer of each row's episode; empty if its file cannot be read."""
        found: dict[tuple[Any, ...], str] = {}
        with suppress(VolleyError):
            for row, one in self.read(rows):
                found[row["version"], row["ticket"], row["sample"]] = episodes.answer_of(one, self.tokenizer)
        return [found.get((row["version"], row["ticket"], row["sample"]), "") for row in rows]

    def records(self, rows: Iterable[Row], *, tokens: bool = False) -> Iterator[dict[str, Any]]:
        """Yield a record of each row's episode, with the text of its turns. Raises DecodeError."""
        for row, one in self.read(rows):
            yield episodes.record_of(one, WeightVersion.parse(row["version"]), self.tokenizer, tokens=tokens)

    def export(self, path: Path, rows: Iterable[Row], *, tokens: bool = False) -> int:
        """Write records to a file; return their number. Raises as `files.write`."""
        return files.write(path, self.records(rows, tokens=tokens))

    def ticket(self, ticket: int, version: str = "") -> dict[str, Any]:
        """Describe all episodes of a ticket, token by token, with its lines in the ledger.

        Args:
            version: weights that the step made (default: the newest step that trained on the ticket).

        Raises NotFound, DecodeError.
        """
        lines = [line for line in read(self.folder.ledger) if line.get("ticket") == ticket]
        if version:
            made = WeightVersion.parse(version)
        else:
            named = [line.get("version") for line in lines if line.get("disposition") == "trained"]
            found = [WeightVersion.parse(name) for name in reversed(named) if isinstance(name, str)]
            if not found:
                self.index.refresh()
                found = self.index.versions_of(ticket)
            made = next(iter(found), None)
        if made is None:
            raise NotFound(f"no step was trained on ticket {ticket}", "only groups that were trained on are archived")
        group = episodes.read_group(self.folder, self.run, made, ticket)
        values = token_values.read(self.folder.tokens, self.run, made)
        shown = episodes.shown(group, made, self.tokenizer, values)
        return shown | {"ledger": lines, "path": str(self.folder.path)}
