"""Running episodes that survive a stop or the death of this process.

After each turn, the turn's sampled parts are stored with the request id of the environment's episode. When the ticket
comes back, the episode is opened with the same request id: if the environment service still has it, each stored turn is
answered as before; otherwise the turns are replayed with the same seed. Stored turns are not sampled again as long as
the conversation is the same, token by token; spans and log-probabilities are those that were stored.

Invariants
- A record belongs to one run id, ticket and sample; others never see it.
- Tokens of undone or stale weights are never used (see `TurnSampler`).
- The store only saves work: without it, the same tickets are generated again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.orchestrator.episodes.budget import SampledTurn, TokenBudget
from services.orchestrator.episodes.turn import SamplingSpec
from services.orchestrator.servers.balancer import VersionBounds
from shared import codec, routing
from shared.clients.rollout import Generation
from shared.errors import DecodeError, VolleyError
from shared.process import telemetry
from shared.types import Group, Trajectory, VersionSpan, WeightVersion

TABLE = """
CREATE TABLE IF NOT EXISTS partials (
    ticket INTEGER NOT NULL, sample INTEGER NOT NULL, turn INTEGER NOT NULL, place TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (ticket, sample, turn)
) WITHOUT ROWID;
"""
_FINISHED = 0
"""Number of the row that has the finished episode; turns are numbered from 1."""
_MOST_OBJECTS = 2**20
_log = telemetry.Log("partials")


type IsUsable = Callable[[WeightVersion, VersionBounds], bool]
"""Returns True if tokens of these weights may still be trained on."""


class Store(Protocol):
    """Database methods that `PartialRollouts` uses."""

    async def write(self, *statements: tuple[str, Sequence[Any]]) -> None: ...

    async def run[T](self, work: Callable[[sqlite3.Connection], T]) -> T: ...


@dataclass(eq=False)
class PartialRollouts:
    """Stored episodes of one run. Args: store: a database with `TABLE`; None stores nothing."""

    store: Store | None
    is_stopping: bool = False
    _run_id: str | None = None

    def keeps(self, spec: SamplingSpec) -> bool:
        """True if the environment's episode of a cancelled sample is kept for the next start."""
        return self.keeps_tokens and spec.ticket > 0

    @property
    def keeps_tokens(self) -> bool:
        """True if tokens of cancelled requests are kept for the next start."""
        return self.is_stopping and self.store is not None

    def stop(self) -> None:
        """Stop deleting environments' episodes, so that the next start can resume them. No effect without a store."""
        self.is_stopping = True

    async def begin(self, run_id: str, low: int) -> list[int]:
        """Set the run's id; delete records of other ids, and of tickets up to `low`, which are finished.

        Returns: at the first call, the tickets with records of an earlier process.
        """
        if self.store is None:
            return []
        is_first, self._run_id = self._run_id is None, run_id
        await self._write(
            ("DELETE FROM partials WHERE ticket <= ? OR substr(place, 1, ?) != ?", (low, len(run_id), run_id))
        )
        rows = await self._read("SELECT DISTINCT ticket FROM partials") if is_first else []
        return [int(ticket) for (ticket,) in rows]

    async def resume(self, spec: SamplingSpec, budget: TokenBudget, is_usable: IsUsable) -> Trajectory | str | None:
        """Return a sample's finished episode, or its request id with the stored turns in the budget."""
        if self.store is None or not spec.ticket or budget.used or budget.sampled:
            return None
        rows = await self._read(
            "SELECT turn, record FROM partials WHERE ticket = ? AND sample = ? AND place = ? ORDER BY turn",
            spec.ticket,
            spec.sample_index,
            self._task_key(spec),
        )
        try:
            return _restored(rows, spec, budget, is_usable)
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            budget.sampled.clear()
            _log.warning("a stored episode cannot be read", ticket=spec.ticket, error=repr(error))
            return None

    async def save_turn(self, spec: SamplingSpec, budget: TokenBudget, request_id: str) -> None:
        """Store the present turn, unless it is stored already."""
        number = budget.turn
        turn = budget.sampled[number - 1] if 0 < number <= len(budget.sampled) else None
        if self.store is None or not spec.ticket or turn is None or turn.stored_parts == len(turn.parts):
            return
        key = spec.ticket, spec.sample_index
        record = codec.pack(_turn_record(turn, request_id))
        await self._write(
            ("DELETE FROM partials WHERE ticket = ? AND sample = ? AND turn > ?", (*key, number)),
            ("INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?)", (*key, number, self._task_key(spec), record)),
        )
        turn.stored_parts = len(turn.parts)

    async def save_finished(self, spec: SamplingSpec, trajectory: Trajectory) -> None:
        """Store a finished episode: its group may be unfinished."""
        if self.store is not None and spec.ticket:
            record = Group(spec.ticket, trajectory.env, trajectory.task, (trajectory,)).encode()
            row = spec.ticket, spec.sample_index, _FINISHED, self._task_key(spec), record
            await self._write(("INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?)", row))

    async def forget(self, ticket: int) -> None:
        """Remove the records of a ticket that has ended."""
        if self.store is not None:
            await self._write(("DELETE FROM partials WHERE ticket = ?", (ticket,)))

    async def _read(self, sql: str, *values: Any) -> list[Any]:
        """Return rows; none if they cannot be read."""
        assert self.store is not None
        try:
            return await self.store.run(lambda db: db.execute(sql, values).fetchall())
        except VolleyError as error:
            _log.warning("stored episodes cannot be read", error=str(error))
            return []

    async def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Write; an error only costs the record."""
        assert self.store is not None
        try:
            await self.store.write(*statements)
        except VolleyError as error:
            _log.warning("an episode is not stored", error=str(error))

    def _task_key(self, spec: SamplingSpec) -> str:
        return f"{self._run_id}/{spec.env}/{spec.split}/{spec.index}/{spec.seed}"


def _restored(
    rows: Sequence[tuple[int, bytes]], spec: SamplingSpec, budget: TokenBudget, is_usable: IsUsable
) -> Trajectory | str | None:
    request_id: str | None = None
    for number, data in rows:
        if number == _FINISHED:
            (trajectory,) = Group.decode(data).trajectories
            versions = {WeightVersion.parse(span.version) for span in trajectory.all_spans()}
            if all(is_usable(version, spec.need) for version in versions):
                return trajectory
        elif number == len(budget.sampled) + 1:
            record = codec.unpack(data, "turn", _MOST_OBJECTS)
            request_id = str(record["request_id"])
            budget.sampled.append(_turn(record))
    return request_id


def _turn_record(turn: SampledTurn, request_id: str) -> dict[str, Any]:
    parts = [
        {
            "ids": part.output_ids,
            "logprobs": part.logprobs,
            "versions": [span.to_wire() for span in part.versions],
            "finish": part.finish_reason,
            "routed": None if part.routed_experts is None else routing.to_wire(part.routed_experts),
        }
        for part in turn.parts
    ]
    return {"request_id": request_id, "before": turn.before, "parts": parts}


def _turn(record: Any) -> SampledTurn:
    parts = [
        Generation(
            part["ids"],
            part["logprobs"],
            tuple(map(VersionSpan.from_wire, part["versions"])),
            str(part["finish"]),
            routed_experts=None if part["routed"] is None else routing.from_wire(part["routed"]),
        )
        for part in record["parts"]
    ]
    return SampledTurn(bytes(record["before"]), parts, len(parts))
