"""The run's bucket: restores an empty folder at startup, then receives the folder's changes in the background.

Training waits for the bucket only at startup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from services.trainer.loop.pending import PendingWork
from services.trainer.status import TrainerStatus
from shared.errors import Conflict, Forbidden, NotFound, Unavailable, WeightsError
from shared.process import telemetry
from shared.queue.records import QueueState
from shared.run import archive, commits
from shared.run.folder import RunFolder
from shared.run.waits import Wait
from shared.types import WeightVersion
from volley_bucket.run.head import files_of_lines
from volley_bucket.run.restore import FolderRestore
from volley_bucket.run.threads import in_thread
from volley_bucket.run.writer import BucketWriter

_PERIOD_S, _RETRY_S, _CHECK_S = 1.0, 5.0, 5.0
_log = telemetry.Log("bucket")


class RunBucket:
    """Restores and uploads the run's folder for one incarnation of the trainer.

    Args:
        end_s: most seconds that the end of a run waits for the bucket.
    """

    def __init__(
        self,
        restore: FolderRestore,
        writer: BucketWriter,
        folder: RunFolder,
        status: TrainerStatus,
        end_s: float,
    ) -> None:
        self._restore, self._writer, self._folder, self._status = restore, writer, folder, status
        self._is_open, self._stop = False, asyncio.Event()
        self._end_s = end_s
        self._limit: asyncio.Timeout | None = None

    async def restore(self, asked: Callable[[], Awaitable[QueueState]]) -> WeightVersion | None:
        """Restore an empty folder; return the restored version.

        A folder with content needs the bucket only if the queue, whose state `asked` returns, knows a later trainer or
        step than the folder: the run may have continued in another folder.

        Raises as `FolderRestore.run`, and ConfigError if the bucket has continued from another folder.
        """
        found = None
        if await asyncio.to_thread(lambda: self._restore.is_wanted):
            found = await self._run_before_stop(self._restore.run, "which the empty folder is restored from")
        elif not await self._is_known() and self._folder.bucket.exists() and await self._is_behind(asked):
            why = "because the queue knows of a later trainer than the folder: another folder may have continued"
            await self._run_before_stop(self._writer.check_known, why)
        self._is_open = True
        return found

    async def _is_behind(self, asked: Callable[[], Awaitable[QueueState]]) -> bool:
        known, newest = await asked(), await asyncio.to_thread(commits.newest, self._folder)
        last = max(archive.epochs(self._folder.archive), default=0)
        return known.epoch > last or known.version > (newest.step if newest else 0)

    async def _is_known(self) -> bool:
        """True if the bucket answers soon, and is new or this folder's. Raises ConfigError as `BucketWriter.check`."""
        with suppress(TimeoutError, Unavailable, Forbidden, NotFound):
            async with asyncio.timeout(_CHECK_S):
                return await in_thread(self._writer.check)
        return False

    async def _run_before_stop[T](self, call: Callable[[], T], why: str) -> T:
        """Run a blocking call of the bucket. Raises Unavailable if it has not returned a second after a stop."""
        self._status.waits[self] = Wait("disk", f"the run's bucket, {why}")
        try:
            async with self._status.until_stop():
                return await in_thread(call)
        except TimeoutError as error:
            raise Unavailable("the run's bucket did not answer before the stop") from error
        finally:
            self._status.waits.pop(self, None)

    def check_open(self) -> None:
        """Raise Unavailable until the restore is over: nothing else may write to the folder before."""
        if not self._is_open:
            raise Unavailable("the run's folder is not ready: the trainer may still restore it from the run's bucket")

    @property
    def needed_step(self) -> int:
        """First step whose commit record the folder must keep: the bucket may not have later ones."""
        return self._status.bucket_step or 0

    async def follow(self, pending: Callable[[], PendingWork], epoch: int) -> None:
        """Upload everything that becomes durable, until `stop`, and then once more.

        Raises Fenced if another trainer has begun, and ConfigError if the bucket is not this run's.
        """
        self._limit = limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit_end()
                await self._until_stop(pending, epoch)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._writer.close()
            self._status.waits.pop(self, None)
            if (version := pending().version).step != self._status.bucket_step:
                _log.warning("the bucket is behind at the end", version=str(version), has=self._status.bucket_step)

    async def _until_stop(self, pending: Callable[[], PendingWork], epoch: int) -> None:
        done: Any = None
        while True:
            is_last, now = self._stop.is_set(), pending()
            wanted = now.version, now.saved, await asyncio.to_thread(self._sizes)
            is_done = wanted == done or await self._try(now, epoch)
            done = wanted if is_done else done
            if is_last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S if is_done else _RETRY_S):
                    await self._stop.wait()

    def stop(self) -> None:
        """End `follow` after one more upload, or after `end_s` if the bucket does not answer."""
        self._stop.set()
        self._limit_end()

    def _limit_end(self) -> None:
        if self._stop.is_set() and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._end_s)

    async def _try(self, now: PendingWork, epoch: int) -> bool:
        """Upload the pending work; return True if the bucket has it."""
        status, work = self._status, asyncio.ensure_future(in_thread(lambda: self._upload(now, epoch)))
        try:
            while not (await asyncio.wait({work}, timeout=_PERIOD_S))[0]:
                if status.phase == "done":
                    status.waits[self] = self._behind(now, "on its way")
            work.result()
        except (Conflict, Unavailable, Forbidden, NotFound, WeightsError, OSError) as error:
            _log.warning("the bucket is behind", version=str(now.version), reason=str(error))
            status.waits[self] = self._behind(now, str(error))
            return False
        finally:
            work.cancel()
            status.followed(self._writer.step)
        status.waits.pop(self, None)
        return True

    def _upload(self, now: PendingWork, epoch: int) -> None:
        if not self._writer.is_claimed:
            self._writer.claim(epoch)
        self._writer.upload(now.state, now.saved)

    def _behind(self, now: PendingWork, why: str) -> Wait:
        return Wait("disk", f"the run's bucket, which has step {self._status.bucket_step} of {now.version.step}: {why}")

    def _sizes(self) -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in files_of_lines(self._folder).values()]
