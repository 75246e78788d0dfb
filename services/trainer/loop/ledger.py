"""Ledger of tickets, as the trainer writes it (format: shared.run.ledger).

Invariants: a ticket has exactly one disposition along the surviving lineage. Only a trainer that has fenced all others
repairs the file: until then an older trainer may still write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.trainer.step_log import Check, _text
from shared.errors import WeightsError
from shared.files import storage
from shared.process import telemetry
from shared.run import ledger
from shared.run.ledger import TRAINED
from shared.run.state import TrainerState

_log = telemetry.Log("ledger")


class LedgerFile:
    """File of dispositions, one ticket a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines durably. Raises StorageFull, and then writes none of them."""
        text = _text(lines)
        if text:
            storage.append(self._path, text, durable=True)

    def read(self) -> list[dict[str, Any]]:
        """Read the valid lines; `volley verify` reports the others."""
        return [line for line in map(ledger.parse, storage.whole_lines(self._path)) if line is not None]

    def settled(self) -> dict[int, dict[str, Any]]:
        """Return the disposition of each ended ticket: that of the highest epoch, rollbacks applied."""
        return ledger.settled(self.read())

    def with_ended_tickets(self, state: TrainerState) -> TrainerState:
        """Add to the checkpoint's state the tickets that ended without training after it; they stay ended."""
        lines = self.read()
        above = max((line["epoch"] for line in lines), default=0) + 1
        settled = ledger.settled([*lines, ledger.rollback(state.step, above)])
        progress = state.progress()
        voids = [line for line in settled.values() if line["disposition"] != TRAINED]
        added = [line for line in voids if progress.finish(line["ticket"], void=True)]
        chain, done = state.chain.ended(added), state.phase == "done"
        return state.at(state.step, progress, issued=state.issued, done=done, chain=chain, metrics=state.metrics)

    def repair(self, state: TrainerState, epoch: int, check: Check = lambda: None) -> None:
        """Bring the file in line with the checkpoint. The whole file is durable when it returns.

        Rolls back steps of trainers before `epoch` that the checkpoint does not contain, and adds lines of the
        checkpoint that a crash kept from the file.

        Raises WeightsError if tickets have ended, but there is no checkpoint (epoch 0); StorageFull; and any error of
        `check`.
        """
        if storage.blank_torn_line(self._path, check):
            _log.warning("torn line blanked", file=self._path.name)
        if state.epoch == 0 and (n := len(self.settled())):
            raise WeightsError(
                f"{self._path} says how {n} tickets ended, but there is no checkpoint",
                "restore a checkpoint, or start a run with another name",
            )
        self.append(self._rollback(state, epoch))
        settled = self.settled()
        self.append(line for line in state.recent if not ledger.same(settled.get(line["ticket"]), line))
        _sync(self._path)

    def _rollback(self, state: TrainerState, epoch: int) -> list[dict[str, Any]]:
        lines = self.read()
        rollback = ledger.rollback(state.step, epoch)
        return [rollback] if ledger.settled([*lines, rollback]) != ledger.settled(lines) else []


def _sync(path: Path) -> None:
    """Make the present content of a file durable, if it exists. Raises StorageUnavailable."""
    with storage.storage(path.parent):
        if path.exists():
            storage.fsync(path)
            storage.fsync(path.parent)
