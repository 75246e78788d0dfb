"""Wiring of one process of a trainer of several.

Process 0 is the trainer. The others, the followers, have no queue and no clients; their backend makes the calls that
process 0 sends. They serve /health, /ready and /metrics like the trainer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from services.trainer.app import open_trainer
from services.trainer.routes import ROLES, router
from services.trainer.status import TrainerStatus
from shared.boot import CRASHED, RunningService
from shared.errors import ProcessLost, VolleyError
from shared.process import telemetry
from shared.process.imports import uncollected
from shared.schema import RunConfig
from shared.web.access import read_tokens
from shared.web.http import create_app
from volley_multihost.options import GroupOptions, group_options
from volley_multihost.processes import SAVES, Calls, Follower, end_process, follow, stream

_log = telemetry.Log("processes")


@asynccontextmanager
async def open_process(config: RunConfig) -> AsyncIterator[RunningService]:
    """Open the process of the trainer that `services.trainer.process_id` names. Raises ConfigError."""
    options = group_options(config)
    if options.process_id > 0:
        async with open_follower(config, options) as service:
            yield service
        return
    with uncollected():
        from volley_multihost.opening import open_leading  # JAX and Tunix

    async with open_trainer(config, partial(open_leading, options)) as service:
        yield service


@asynccontextmanager
async def open_follower(config: RunConfig, options: GroupOptions) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    services = config.services
    tokens, status = read_tokens(services.token_files), TrainerStatus(config.run.name, config.trainer.max_steps)
    app = create_app("trainer", limits=services.limits, tokens=tokens, ready=status.not_ready, roles=ROLES)
    app.state.status = status
    app.include_router(router)
    compute = partial(_compute, config, options)
    yield RunningService(app, [FollowerWorker(compute, options, status, services.limits.grace_s).run])


class FollowerWorker:
    """Computes in a thread until process 0 ends, which ends this process too.

    Args:
        compute: runs in that thread; calls its second argument once the model is built.
        grace_s: seconds after a stop in which process 0 may still need this process, for a last checkpoint.
    """

    def __init__(
        self,
        compute: Callable[[Follower, Callable[[], None]], None],
        options: GroupOptions,
        status: TrainerStatus,
        grace_s: float,
    ) -> None:
        self._compute, self._status, self._grace_s = compute, status, grace_s
        self._follower = Follower(options, self._leader_lost)

    async def run(self) -> None:
        """Run until cancelled. Raises VolleyError."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def ready() -> None:
            loop.call_soon_threadsafe(setattr, self._status, "phase", "following")

        def work() -> None:
            try:
                self._compute(self._follower, ready)
            except VolleyError as error:
                loop.call_soon_threadsafe(ended.set_exception, error)
            except Exception:  # noqa: BLE001 - the boundary
                _end_after_crash()

        threading.Thread(target=work, name="train", daemon=True).start()
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._status.stop()
            await asyncio.wait({ended}, timeout=self._grace_s)
            raise
        finally:
            self._follower.close()

    def _leader_lost(self, error: VolleyError) -> None:
        if self._status.stopping:
            os._exit(0)
        end_process(error)


def _save(follower: Follower, calls: Calls) -> None:
    """Write checkpoints while steps run."""
    try:
        with stream(SAVES), suppress(ProcessLost):
            follow(follower, calls)
    except Exception:  # noqa: BLE001 - the boundary, as above
        _end_after_crash()


def _end_after_crash() -> NoReturn:
    """End the process at once: out of step with the others, it cannot continue."""
    _log.exception(CRASHED)
    os._exit(1)


def _compute(config: RunConfig, options: GroupOptions, follower: Follower, ready: Callable[[], None]) -> None:
    with uncollected():
        from volley_multihost.distributed import join_devices, leave_devices
        from volley_multihost.opening import open_following  # JAX and Tunix
    coordinator = follower.join()
    opened = open_following(config, follower)
    join_devices(coordinator, options.n, options.process_id, config.trainer.mesh.n_devices)
    calls = opened.table()
    build = calls["build"]

    def built(given: Mapping[str, Any]) -> None:
        build(given)
        ready()

    threading.Thread(target=_save, args=(follower, opened.saving()), name="save", daemon=True).start()
    follow(follower, {**calls, "build": built})
    leave_devices()
    raise ProcessLost("process 0 of the trainer has ended")
