"""Queue of a fork: the archived groups of another run, in the order in which that run trained on them. No Redis.

Tickets that ended without training there have no group in the log; they end here too, as failed, with the reason of the
ledger. The queue remembers nothing: after a restart it hands out the whole log again, and the trainer ignores the
tickets that are finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from services.trainer.interfaces import TrainerBackend
from services.trainer.loop.ledger import LedgerFile
from shared.errors import DecodeError
from shared.queue.records import Finished, QueueState, StreamEntry
from shared.run import archive, ledger
from shared.run.folder import RunFolder
from shared.run.ledger import TRAINED, Line
from shared.run.lineage import epoch_of
from shared.run.state import TrainerState
from shared.types import Group, Lineage, WeightVersion
from volley_proof.replay.log_bounds import LogBounds
from volley_python.folder import counted_lines
from volley_python.folder.forks import Fork


class LogQueue:
    """`TrainQueue` of groups that exist already."""

    def __init__(self, entries: Iterator[StreamEntry]) -> None:
        self._entries = entries
        self._is_exhausted = False

    def is_exhausted(self) -> bool:
        """True once every group was read, and the caller has asked for more."""
        return self._is_exhausted

    async def begin(
        self, low: int, version: int, issued: int, void: int, done: Iterable[int], epoch: int, above: int
    ) -> int:
        return max(epoch, above) + 1

    async def open(self, epoch: int, incarnations: Lineage = (), run_id: str = "") -> None:
        pass

    async def read(self, epoch: int, consumer: str, count: int, block_ms: int) -> list[StreamEntry]:
        """Return the next groups; none at the end. Raises DecodeError if the log is damaged."""
        found = await asyncio.to_thread(lambda: list(islice(self._entries, count)))
        if not found:
            if self._is_exhausted:
                await asyncio.sleep(block_ms / 1000)
            self._is_exhausted = True
        return found

    async def commit(self, epoch: int, version: int, finished: Sequence[Finished], void: int) -> None:
        pass

    async def dead_letter(self, epoch: int, entry: StreamEntry, reason: str) -> None:
        pass

    async def leave(self, epoch: int, refused: str = "") -> None:
        pass

    async def publish(self, ticket: int, payload: bytes) -> object:
        """Do nothing: the log is read again from its start."""
        return None

    async def state(self) -> QueueState:
        return QueueState(0, 0, 0, 0, True, 0, 0, 0, 0, 0, 0, 0, 0)


def log_of(fork: Fork, folder: RunFolder) -> LogQueue:
    """Open the log of a fork; `folder` is the fork's."""
    lines = LedgerFile(RunFolder(Path(fork.source)).ledger).read()
    return LogQueue(entries(partial(fork.log, folder), fork.run, lines, fork.head, fork.step + 1))


def bounds_of(fork: Fork, backend: TrainerBackend, queue: LogQueue) -> LogBounds:
    return LogBounds(backend, fork.last, fork.least_share, queue.is_exhausted)


def entries(
    root: Callable[[int], Path], run: str, lines: Iterable[Line], head: TrainerState, first: int
) -> Iterator[StreamEntry]:
    """Yield the groups of the steps from `first` to the head's, and the tickets that ended without training meanwhile.

    Raises DecodeError if an archive is damaged or not that of the ledger.

    Args:
        root: archive of the groups of a step.
        run: name of the run that trained on them.
        lines: ledger of that run.
        head: its newest state.
    """
    of_steps, voids = dict[int, list[Line]](), list[Line]()
    for line in counted_lines.of_tickets(lines, head):
        if line["disposition"] != TRAINED:
            voids += [line] if line["step"] <= head.step else []
        elif line["step"] >= first:
            of_steps.setdefault(line["step"], []).append(line)
    voids.sort(key=lambda line: -line["step"])
    for step in range(first, head.step + 1):
        while voids and voids[-1]["step"] < step:
            yield _ended(run, voids.pop())
        version = WeightVersion(epoch_of(step, head.lineage) or 0, step)
        yield from _of_step(root(step), run, version, of_steps.get(step, []))
    for line in reversed(voids):
        yield _ended(run, line)


def _of_step(root: Path, run: str, version: WeightVersion, lines: Sequence[Line]) -> Iterator[StreamEntry]:
    n = 0
    for n, payload in enumerate(archive.read(root, run, version), start=1):
        if n > len(lines):
            break
        ticket = lines[n - 1]["ticket"]
        yield StreamEntry(f"{version}/{n}", ticket, payload, 1)
    if n != len(lines):
        raise DecodeError(
            f"archive {archive.path_of(root, version)} does not hold {len(lines)} groups, as the ledger says"
        )


def _ended(run: str, line: Mapping[str, Any]) -> StreamEntry:
    why = f"ended in run {run} as {ledger.disposition_label(line)}: {line.get('reason') or 'no reason'}"
    group = Group(line["ticket"], "", "", (), failure=why)
    return StreamEntry(f"{line['ticket']}", line["ticket"], group.encode(), 1)
