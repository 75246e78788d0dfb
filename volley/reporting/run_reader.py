"""Reader of a run's records: its curves, its state and a summary, from the files of the run's folder alone.

A finished run needs no service, and a running one is not disturbed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from shared.errors import DecodeError, VolleyError
from shared.files.locks import existing_lock_file, try_lock
from shared.run import commits, counted, forks, trust
from shared.run.folder import RunFolder
from shared.run.pinned import MAX_STEPS
from shared.run.state import TrainerState
from volley.reporting.intervals import SuccessRate
from volley.reporting.jsonl import JsonlTail, numbers
from volley.runs import survey
from volley.runs.first_start import began
from volley.runs.record import RunRecord, read_record

type Kind = Literal["train", "eval", "sft", "handover"]
type Rows = Sequence[Mapping[str, Any]]
_RECENT = 32


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
        files: dict[Kind, Path] = {
            "train": folder.metrics,
            "eval": folder.evals,
            "sft": folder.sft,
            "handover": folder.handovers,
        }
        self._tails = {kind: JsonlTail(path) for kind, path in files.items()}
        self._rows: dict[Kind, list[Mapping[str, Any]]] = {kind: [] for kind in files}
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
                self._rows[kind], has_new = [], True
            new = tail.new()
            self._rows[kind] += new
            has_new |= bool(new) and kind != "handover"
        self._dispositions.update(
            name for line in self._ledger.records() if isinstance(name := line.get("disposition"), str)
        )
        self.revision += has_new

    @property
    def head(self) -> TrainerState | None:
        with suppress(VolleyError, DecodeError):
            return commits.newest(self.folder)
        return None

    def snapshot(self) -> Snapshot:
        """Read what is new, and return all that is known: the same object if nothing is new."""
        self.refresh()
        record, head, rows = read_record(self.folder), self.head, self._rows
        ends = [tail.offset for tail in (*self._tails.values(), self._ledger)]
        if self._known is None or self._known[0] != (self.revision, ends, record, head):
            known = Snapshot(
                record,
                head,
                _last_of_each(counted.of_steps(rows["train"], head)),
                _last_of_each(counted.of_weights(rows["eval"], head)),
                _last_of_each(rows["sft"]),
                _last_of_each(counted.of_steps(rows["handover"], head)),
                dict(self._dispositions),
            )
            self._known = (self.revision, ends, record, head), known
        return self._known[1]

    def summary(self, known: Snapshot | None = None) -> RunSummary:
        """Args: known: a snapshot, if there is one already."""
        known = known or self.snapshot()
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
        descriptor = existing_lock_file(self.folder.path / ".lock")
        if descriptor is None:
            return False
        try:
            return not try_lock(descriptor, shared=True)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State of a run's files at one time.

    `train`, `evals`, `sft` and `handovers` are the lines that count (shared.run.counted), the last one of each step and
    environment, by step. `dispositions` counts lines of the ledger.
    """

    record: RunRecord | None
    head: TrainerState | None
    train: Rows
    evals: Rows
    sft: Rows
    handovers: Rows
    dispositions: Mapping[str, int]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.record.config if self.record else {}

    @property
    def rates(self) -> list[SuccessRate]:
        """Held-out success of the main environment, by step."""
        found = (SuccessRate.of(row) for row in self.evals if not row.get("env"))
        return [rate for rate in found if rate is not None]

    def curves(self, most: int = 2**31) -> dict[str, dict[str, Any]]:
        """Return by kind, and for `success`, `{"step": [N], "columns": {KEY: [N]}}`; a missing value is None.

        Of more than `most` steps, every second, third, … is left out.
        """
        rates = self.rates
        rates = rates[:: -(-len(rates) // most) or 1]
        success = {key: [getattr(rate, key) for rate in rates] for key in ("success", "low", "high", "tasks")}
        return {
            "train": columns(thinned(self.train, most)),
            "eval": columns(thinned(self.evals, most)),
            "sft": columns(thinned(self.sft, most)),
            "success": {"step": [rate.step for rate in rates], "columns": success},
        }


def _recent(known: Snapshot, *, is_supervised: bool) -> Sequence[float]:
    """Return at most `_RECENT` values of the curve that shows best whether the run learns."""
    rows = known.sft if is_supervised else known.train
    curves = (
        [rate.success for rate in known.rates],
        *([row.get(key) for row in rows] for key in ("reward_mean", "loss")),
    )
    values = next(([x for x in curve if isinstance(x, float)] for curve in curves if len(curve) > 1), [])
    return values[:: 1 + len(values) // _RECENT]


def thinned(rows: Rows, most: int) -> Rows:
    """Return at most `most` of the rows at equal distances, and the last one."""
    stride = -(-len(rows) // most)
    return rows if stride <= 1 else [*rows[:-1:stride], rows[-1]]


def _last_of_each(rows: Iterable[Mapping[str, Any]]) -> Rows:
    last: dict[tuple[int, str], Mapping[str, Any]] = {}
    for row in rows:
        if isinstance(step := row.get("step"), int):
            last[step, str(row.get("env") or "")] = row
    return [last[key] for key in sorted(last)]


def columns(rows: Rows) -> dict[str, Any]:
    """Turn lines into columns. Lines of a further environment have keys ENV/KEY."""
    flat = [{_key(row, key): value for key, value in numbers(row) if key != "step"} for row in rows]
    keys = sorted({key for one in flat for key in one})
    return {"step": [row["step"] for row in rows], "columns": {key: [one.get(key) for one in flat] for key in keys}}


def _key(row: Mapping[str, Any], key: str) -> str:
    env = row.get("env")
    return f"{env}/{key}" if isinstance(env, str) else key
