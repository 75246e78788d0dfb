"""Records of a run's folder: steps, evaluations, tickets and trajectories, of a finished run or a running one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from shared.types import Trajectory
    from volley_python.client.run_reader import RunReader
    from volley_python.client.tables import Table

type Row = Mapping[str, Any]
type EventKind = Literal["step", "evaluation", "supervised", "ticket"]


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A line that a run has added to its records: an optimizer step, an evaluation, a supervised step, a ticket's end.

    After a crash, steps that were undone come again.
    """

    kind: EventKind
    record: Mapping[str, Any]


class EpisodeArchive(Protocol):
    """Archived episodes of a run, which the part `trajectories` of an installed package opens (shared.packages).

    `damaged` names archived files that cannot be read, with the reason.
    """

    run: str

    @property
    def damaged(self) -> Mapping[str, str]: ...

    def find(self, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rows that meet the filters. Raises ConfigError for a wrong filter."""
        ...

    def read(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Trajectory]]: ...

    def records(self, rows: Iterable[Row], *, tokens: bool = False) -> Iterator[dict[str, Any]]: ...

    def export(self, path: Path, rows: Iterable[Row], *, tokens: bool = False) -> int: ...

    def ticket(self, ticket: int, version: str = "") -> dict[str, Any]: ...


class Trajectories:
    """Episodes that met the filters, by step, version, ticket and sample; `rows` has a row of the index for each.

    `damaged` names archived files that could not be read, with the reason.
    """

    def __init__(self, archived: EpisodeArchive, rows: Table) -> None:
        self._archived, self.rows = archived, rows
        self.damaged: Mapping[str, str] = dict(archived.damaged)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Trajectories({len(self)} of run {self._archived.run})"

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield the episodes with their arrays: token_ids, loss_mask and logprobs, each [T]. Raises DecodeError."""
        return (one for _, one in self._archived.read(self.rows))

    def records(self, *, tokens: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the episodes as JSON would hold them, with the text of each turn.

        Args:
            tokens: add `sequences` with the arrays `token_ids`, `loss_mask` and `logprobs` [T].
        """
        return self._archived.records(self.rows, tokens=tokens)

    def to_numpy(self) -> dict[str, Any]:
        """Return an array [N] for each column of `rows`."""
        return self.rows.to_numpy()

    def to_pandas(self, *, tokens: bool = False) -> Any:
        """Return a `pandas.DataFrame`, a row for each episode. Raises ConfigError if pandas is not installed.

        Args:
            tokens: give the records instead, with texts and tokens.
        """
        return (self._records_table() if tokens else self.rows).to_pandas()

    def to_polars(self, *, tokens: bool = False) -> Any:
        """Return a `polars.DataFrame`; as `to_pandas`."""
        return (self._records_table() if tokens else self.rows).to_polars()

    def export(self, path: Path | str, *, tokens: bool = False) -> int:
        """Write the records to a .jsonl or .parquet file; return their number. Raises ConfigError, StorageFull."""
        return self._archived.export(Path(path), self.rows, tokens=tokens)

    def _records_table(self) -> Table:
        from volley_python.client.tables import Table

        return Table([_plain(record) for record in self.records(tokens=True)])


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Replace arrays by lists, which both libraries nest."""
    sequences = [{k: v if isinstance(v, int) else v.tolist() for k, v in one.items()} for one in record["sequences"]]
    return {**record, "sequences": sequences}


class RunRecords:
    """Reads the folder of one run. Its methods block; they may be called from several threads.

    Raises ConfigError if the folder is not that of a run, or holds files that no run writes and is not trusted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.check()

    def check(self) -> None:
        """Raise ConfigError if the folder is not, or no longer, that of a run."""
        from shared.run.folder import RunFolder

        RunFolder(self._path).check()

    @cached_property
    def files(self) -> RunReader:
        from shared.errors import ConfigError
        from shared.run.folder import RunFolder
        from volley_python.client.run_reader import RunReader

        folder = RunFolder(self._path.absolute())
        found = RunReader(folder.name, folder)
        if found.problem is not None:
            raise ConfigError(f"{folder.path}: {found.problem}", "if the folder is yours and this is right: trust=True")
        return found

    def summary(self) -> dict[str, Any]:
        import dataclasses

        return dataclasses.asdict(self.files.summary())

    def table(self, kind: Literal["train", "evals", "sft"]) -> Table:
        """Return the lines that count, the last one of each step and environment, ordered by step."""
        from volley_python.client.tables import Table

        return Table(getattr(self.files.snapshot(), kind))

    def ledger(self) -> Table:
        from volley.reporting.jsonl import read
        from volley_python.client.tables import Table

        return Table(read(self.files.folder.ledger))

    def trajectories(self, filters: Mapping[str, Any]) -> Trajectories:
        """Return the archived episodes that meet the filters. Raises ConfigError for a wrong filter."""
        from volley_python.client.tables import Table

        archived = self._archived()
        return Trajectories(archived, Table(archived.find(filters)))

    def ticket(self, ticket: int, version: str) -> dict[str, Any]:
        return self._archived().ticket(ticket, version)

    def _archived(self) -> EpisodeArchive:
        from shared import packages

        return packages.part("trajectories")(self.files.folder)


class RunTail:
    """New lines of a run's records. With `from_start`, those that are there already come first."""

    def __init__(self, records: RunRecords, *, from_start: bool) -> None:
        from volley.reporting.jsonl import JsonlTail

        self._files, folder = records.files, records.files.folder
        paths: tuple[tuple[EventKind, Path], ...] = (
            *(("supervised", folder.sft), ("step", folder.metrics), ("evaluation", folder.evals)),
            ("ticket", folder.ledger),
        )
        self._tails = [(kind, JsonlTail(path, from_end=not from_start)) for kind, path in paths]

    def has_ended(self) -> bool:
        """Return True if no process on this machine works on the run. Ask before `new`, so that no line is missed."""
        from volley.runs.run_file import read_record

        record = read_record(self._files.folder)
        return record is None or record.finished or not self._files.is_held

    def new(self) -> list[RunEvent]:
        return [RunEvent(kind, record) for kind, tail in self._tails for record in tail.new()]
