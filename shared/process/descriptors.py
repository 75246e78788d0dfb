"""Detect exhausted file descriptors, and suggest a remedy."""

from __future__ import annotations

import errno
import resource

HINT = (
    "raise the limit (ulimit -n, LimitNOFILE), or lower services.limits.max_connections or"
    " orchestrator.max_concurrent_episodes"
)


def exhausted(error: BaseException) -> str | None:
    """Return a message if `error` was caused by a lack of file descriptors of the process or machine; else None."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return None
        number = getattr(seen, "errno", None) or getattr(getattr(seen, "os_error", None), "errno", None)
        if number == errno.EMFILE:
            return f"this process has used all of its {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} file descriptors"
        if number == errno.ENFILE:
            return "this machine has no file descriptor left"
        seen = seen.__cause__ or seen.__context__
    return None
