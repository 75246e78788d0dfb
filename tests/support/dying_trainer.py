"""`python -m tests.support.dying_trainer`: the simulated trainer, which kills itself with SIGKILL before or after the
first call that DIE_AT names: `record`, `ledger`, `commit` or `save`, as in `before record`. Calls of a step that it
made itself alone count: starts and repairs make some of them, too. `change 7` is before the seventh change of its
bucket.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any

from services.trainer.checkpoints.store import CheckpointFolders
from services.trainer.loop.ledger import LedgerFile
from shared.boot import main
from shared.queue.queue import TicketQueue
from shared.run.commits import CommitLog
from tools.simulated.trainer import open_service
from volley_bucket.objects import Bucket

CALLS: dict[str, tuple[type, str]] = {
    "record": (CommitLog, "append"),
    "ledger": (LedgerFile, "append"),
    "commit": (TicketQueue, "commit"),
    "save": (CheckpointFolders, "save"),
}
_recorded = list[int]()


class _Watch:
    """A call that is seen before and after."""

    def __init__(self, name: str, at: str | None) -> None:
        self._name, self._at = name, at

    def see(self, when: str, args: tuple[Any, ...]) -> None:
        of_step = bool(args[0].recent) if self._name == "record" else bool(_recorded)
        if of_step and self._at == f"{when} {self._name}" and not (self._name == "commit" and not args[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        if of_step and self._name == "record":
            _recorded.append(args[0].step)


def watch(name: str, at: str | None) -> None:
    owner, method = CALLS[name]
    real: Callable[..., Any] = getattr(owner, method)
    seen = _Watch(name, at)

    @wraps(real)
    async def called_async(self: Any, *args: Any) -> Any:
        seen.see("before", args)
        result = await real(self, *args)
        seen.see("after", args)
        return result

    @wraps(real)
    def called(self: Any, *args: Any) -> Any:
        seen.see("before", args)
        result = real(self, *args)
        seen.see("after", args)
        return result

    setattr(owner, method, called_async if name == "commit" else called)


def watch_bucket(at: str) -> None:
    changes = count(1)
    for method in ("upload", "swap"):
        real: Callable[..., Any] = getattr(Bucket, method)

        @wraps(real)
        def called(*args: Any, real: Callable[..., Any] = real) -> Any:
            if at == f"change {next(changes)}":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(Bucket, method, called)


if __name__ == "__main__":
    watch_bucket(os.environ.get("DIE_AT", ""))
    for one in CALLS:
        watch(one, os.environ.get("DIE_AT"))
    main("trainer", open_service=open_service)
