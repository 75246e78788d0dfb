"""What the trainer is doing, for /status, /ready and Prometheus; and what it was asked to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from services.trainer.metrics import prometheus
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.metrics.supervised import SupervisedMetrics
from shared.errors import Conflict, VolleyError
from shared.outcomes import FilterRule
from shared.run.wedge import Wait

Phase = Literal[
    "loading",
    "warm start",
    "replaying",
    "starting",
    "waiting",
    "training",
    "saving",
    "paused",
    "done",
    "refused",
    "stopped",
    "following",
]
_LAST_S = 1.0
_STARTING: frozenset[Phase] = frozenset({"loading", "warm start", "replaying", "starting"})


@dataclass
class TrainerStatus:
    """Mutable on purpose, and only from the event loop: the loop writes, the routes read (and ask)."""

    run: str
    max_steps: int
    phase: Phase = "loading"
    step: int = 0
    durable_step: int = 0
    checkpoint_step: int = 0
    bucket: str | None = None
    bucket_step: int | None = None
    branched: str | None = None
    version: str | None = None
    epoch: int = 0
    waiting_groups: int = 0
    refused: str | None = None
    waits: dict[object, Wait] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)
    last: StepMetrics | SupervisedMetrics | None = None
    last_handover: Mapping[str, Any] | None = None
    tickets: dict[str, int] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict[str, float])
    plan: str = ""
    paused: bool = False
    stopping: bool = False
    checkpoint_wanted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    limits: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def waiting_for(self) -> str | None:
        """All that is waited for just now, or None."""
        return "; ".join(dict.fromkeys(wait.why for wait in self.waits.values())) or None

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Inside, /status tells of it."""
        key = object()
        self.waits[key] = wait
        try:
            yield
        finally:
            del self.waits[key]

    def wait_after(self, error: VolleyError) -> Wait:
        """Whom a call waits for that met the error: who the error names, else who the trainer works with just now."""
        return Wait(error.waits_on or ("env" if self.phase == "warm start" else "orchestrator"), str(error))

    @asynccontextmanager
    async def until_stop(self) -> AsyncIterator[None]:
        """A stop leaves what is inside a last second, and then ends it with a TimeoutError."""
        async with asyncio.timeout(_LAST_S if self.stopping else None) as limit:
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.discard(limit)

    def not_ready(self) -> str | None:
        """Why nobody should rely on the trainer now; None if they may."""
        if self.stopping:
            return "stopping"
        if self.refused:
            return self.refused
        if self.phase in _STARTING:
            return f"{self.phase}: {self.waiting_for}" if self.waiting_for else self.phase
        return None

    def to_json(self) -> dict[str, Any]:
        """The body of GET /status."""
        hidden = {"changed", "last", "limits", "waits"}
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
        waits = [asdict(wait) for wait in dict.fromkeys(self.waits.values())]
        return {
            **plain,
            "waiting_for": self.waiting_for,
            "waits": waits,
            "last": asdict(self.last) if self.last else None,
        }

    def ask(self, *, pause: bool | None = None, checkpoint: bool = False) -> None:
        """A wish of an operator, met at the next boundary between steps. Raises Conflict."""
        if self.phase == "following":
            raise Conflict("this process of the trainer does what process 0 does", "ask process 0")
        self.paused = self.paused if pause is None else pause
        self.checkpoint_wanted = self.checkpoint_wanted or checkpoint
        self.changed.set()

    def stop(self) -> None:
        self.stopping = True
        self.changed.set()
        for limit in self.limits:
            limit.reschedule(asyncio.get_running_loop().time() + _LAST_S)

    def trained(self, metrics: StepMetrics) -> None:
        self.step, self.version, self.last = metrics.step, metrics.version, metrics

    def learned(self, metrics: SupervisedMetrics, version: str) -> None:
        """A step of a run of supervised training."""
        self.step, self.version, self.last = metrics.step, version, metrics

    def not_finite(self) -> None:
        prometheus.REFUSED.inc()

    def durable(self, step: int) -> None:
        self.durable_step = step
        prometheus.DURABLE.set(step)

    def saved(self, step: int) -> None:
        """A checkpoint is durable."""
        self.checkpoint_step = step
        prometheus.CHECKPOINT.set(step)

    def followed(self, step: int | None) -> None:
        """The run's bucket has the log up to it; None while it has no head, or none that this trainer has put."""
        self.bucket_step = step
        prometheus.BUCKET.set(step or 0)

    def ended(self, disposition: str, rule: FilterRule | None = None) -> None:
        """Args: rule: which filter it was, of a ticket that was filtered."""
        self.tickets[disposition] = self.tickets.get(disposition, 0) + 1
        prometheus.TICKETS.labels(disposition).inc()
        if rule is not None:
            self.filtered[rule] = self.filtered.get(rule, 0) + 1
            prometheus.FILTERED.labels(rule).inc()

    def timed(self, part: str, seconds: float) -> None:
        prometheus.PART_SECONDS.labels(part).observe(seconds)
