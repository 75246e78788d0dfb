"""End a supervisor's process groups after the supervisor was killed. Standard library only; started by its path.

Protocol: lines `+PGID` and `-PGID` on stdin add and remove a group. End of file means that the supervisor has ended:
every group still listed gets SIGTERM, and SIGKILL after `GRACE_S` seconds. The reaper ends when no group is left, or
`KILLED_S` seconds later: it holds the lock of the supervisor's run until then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE_S, KILLED_S = 10.0, 5.0


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line[1:])
        groups.add(number) if line[0] == "+" else groups.discard(number)
    send(groups, signal.SIGTERM)
    wait(groups, GRACE_S)
    send(groups, signal.SIGKILL)
    wait(groups, KILLED_S)


def wait(groups: set[int], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while any(map(alive, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)


def send(groups: set[int], number: signal.Signals) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def alive(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return False


if __name__ == "__main__":
    main()
