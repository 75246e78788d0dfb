"""Open files, of which a process may have a limited number: what their end looks like, and what helps against it."""

from __future__ import annotations

import errno
import resource

HINT = (
    "raise it (ulimit -n, LimitNOFILE), or lower services.limits.max_connections or"
    " orchestrator.max_concurrent_episodes"
)


def exhausted(error: BaseException) -> str | None:
    """That this process, or the machine, may open no more files, if it is what caused `error`; else None."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return None
        number = getattr(seen, "errno", None) or getattr(getattr(seen, "os_error", None), "errno", None)
        if number == errno.EMFILE:
            return (
                f"this process has no file descriptor left of the {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} it"
                " may open"
            )
        if number == errno.ENFILE:
            return "this machine has no file descriptor left"
        seen = seen.__cause__ or seen.__context__
    return None
