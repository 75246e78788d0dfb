"""Calls into environment code: quick ones on the event loop, slow ones in a thread, all of them with one failure boundary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from services.env.environments.base import Environment, Step
from shared import telemetry
from shared.errors import Unavailable, VolleyError

_SECONDS = telemetry.Histogram(
    "volley_env_call_seconds", "Duration of a call into environment code", ["env", "call"], registry=telemetry.REGISTRY
)
_log = telemetry.Log("env")


class Runner:
    """Runs `reset` and `step`; `deadline_s` bounds how long a client waits for a call that runs in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, deadline_s: float) -> None:
        self._pool, self._deadline_s = pool, deadline_s

    async def run[T](self, name: str, environment: Environment, call: Step, function: Callable[[], T]) -> T:
        """Raises the environment's VolleyErrors as they are, Unavailable after the deadline, VolleyError for anything else."""
        started = time.perf_counter()
        try:
            with _failures(name, call):
                if call not in environment.slow:
                    return function()
                async with asyncio.timeout(self._deadline_s):
                    return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        except TimeoutError:
            raise Unavailable(f"{name}: {call} took longer than {self._deadline_s:g} s", "the episode is given up") from None
        finally:
            _SECONDS.labels(name, call).observe(time.perf_counter() - started)


@contextmanager
def _failures(name: str, call: Step) -> Iterator[None]:
    try:
        yield
    except (VolleyError, TimeoutError):
        raise
    except Exception as error:
        _log.exception("environment failed", env=name, call=call)
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise VolleyError(f"{name}: {call} failed with {what}", "a defect of the environment") from error
