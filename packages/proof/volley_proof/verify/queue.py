"""Compare Redis with ledger and checkpoint.

Everything finished in Redis is durable, and no ticket is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from dataclasses import dataclass

from redis.exceptions import RedisError

from shared import config
from shared.errors import VolleyError
from shared.queue.client import command, connect
from shared.queue.queue import TicketQueue
from shared.queue.records import QueueState
from shared.run import trust
from shared.run.folder import RunFolder
from shared.run.state import TrainerState
from shared.services_schema import ServicesSection
from volley.runs.run_file import is_held
from volley_proof.verify.tickets import lost
from volley_proof.verify.violation import Violation, ViolationKind

_PATIENCE_S = 6.0
_MOST_DONE = 1_000_000
_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class QueueContents:
    """Counters in Redis, and the finished tickets above `state.low`."""

    state: QueueState
    done: frozenset[int]


async def ask(folder: RunFolder, run: str) -> QueueContents | str:
    """Return the state of the run's Redis, or the reason why it is unavailable. Call it before reading files, which may
    only be newer.

    The folder names the address and the password file, so only a trusted folder is used.
    """
    if not trust.is_own(folder):
        return "not asked: no `volley up` of this user wrote the address in the folder (--trust uses it)"
    files = [path for path in (folder.config, folder.services) if path.exists()]
    services = config.load(files).config.services
    if services.redis_url is None:
        return "the run's folder names no Redis"
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await _asked(services, run)
    except TimeoutError:
        return f"the run's Redis address did not answer within {_PATIENCE_S:.0f} s"
    except VolleyError as error:
        is_own = folder.config.exists() and config.load([folder.config]).config.services.redis_url is None
        return "the run has stopped, so its queue was not read" if is_own and not is_held(folder) else error.detail
    except (
        RedisError,
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
        MemoryError,
        AttributeError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        return f"the run's Redis address does not answer as Redis does: {reason}"[:_MAX_DETAIL]


async def _asked(services: ServicesSection, run: str) -> QueueContents | str:
    assert services.redis_url is not None
    async with connect(services.redis_url, services.redis_password_file, services.tls.ca_file) as redis:
        queue = TicketQueue(redis, run)
        if int(await command(redis, "SCARD", queue.keys.done)) > _MOST_DONE:
            return (
                f"Redis holds more than {_MOST_DONE} finished tickets above its lowest unfinished one: no trainer"
                " leaves so many"
            )
        done = frozenset(int(ticket) for ticket in await command(redis, "SMEMBERS", queue.keys.done))
        state = await queue.state()
    return QueueContents(state, done) if state.epoch else "Redis knows nothing of the run"


def check(seen: QueueContents, head: TrainerState, known: Set[int]) -> list[Violation]:
    """Args: known: tickets with a disposition."""
    state, details = seen.state, []
    if state.version > head.step:
        details.append(f"Redis says that step {state.version} is durable, but the newest checkpoint is {head.version}")
    missing = state.issued - state.low - state.done - state.depth - state.leased
    if state.ready and missing > 0:
        details.append(f"{missing} issued tickets are neither finished, queued nor leased")
    violations = [Violation(ViolationKind.QUEUE, detail, step=head.step) for detail in details]
    return violations + lost(known, state.low, seen.done, "finished in Redis without a disposition")
