"""The run's append-only files: the ledger of tickets (see shared.ledger), and the metrics of steps.

Invariants: a ticket has exactly one disposition along the surviving lineage; `metrics.jsonl` has one line a step, none
beyond the restored step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from shared import ledger, telemetry
from shared.ledger import ANEW, TRAINED
from shared.state import TrainerState
from shared.weights import fsync

_log = telemetry.Log("records")


class Ledger:
    """Dispositions of tickets, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Durable when it returns."""
        text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        if text:
            _append(self._path, text, durable=True)

    def read(self) -> list[dict[str, Any]]:
        return _read_lines(self._path)

    def reconcile(self, state: TrainerState) -> TrainerState:
        """Brings file and checkpoint together at the start of an incarnation; returns the state with what the file adds.

        Lines of the checkpoint that a crash kept from the file are appended, steps that the checkpoint does not contain are
        rolled back, and tickets that ended without training after the checkpoint stay ended. Without a checkpoint (epoch 0)
        the run begins anew, and so do all its tickets.
        """
        settled = self.settled()
        if state.epoch == 0:
            self.append([ledger.rollback(ANEW, 0)] if settled else [])
            return state
        if any(line["disposition"] == TRAINED and line["step"] > state.step for line in settled.values()):
            self.append([ledger.rollback(state.step, state.epoch)])
            settled = self.settled()
        self.append(line for line in state.recent if not ledger.same(settled.get(line["ticket"]), line))
        progress = state.progress()
        for ticket, line in settled.items():
            if line["disposition"] != TRAINED:
                progress.finish(ticket, void=True)
        return state.at(state.step, progress, issued=state.issued, done=state.phase == "done", recent=())

    def settled(self) -> dict[int, dict[str, Any]]:
        """The disposition of every ticket that has one: of the highest epoch, rollbacks applied."""
        return ledger.settled(self.read())


class StepLog:
    """Lines that each have a `step`: metrics of RL, of the warm start, of hand-overs. Kept in step with the checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)

    def append(self, line: Mapping[str, Any]) -> None:
        _append(self._path, orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n", durable=False)

    def truncate_beyond(self, step: int) -> None:
        """Removes lines of steps that the restored checkpoint does not contain."""
        lines = _read_lines(self._path)
        kept = [line for line in lines if line["step"] <= step]
        if len(kept) == len(lines):
            return
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        fsync(temporary)
        temporary.rename(self._path)
        fsync(self._path.parent)
        _log.info("metrics truncated", step=step, removed=len(lines) - len(kept))


def _append(path: Path, text: bytes, *, durable: bool) -> None:
    created = not path.exists()
    with path.open("ab") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if created and durable:
        fsync(path.parent)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line]


def _drop_torn_line(path: Path) -> None:
    """A crash while appending leaves a line without its end; nothing durable was promised for it."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
        _log.warning("torn line dropped", file=path.name)
