"""The ledger of tickets as the trainer writes it (format: shared.run.ledger).

Invariants: a ticket has exactly one disposition along the surviving lineage. The file is repaired only by a trainer
that has fenced all others: until then an older one may still write to it.
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
from shared.run.chain import Chain
from shared.run.ledger import TRAINED
from shared.run.state import TrainerState

_log = telemetry.Log("ledger")


class LedgerFile:
    """Dispositions of tickets, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Durable when it returns. Raises StorageFull; then none of the lines is there."""
        text = _text(lines)
        if text:
            storage.append(self._path, text, durable=True)

    def read(self) -> list[dict[str, Any]]:
        """The lines that are of a ledger; `volley verify` names others."""
        return [line for line in map(ledger.parse, storage.whole_lines(self._path)) if line is not None]

    def settled(self) -> dict[int, dict[str, Any]]:
        """The disposition of every ticket that has one: of the highest epoch, rollbacks applied."""
        return ledger.settled(self.read())

    def known(self, state: TrainerState) -> TrainerState:
        """The checkpoint's state and what the file adds: tickets that ended without training after it stay ended."""
        lines = self.read()
        above = max((line["epoch"] for line in lines), default=0) + 1
        settled = ledger.settled([*lines, ledger.rollback(state.step, above)])
        progress = state.progress()
        voids = [line for line in settled.values() if line["disposition"] != TRAINED]
        added = [line for line in voids if progress.finish(line["ticket"], void=True)]
        chain = Chain(state.step).ended(voids) if state.chain is None else state.chain.ended(added)
        done = state.phase == "done"
        return state.at(state.step, progress, issued=state.issued, done=done, chain=chain, metrics=state.metrics)

    def repair(self, state: TrainerState, epoch: int, check: Check = lambda: None) -> None:
        """Brings the file in line with the checkpoint: steps of trainers before `epoch` that it does not contain are
        rolled back, and lines of its own that a crash kept from the file are added. Durable when it returns, what was
        found there included.

        Raises WeightsError if tickets have ended, but there is no checkpoint (epoch 0), StorageFull, and what `check`
        raises.
        """
        if storage.blank_torn_line(self._path, check):
            _log.warning("torn line blanked", file=self._path.name)
        if state.epoch == 0 and (n := len(self.settled())):
            raise WeightsError(
                f"{self._path} tells how {n} tickets ended, but there is no checkpoint",
                "restore one, or start a run with another name",
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
    """Makes a file durable as it is, if there is one. Raises StorageUnavailable."""
    with storage.storage(path.parent):
        if path.exists():
            storage.fsync(path)
            storage.fsync(path.parent)
