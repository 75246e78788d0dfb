"""Time of the trainer's last sign of work, for /status.

The training thread notes each micro-batch that the devices have finished, the event loop each change of the status. A
step or a warm start may thus take any time and is seen to advance, while a device that hangs is seen to hang.
"""

from __future__ import annotations

import time

_last = [time.monotonic()]  # one trainer a process


def note() -> None:
    """Record a sign of work. Any thread may call it."""
    _last[0] = time.monotonic()


def quiet_s() -> float:
    """Return the seconds since the last sign of work."""
    return time.monotonic() - _last[0]
