"""Reader of a run's records: its curves, its state and a summary, from the files of the run's folder alone.

A finished run needs no service, and a running one is not disturbed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal

import numpy as np

from shared.errors import DecodeError, VolleyError
from shared.files.reading import open_file
from shared.run import commits, trust
from shared.run.folder import RunFolder
from shared.run.pinned import MAX_STEPS
from shared.run.state import TrainerState
from volley.reporting.intervals import SuccessRate
from volley.reporting.jsonl import JsonlTail, numbers, parse
from volley.runs.run_file import RunRecord, began, is_held, read_record
from volley_python.client.counted_rows import CountedRows, Selection, counted_rows
from volley_python.folder import counted_lines, forks, survey

type Kind = Literal["train", "eval", "sft", "handover"]
type Rows = Sequence[Mapping[str, Any]]
_RECENT = 32
_MOST_AT_ONCE = 2 * 2**20
"""Bytes of records that are read before a run is shown; of more, `RunReader.glance` reads a sample."""
_SAMPLED, _NEWEST, _FEWEST = 400, 8, 32
"""Lines of a sample; of them, those that must count for the head; and the fewest that stand for a long file."""
_SAMPLE_BYTES, _END_BYTES = 2**13, 2**16
_HANDOVER_BYTES = 2**18
_EXACT = 2**24
"""Numbers below are sent with float32's digits, which is more than a curve shows."""
_COUNTING: Mapping[Kind, Selection] = {
    "train": counted_lines.of_steps,
    "eval": counted_lines.of_weights,
    "sft": lambda rows, _: rows,
    "handover": counted_lines.of_steps,
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One row of the table of runs. `created`: seconds since 1970. `problem`: reason why the folder is not read.

    `failed`: why the run ended by a failure. `recent`: held-out success, or else reward or loss, at up to 32 steps.
    """

    name: str
    path: str
    created: float
    state: str
    step: int
    max_steps: int | None
    success: float | None
    reward: float | None
    env: str
    algorithm: str
    model: str
    origin: Mapping[str, str] | None
    problem: str | None = None
    failed: str | None = None
    elapsed_s: float = 0.0
    recent: Sequence[float] = ()


class RunReader:
    """Records of one run, each line read once. Its methods may be called from several threads.

    `revision` grows when lines are read that curves show, or such lines were undone.
    """

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.folder, self.began = name, folder, began(folder)
        self._files: Mapping[Kind, Path] = {
            "train": folder.metrics,
            "eval": folder.evals,
            "sft": folder.sft,
            "handover": folder.handovers,
        }
        self._tails = {kind: JsonlTail(path) for kind, path in self._files.items()}
        with suppress(OSError):  # only the newest are shown
            self._tails["handover"].offset = max(0, folder.handovers.stat().st_size - _HANDOVER_BYTES)
        self._rows = {kind: CountedRows(_COUNTING[kind]) for kind in self._files}
        self._ledger, self._dispositions = JsonlTail(folder.ledger), Counter[str]()
        self._reading = Lock()
        self.revision = 0
        self._known: tuple[Any, Snapshot] | None = None
        self.problem: str | None = None
        if not trust.is_accepted(folder) and (found := survey.look(folder).problems):
            self.problem = f"{found[0][0]} {found[0][1]}"

    def refresh(self) -> None:
        """Read new lines."""
        if self.problem is None:
            with self._reading:
                self._refresh()

    def _refresh(self) -> None:
        has_new = False
        for kind, tail in self._tails.items():
            if tail.is_undone():  # a crash undid steps
                tail.restart()
                self._rows[kind].restart()
                self._known, has_new = None, True
            new = tail.new()
            self._rows[kind].add(new)
            has_new |= bool(new) and kind != "handover"
        if self._ledger.is_undone():
            self._ledger.restart()
            self._dispositions.clear()
            self._known = None
        self._dispositions.update(
            name for line in self._ledger.records() if isinstance(name := line.get("disposition"), str)
        )
        self.revision += has_new

    @property
    def n_steps(self) -> int:
        """Lines of steps that were read."""
        return len(self._rows["train"]) + len(self._rows["sft"])

    @property
    def head(self) -> TrainerState | None:
        with suppress(VolleyError, DecodeError):
            return commits.newest(self.folder)
        return None

    def snapshot(self) -> Snapshot:
        """Read what is new, and return all that is known: the same object if nothing is new."""
        self.refresh()
        record, head = read_record(self.folder), self.head
        with self._reading:
            ends = [tail.offset for tail in (*self._tails.values(), self._ledger)]
            if self._known is None or self._known[0] != (self.revision, ends, record, head):
                train, evals, sft, updates = (self._rows[kind].of(head) for kind in self._files)
                known = Snapshot(record, head, train, evals, sft, updates, dict(self._dispositions), self.revision)
                self._known = (self.revision, ends, record, head), known
            return self._known[1]

    def glance(self) -> Snapshot:
        """Return a snapshot in a time that does not grow with the run.

        If a long run has not been read yet, it holds a sample of the lines, all of the last ones among them, and has no
        revision.
        """
        if self._unread() <= _MOST_AT_ONCE:
            return self.snapshot()
        record, head = read_record(self.folder), self.head
        found = {kind: sampled(path, _SAMPLED) for kind, path in self._files.items() if kind != "handover"}
        if any(len(lines) < _FEWEST and self._is_long(kind) for kind, lines in found.items()):
            return self.snapshot()  # a sample has no lines above 8 KiB
        rows = {kind: counted_rows(lines, _COUNTING[kind], head) for kind, lines in found.items()}
        newest = {id(row) for one in rows.values() for row in one[-_NEWEST:]}
        if any(lines and newest.isdisjoint(map(id, lines[-_NEWEST:])) for lines in found.values()):
            return self.snapshot()  # the newest lines were undone, so the sample lacks the newest that count
        return Snapshot(record, head, rows["train"], rows["eval"], rows["sft"], (), {}, None)

    def _is_long(self, kind: Kind) -> bool:
        with suppress(OSError):
            return self._files[kind].stat().st_size > _MOST_AT_ONCE
        return False

    def _unread(self) -> int:
        """Bytes of the records that `refresh` would read."""
        n_bytes = 0
        if self.problem is None:
            tails = {
                **{self._files[kind]: tail for kind, tail in self._tails.items()},
                self.folder.ledger: self._ledger,
            }
            for path, tail in tails.items():
                with suppress(OSError):
                    n_bytes += max(0, path.stat().st_size - tail.offset)
        return n_bytes

    def summary(self, known: Snapshot | None = None) -> RunSummary:
        """Args: known: a snapshot, if there is one already."""
        known = known or self.glance()
        record, config = known.record, known.config
        is_supervised = config.get("mode") in ("sft", "dpo")
        steps = known.sft if is_supervised else known.train
        last: Mapping[str, Any] = steps[-1] if steps else {}
        success = next((row.get("success") for row in reversed(known.evals) if not row.get("env")), None)
        return RunSummary(
            name=self.name,
            path=str(self.folder.path),
            created=record.created if record else 0.0,
            state=self._state(record),
            step=int(last.get("step", 0)),
            max_steps=config.get("sft.max_steps" if is_supervised else MAX_STEPS),
            success=success,
            reward=last.get("reward_mean"),
            env=str(config.get("data.env") or ""),
            algorithm=str(config.get("mode" if is_supervised else "algorithm.name") or ""),
            model=Path(str(config.get("model.path") or "")).name,
            origin=fork.origin if (fork := forks.read(self.folder)) else record.origin if record else None,
            problem=self.problem,
            failed=record.failed if record and not self.is_held else None,
            elapsed_s=record.elapsed_s if record else 0.0,
            recent=_recent(known, is_supervised=is_supervised),
        )

    @property
    def state(self) -> str:
        """`refused`, `unreadable`, `finished`, `running`, `failed` or `stopped`, by the files."""
        return self._state(read_record(self.folder))

    def _state(self, record: RunRecord | None) -> str:
        if self.problem is not None:
            return "refused"
        if record is None:
            return "unreadable"
        if record.finished:
            return "finished"
        return "running" if self.is_held else "failed" if record.failed else "stopped"

    @property
    def is_held(self) -> bool:
        """True if a process on this machine works on the run."""
        return is_held(self.folder)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """State of a run's files at one time.

    `train`, `evals`, `sft` and `handovers` are the lines that count (shared.run.counted), the last one of each step and
    environment, by step; of hand-overs only newer ones. `dispositions` counts lines of the ledger. `revision` is the
    reader's; without one, the first three are samples, and the others are empty.
    """

    record: RunRecord | None
    head: TrainerState | None
    train: Rows
    evals: Rows
    sft: Rows
    handovers: Rows
    dispositions: Mapping[str, int]
    revision: int | None

    @property
    def config(self) -> Mapping[str, Any]:
        return self.record.config if self.record else {}

    @cached_property
    def rates(self) -> list[SuccessRate]:
        """Held-out success of the main environment, by step."""
        found = (SuccessRate.of(row) for row in self.evals if not row.get("env"))
        return [rate for rate in found if rate is not None]

    def curves(self, most: int = 2**31, keys: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return by kind, and for `success`, `{"step": [N], "columns": {KEY: [N]}}`; a missing value is NaN.

        Of more than `most` steps, every second, third, … is left out. `keys`: the columns to return, without nested
        ones; all if None.
        """
        rates = self.rates
        rates = rates[:: -(-len(rates) // most) or 1]
        success = {key: [getattr(rate, key) for rate in rates] for key in ("success", "low", "high", "tasks")}
        return {
            "train": columns(thinned(self.train, most), keys),
            "eval": columns(thinned(self.evals, most), keys),
            "sft": columns(thinned(self.sft, most), keys),
            "success": {"step": [rate.step for rate in rates], "columns": success},
        }


def _recent(known: Snapshot, *, is_supervised: bool) -> Sequence[float]:
    """Return at most `_RECENT` values of the curve that shows best whether the run learns."""
    rows = known.sft if is_supervised else known.train
    if len(known.rates) > 1:
        return [rate.success for rate in known.rates[:: 1 + len(known.rates) // _RECENT]]
    some = rows[:: 1 + len(rows) // _RECENT]
    curves = ([x for row in some if isinstance(x := row.get(key), float)] for key in ("reward_mean", "loss"))
    return next((curve for curve in curves if len(curve) > 1), [])


def sampled(path: Path, most: int) -> list[dict[str, Any]]:
    """Return about `most` lines at equal distances in bytes, and all of the last 64 KiB; none if there is no file.

    Its cost does not grow with the file. Lines longer than 8 KiB are left out.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            end = max(0, size - _END_BYTES)
            starts = range(0, end, max(1, end // most))
            lines = dict(one for start in starts for one in _lines_from(file, start, _SAMPLE_BYTES)[:1])
            lines |= _lines_from(file, end, _END_BYTES)
    except OSError:
        return []
    return [record for _, line in sorted(lines.items()) if (record := parse(line)) is not None]


def _lines_from(file: IO[bytes], start: int, n_bytes: int) -> list[tuple[int, bytes]]:
    """Return the complete lines that begin in a part of a file, with their places."""
    before = min(start, 1)  # a line may begin at `start`
    file.seek(start - before)
    *lines, _ = file.read(n_bytes + before).split(b"\n")
    found, at = list[tuple[int, bytes]](), start - before
    for line in lines:
        found.append((at, line))
        at += len(line) + 1
    return found[before:]


def thinned(rows: Rows, most: int) -> Rows:
    """Return all rows of steps at equal distances, at most `most` of them, and of the last step."""
    if (stride := -(-len(rows) // most)) <= 1:
        return rows
    steps = [*dict.fromkeys(row["step"] for row in rows)]
    kept = {*steps[::stride], steps[-1]}
    return [row for row in rows if row["step"] in kept]


def columns(rows: Rows, wanted: Collection[str] | None = None) -> dict[str, Any]:
    """Turn lines into columns, all or the wanted ones. Lines of a further environment have keys ENV/KEY."""
    flat = [_numbers(row, wanted) for row in rows]
    keys = sorted({key for one in flat for key in one})
    return {"step": [row["step"] for row in rows], "columns": {key: _column(flat, key) for key in keys}}


def _column(rows: Rows, key: str) -> np.ndarray:
    values = np.array([row.get(key, np.nan) for row in rows], np.float64)
    return values.astype(np.float32) if np.nanmax(np.abs(values)) < _EXACT else values


def _numbers(row: Mapping[str, Any], wanted: Collection[str] | None) -> dict[str, float]:
    """Return the numbers of a line, except its step, by key."""
    env = row.get("env")
    prefix = f"{env}/" if isinstance(env, str) else ""
    if wanted is None:
        return {prefix + key: value for key, value in numbers(row) if key != "step"}
    found = ((prefix + key, row.get(key)) for key in wanted)
    return {key: value for key, value in found if isinstance(value, int | float) and not isinstance(value, bool)}
