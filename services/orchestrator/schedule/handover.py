"""Hand over the orchestrator's records to the trainer, whose folder is the run's.

Invariant: a line is first durable in the orchestrator's own folder, and is sent until the trainer has acknowledged it;
the trainer accepts a line once. So no crash of either loses or duplicates a line, and the run ends only when the
trainer has all of them. If the orchestrator's folder was lost, its records are fetched from the trainer before any
ticket is assigned. If both share one folder, the trainer finds every line there.
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
from shared.errors import DecodeError, InputError, RunIdMismatch, VolleyError
from shared.files import storage
from shared.files.reading import ended_lines, open_file
from shared.process import telemetry
from shared.run.folder import Record, RunFolder
from shared.run.waits import Wait

_POLL_S = 1.0
_MOST_BYTES = 2**20
_log = telemetry.Log("records")


class RecordHandover:
    """Hands over evaluations, their samples, and changes of the mixture.

    After a start of either service, all lines in the folder are sent again: the trainer's folder may have been lost and
    restored.
    """

    def __init__(self, trainer: TrainerClient, folder: RunFolder, status: RunStatus) -> None:
        self._trainer, self._status = trainer, status
        self._paths = folder.handed_over
        self._offsets, self._is_fresh = dict[Record, int](), True
        self._folder, self._lock, self._started = folder, asyncio.Lock(), asyncio.Event()

    async def follow(self, run_id: str) -> None:
        """Start sending records to a trainer of the run with this id.

        Raises RunIdMismatch while the folder holds records of another run id.
        """
        if run_id:
            await asyncio.to_thread(_store_run_id, self._folder, run_id)
        self._is_fresh = True
        self._started.set()

    async def restore(self) -> None:
        """Fetch the trainer's records into a new or lost folder; they decide the tickets' environments.

        Returns when it has them; no ticket is issued before there is a trainer.
        """

        async def fetch() -> None:
            for record, path in self._paths.items():
                if not path.exists():
                    await self._fetch(record, path)

        if not self._folder.recorded_run_id.exists():
            waiting = self._status.waiting
            await self._until(fetch, "waiting for the trainer's records")
            self._status.waiting = waiting

    async def _fetch(self, record: Record, path: Path) -> None:
        """Fetch a record completely or not at all. Raises VolleyError, OSError."""
        arriving, offset = path.with_name(f".{path.name}.arriving"), 0
        await asyncio.to_thread(_clear, arriving)
        while (found := await self._trainer.record(record, offset))[1] > offset:
            lines, offset = found
            text = "".join(f"{line}\n" for line in lines).encode()
            await asyncio.to_thread(storage.append, arriving, text, durable=True)
        if offset:
            await asyncio.to_thread(_put, arriving, path)
            _log.info("restored a lost record", record=record, n_bytes=offset)

    async def watch(self) -> None:
        """Hand over new lines until cancelled."""
        await self._started.wait()
        while True:
            await self.finish()
            await asyncio.sleep(_POLL_S)

    async def finish(self) -> None:
        """Return when the trainer has everything."""

        async def hand_over() -> None:
            async with self._lock:
                if self._is_fresh:
                    self._is_fresh, self._offsets = False, dict.fromkeys(self._paths, 0)
                for record, path in self._paths.items():
                    await self._hand_over(record, path)

        await self._until(hand_over, "records are not handed over")

    async def _until(self, work: Callable[[], Awaitable[None]], problem: str) -> None:
        """Repeat `work` until it succeeds."""
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
            self._offsets[record] = 0  # the file was removed or truncated
        lines = await asyncio.to_thread(_lines, path, self._offsets[record])
        while lines:
            taken, size, n_bytes = list[str](), 0, 0
            while lines and (not taken or n_bytes + lines[0][0] <= _MOST_BYTES):
                length, line = lines.pop(0)
                size, n_bytes = size + length, n_bytes + length
                if line is not None:
                    taken.append(line)
            if taken:
                await self._send(record, taken)
            self._offsets[record] += size

    async def _send(self, record: Record, lines: list[str]) -> None:
        """Send lines; skip evaluations and samples that the trainer rejects, because they would block later ones.

        A change of the mixture is not skipped: tickets depend on it. Nor is a line skipped if its request was refused
        for another reason, such as a wrong token.
        """
        try:
            await self._trainer.hand_over(record, lines)
        except InputError as error:
            if record == "mixture" or type(error) not in (InputError, DecodeError):
                raise
            if len(lines) == 1:
                _log.error("the trainer refuses a line", record=record, line=lines[0][:200], reason=str(error))
                return
            for line in lines:
                await self._send(record, [line])


def _clear(arriving: Path) -> None:
    arriving.parent.mkdir(parents=True, exist_ok=True)
    arriving.unlink(missing_ok=True)


def _put(arriving: Path, path: Path) -> None:
    """Move a fetched record into place, unless the file has appeared: the trainer may fill a shared folder."""
    with contextlib.suppress(FileExistsError):
        os.link(arriving, path)
    arriving.unlink()
    storage.fsync(path.parent)


def _store_run_id(folder: RunFolder, run_id: str) -> None:
    """Store the run's id; a folder without records accepts any, because the queue may have held an old one first."""
    path = folder.recorded_run_id
    with storage.storage(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        known = path.read_text(encoding="utf-8") if path.exists() else run_id
        if known != run_id and any(record.exists() for record in folder.handed_over.values()):
            raise RunIdMismatch(
                f"{folder.path} holds records of another run id than the queue's",
                "a starting trainer updates the queue when it is ready; if the trainer's folder was emptied,"
                " empty this one as well",
            )
        if known != run_id or not path.exists():
            storage.replace(path, run_id.encode())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path, offset: int) -> list[tuple[int, str | None]]:
    """Return bytes and text of each whole line from `offset` on; the text is None if it is not a JSON object."""
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
