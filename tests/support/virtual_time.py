"""Tests on an event loop whose clock does not wait: when all tasks wait, it moves to the next timer.

Deadlines and delays then meet in the same order on any machine. For code that waits only for the loop: time does not
stop for threads, processes and sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from tools.bench.simulation import simulate


def virtual_time[**P](test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in virtual time."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        simulate(test(*args, **kwargs))

    return run
