"""Hand-over and recovery, from the constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.simulate.assumptions import CHIPS_PER_HOST, Assumptions, Size
from tools.simulate.fan_out import TRAINER, Links, spread

PIECES = 64


@dataclass(frozen=True, slots=True)
class HandOver:
    """Seconds from the end of an optimizer step: `made_s` until the trainer offers the version, `pulled_s` until the
    last server has its bytes, `serving_s` until the last serves it. `trainer_sent` are versions' worth of bytes that
    left the trainer, `alone_s` is `serving_s` if it sent them all itself.
    """

    model: str
    servers: int
    kind: str
    gigabytes: float
    made_s: float
    pulled_s: float
    serving_s: float
    alone_s: float
    trainer_sent: float


def hand_over(size: Size, n_servers: int, given: Assumptions, *, delta: bool) -> HandOver:
    full = size.published
    wire = full * given.delta.value if delta else full
    cores = given.cores.value
    making = [full / given.take.value, full / (cores * given.hash.value)]
    made_s = max([*making, full / (cores * given.encode.value)] if delta else making)  # one runs beside the other
    found = spread(n_servers, PIECES, wire / PIECES, _links(given))
    last = max(_placed_s(times, full, given, delta=delta) for times in found.arrivals)
    after = given.check.value + given.swap.value
    up = min(given.network.value, given.send.value)
    alone_s = n_servers * (wire / up + PIECES * given.latency.value / given.served_at_once.value)
    return HandOver(
        size.name,
        n_servers,
        "delta" if delta else "full",
        wire / 1e9,
        made_s,
        made_s + found.last_s,
        made_s + last + after,
        made_s + max(alone_s, last) + after,
        found.sent[TRAINER] / PIECES,
    )


def _links(given: Assumptions) -> Links:
    up, down = (min(given.network.value, one.value) for one in (given.send, given.receive))
    served, pulled = int(given.served_at_once.value), int(given.pulled_at_once.value)
    return Links(up, down, served, pulled, given.latency.value)


def _placed_s(arrivals: list[float], full: float, given: Assumptions, *, delta: bool) -> float:
    """Pieces are hashed, of a delta rebuilt, and placed one after the other as they come."""
    piece, cores = full / PIECES, given.cores.value
    rates = [given.place.value, cores * given.hash.value]
    slowest = min([*rates, cores * given.decode.value] if delta else rates)
    done = 0.0
    for at in arrivals:
        done = max(done, at) + piece / slowest
    return done


def step_s(size: Size, given: Assumptions) -> float:
    """Seconds of an optimizer step: six operations a token and parameter in use."""
    return 6 * size.active * given.tokens.value / (size.hosts * CHIPS_PER_HOST * given.flops.value)


def recovery(size: Size, distance: int, given: Assumptions) -> dict[str, Any]:
    """Seconds from the trainer's death until it is where it was, `distance` steps after its newest checkpoint: it reads
    it, and trains again what the log holds. Servers keep what they serve meanwhile.
    """
    restored = size.parameters * given.state.value / (size.hosts * given.read.value)
    again = distance * step_s(size, given)
    parts = {"boot_s": given.boot.value, "read_s": restored, "replay_s": again}
    return {"model": size.name, "distance": distance, **parts, "total_s": sum(parts.values())}


def joining(size: Size, given: Assumptions) -> float:
    """Seconds until a server that starts serves the newest version, which others have."""
    pulled = spread(1, PIECES, size.published / PIECES, _links(given))
    placed = _placed_s(pulled.arrivals[0], size.published, given, delta=False)
    return given.boot.value + placed + given.check.value + given.swap.value
