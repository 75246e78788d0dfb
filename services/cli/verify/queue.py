"""Redis against ledger and checkpoint: nothing is finished there that is not durable here, and no ticket is missing."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from services.cli.layout import RunFolder
from services.cli.verify.violation import Kind, Violation
from shared import config
from shared.errors import ConfigError, QueueUnavailable
from shared.queue.client import command, connect
from shared.queue.queue import TicketQueue
from shared.queue.records import QueueState
from shared.state import TrainerState


@dataclass(frozen=True, slots=True)
class Seen:
    """What Redis says: its counters, and the finished tickets above `state.low`."""

    state: QueueState
    done: frozenset[int]


async def ask(folder: RunFolder, run: str) -> Seen | str:
    """What the run's Redis knows, or why it cannot be asked. Ask before the files are read: they only ever know more."""
    files = [path for path in (folder.config, folder.services) if path.exists()]
    services = config.load(files).config.services
    if services.redis_url is None:
        return "the run's folder names no Redis"
    try:
        async with connect(services.redis_url, services.redis_password_file, services.tls.ca_file) as redis:
            queue = TicketQueue(redis, run)
            done = frozenset(int(ticket) for ticket in await command(redis, "SMEMBERS", queue.keys.done))
            state = await queue.state()
    except (QueueUnavailable, ConfigError) as error:
        return error.detail
    return Seen(state, done) if state.epoch else "Redis knows nothing of the run"


def check(seen: Seen, head: TrainerState, known: Set[int]) -> list[Violation]:
    """`known` are the tickets with a disposition."""
    state, details = seen.state, []
    if state.version > head.step:
        details.append(f"Redis says that step {state.version} is durable, the newest checkpoint is {head.version}")
    missing = state.issued - state.low - state.done - state.depth - state.leased
    if state.ready and missing > 0:
        details.append(f"{missing} issued tickets are neither finished, queued nor leased")
    violations = [Violation(Kind.QUEUE, detail, step=head.step) for detail in details]
    finished = sorted({*range(1, state.low + 1), *seen.done} - known)
    return violations + [Violation(Kind.LOST, "finished in Redis without a disposition", ticket=ticket) for ticket in finished]
