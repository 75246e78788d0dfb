"""An environment service of rows, and a mixture on it, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from services.orchestrator.mixture.log import MixtureLog
from services.orchestrator.mixture.mixture import ConfiguredMixture, RunMixture
from services.orchestrator.mixture.suspension import Suspensions
from services.orchestrator.status import RunStatus
from shared.data_schema import CurriculumConfig
from shared.errors import NotFound, ServiceUnreachable
from shared.run.mixture import MixtureChange, SplitSizes, parse
from shared.run.shares import Member, weights_of
from tests.orchestrator.fakes import MemoryQueue

LAKE = {"name": "frozen_lake", "base": "frozen_lake", "config": {}}


def row(name: str, state: str = "active", weight: float = 1) -> dict[str, Any]:
    return {"name": name, "state": state, "weight": weight, "version": 1}


@dataclass
class RowSource:
    """`OffersEnvironments` of rows; `sizes` are of the training and the evaluation split, 10 and 4 unless told."""

    rows: list[dict[str, Any]] = field(default_factory=lambda: [LAKE, {"name": "sokoban"}])
    sizes: dict[str, tuple[int, int | None]] = field(default_factory=dict[str, tuple[int, int | None]])
    away: bool = False
    asked: list[str] = field(default_factory=list[str])

    async def environments(self) -> Any:
        if self.away:
            raise ServiceUnreachable("gone")
        return {"environments": self.rows}

    async def num_tasks(self, env: str, split: str) -> int:
        self.asked.append(env)
        if env not in {one["name"] for one in self.rows}:
            raise NotFound(f"there is no environment {env!r}")
        size = self.sizes.get(env, (10, 4))[split == "eval"]
        if size is None:
            raise NotFound(f"{env} has no split {split!r}")
        return size


class MixtureUnderTest:
    """A mixture whose tickets are reserved by `play`, as the ticket loop does."""

    def __init__(
        self,
        folder: Path,
        source: RowSource | None = None,
        members: dict[str, int] | None = None,
        queue: MemoryQueue | None = None,
        suspensions: Suspensions | None = None,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self.source, self.queue, self.path = source or RowSource(), queue or MemoryQueue(), folder / "mixture.jsonl"
        configured = {name: Member(Fraction(w)) for name, w in (members or {"frozen_lake": 1}).items()}
        self.status = RunStatus()
        self.log = MixtureLog(self.path, weights_of(configured), self._n_issued)
        sizes = {name: SplitSizes(20, 8) for name in configured}
        self.mixture = RunMixture(
            ConfiguredMixture("frozen_lake", configured, 7, curriculum),
            sizes,
            self.log,
            self.source,
            self.status,
            suspensions,
        )

    async def _n_issued(self) -> int:
        return (await self.queue.state()).issued

    async def look(self, *rows: dict[str, Any]) -> None:
        """The service offers frozen_lake, sokoban, and these."""
        if rows:
            self.source.rows = [LAKE, {"name": "sokoban"}, *rows]
        await self.mixture.look()

    async def play(self, n: int) -> list[str]:
        """The environments of the next n tickets."""
        found = []
        for _ in range(n):
            self.queue.issued += 1
            found.append((await self.mixture.task_of(self.queue.issued)).env)
        return found

    def lines(self) -> list[MixtureChange]:
        return [parse(line) for line in self.path.read_bytes().splitlines() if line.strip()]

    async def tasks(self, n: int) -> list[tuple[str, int]]:
        """Of the tickets up to n, without reserving them."""
        found = [await self.mixture.task_of(ticket) for ticket in range(1, n + 1)]
        return [(task.env, task.index) for task in found]
