"""What the orchestrator recorded, handed to the trainer, whose folder is the run's.

Invariant: a line is durable in the orchestrator's own folder first, and is handed over until the trainer has answered;
the trainer takes a line once. So neither's death loses or doubles one, and the run ends only when it has all of them.
A folder that was lost gets back what had been handed over, before a ticket is looked up.
Where both have one folder, the trainer finds every line there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import orjson

from services.orchestrator.status import RunStatus
from shared.clients.trainer import TrainerClient
from shared.errors import AnotherBeginning, VolleyError
from shared.files import storage
from shared.files.reading import ended_lines, open_file
from shared.process import telemetry
from shared.run.folder import Record, RunFolder
from shared.run.wedge import Wait

_POLL_S = 1.0
_MOST_BYTES = 2**20
_log = telemetry.Log("records")


class RecordHandover:
    """Evaluations, their samples, and changes of the mixture; after a start, its own or the trainer's, all that the
    folder has: the trainer's may have been lost, and filled again with what was known of it.
    """

    def __init__(self, trainer: TrainerClient, folder: RunFolder, status: RunStatus) -> None:
        self._trainer, self._status = trainer, status
        self._paths = folder.handed_over
        self._offsets, self._is_fresh = dict[Record, int](), True
        self._folder, self._alone, self._begun = folder, asyncio.Lock(), asyncio.Event()

    async def follow(self, beginning: str) -> None:
        """From here on records go to a trainer that has started, of this beginning of the run. Raises AnotherBeginning
        while those in the folder are of another.
        """
        if beginning:
            await asyncio.to_thread(_keep, self._folder, beginning)
        self._is_fresh = True
        self._begun.set()

    async def restore(self) -> None:
        """A folder that knows of no beginning is new, or was lost: it gets the records that the trainer has, for what a
        ticket plays follows from them. Returns when it has them; no ticket is out before there is a trainer.
        """

        async def fetch() -> None:
            for record, path in self._paths.items():
                if not path.exists():
                    await self._fetch(record, path)

        if not self._folder.recorded_beginning.exists():
            waiting = self._status.waiting
            await self._until(fetch, "the trainer has not told yet which records it has")
            self._status.waiting = waiting

    async def _fetch(self, record: Record, path: Path) -> None:
        """All of a record or nothing. Raises VolleyError, OSError."""
        arriving, offset = path.with_name(f".{path.name}.arriving"), 0
        await asyncio.to_thread(_clear, arriving)
        while (found := await self._trainer.record(record, offset))[1] > offset:
            lines, offset = found
            text = "".join(f"{line}\n" for line in lines).encode()
            await asyncio.to_thread(storage.append, arriving, text, durable=True)
        if offset:
            await asyncio.to_thread(_put, arriving, path)
            _log.info("a lost record is back", record=record, n_bytes=offset)

    async def watch(self) -> None:
        """Hands over what is added. Ends only by cancellation."""
        await self._begun.wait()
        while True:
            await self.finish()
            await asyncio.sleep(_POLL_S)

    async def finish(self) -> None:
        """Returns when the trainer has everything."""

        async def hand_over() -> None:
            async with self._alone:
                if self._is_fresh:
                    self._is_fresh, self._offsets = False, dict.fromkeys(self._paths, 0)
                for record, path in self._paths.items():
                    await self._hand_over(record, path)

        await self._until(hand_over, "records are not handed over")

    async def _until(self, work: Callable[[], Awaitable[None]], problem: str) -> None:
        """Returns once `work` has not failed."""
        waits: Wait | None = None
        while True:
            try:
                await work()
            except (VolleyError, OSError) as error:
                on = getattr(error, "waits_on", None) or "trainer"
                waits = self._status.waiting = Wait(on, f"{problem}: {error}")
                _log.warning(problem, reason=str(error))
            else:
                if waits is not None and self._status.waiting is waits:
                    self._status.waiting = None
                return
            await asyncio.sleep(_POLL_S)

    async def _hand_over(self, record: Record, path: Path) -> None:
        if await asyncio.to_thread(_size, path) < self._offsets[record]:
            self._offsets[record] = 0  # it was removed, or cut, and begins again
        lines = await asyncio.to_thread(_lines, path, self._offsets[record])
        while lines:
            taken, size, n_bytes = list[str](), 0, 0
            while lines and (not taken or n_bytes + lines[0][0] <= _MOST_BYTES):
                length, line = lines.pop(0)
                size, n_bytes = size + length, n_bytes + length
                if line is not None:
                    taken.append(line)
            if taken:
                await self._trainer.hand_over(record, taken)
            self._offsets[record] += size


def _clear(arriving: Path) -> None:
    arriving.parent.mkdir(parents=True, exist_ok=True)
    arriving.unlink(missing_ok=True)


def _put(arriving: Path, path: Path) -> None:
    """One that has appeared meanwhile stays: a folder of both may be filled by the trainer."""
    with contextlib.suppress(FileExistsError):
        os.link(arriving, path)
    arriving.unlink()
    storage.fsync(path.parent)


def _keep(folder: RunFolder, beginning: str) -> None:
    """A folder without records is of any beginning: what was read first may have been left in the queue."""
    path = folder.recorded_beginning
    with storage.storage(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8") if path.exists() else beginning
        if known != beginning and any(record.exists() for record in folder.handed_over.values()):
            raise AnotherBeginning(
                f"{folder.path} holds records of another beginning of the run than the queue",
                "a trainer that begins the run tells the queue when it is ready; else, where the trainer's folder was"
                " emptied, empty this one as well",
            )
        if known != beginning or not path.exists():
            storage.replace(path, beginning.encode())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path, offset: int) -> list[tuple[int, str | None]]:
    """Bytes and text of each whole line from `offset` on; None for one that is no JSON object."""
    try:
        with open_file(path) as file:
            file.seek(offset)
            return [(size, text) for size, line in ended_lines(file) for text in _text(line)]
    except FileNotFoundError:
        return []


def _text(line: bytes) -> Iterator[str | None]:
    try:
        text = line.decode().strip()
        yield text if isinstance(orjson.loads(text), dict) else None
    except ValueError:
        yield None
