"""State of the trainer for /status, /ready and Prometheus, and requests of operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from services.trainer import activity
from services.trainer.metrics import prometheus
from shared.errors import Conflict, VolleyError
from shared.outcomes import FilterRule
from shared.process import host_memory
from shared.run.waits import Wait

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
    """Mutable state, used only on the event loop: the train loop writes it, the routes read it and add requests."""

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
    log_ended: str | None = None
    waits: dict[object, Wait] = field(default_factory=dict)
    set_aside: Mapping[str, str] = field(default_factory=dict)
    last: Any = None
    warnings: list[str] = field(default_factory=list[str])
    spot_checks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; a change of what /status shows is a sign of work."""
        if getattr(self, name, None) != value:
            activity.note()
        super().__setattr__(name, value)

    @property
    def waiting_for(self) -> str | None:
        """Reasons of all current waits, or None."""
        return "; ".join(dict.fromkeys(wait.why for wait in self.waits.values())) or None

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Show the wait in /status while the context is open."""
        key = object()
        self.waits[key] = wait
        try:
            yield
        finally:
            del self.waits[key]

    def wait_after(self, error: VolleyError) -> Wait:
        """Make the wait of a call that failed with `error`.

        The call waits on the service that the error names, else on the one that the present phase depends on.
        """
        return Wait(error.waits_on or ("env" if self.phase == "warm start" else "orchestrator"), str(error))

    @asynccontextmanager
    async def until_stop(self) -> AsyncIterator[None]:
        """Limit the body once a stop is asked for: it has one more second, then it gets a TimeoutError."""
        async with asyncio.timeout(_LAST_S if self.stopping else None) as limit:
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.discard(limit)

    def not_ready(self) -> str | None:
        """Reason why the trainer is not ready; None if it is."""
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
            "quiet_s": round(activity.quiet_s(), 1),
            "host_memory": host_memory.report(),
            "last": asdict(self.last) if self.last else None,
        }

    def ask(self, *, pause: bool | None = None, checkpoint: bool = False) -> None:
        """Record an operator's request; the train loop meets it between two steps. Raises Conflict."""
        if self.phase == "following":
            raise Conflict("this process of the trainer follows process 0", "send the request to process 0")
        self.paused = self.paused if pause is None else pause
        self.checkpoint_wanted = self.checkpoint_wanted or checkpoint
        self.changed.set()

    def stop(self) -> None:
        self.stopping = True
        self.changed.set()
        for limit in self.limits:
            limit.reschedule(asyncio.get_running_loop().time() + _LAST_S)

    def trained(self, step: int, version: str, metrics: Any) -> None:
        """Record a step. Args: metrics: a dataclass."""
        self.step, self.version, self.last = step, version, metrics

    def not_finite(self) -> None:
        prometheus.REFUSED.inc()

    def durable(self, step: int) -> None:
        self.durable_step = step
        prometheus.DURABLE.set(step)

    def saved(self, step: int) -> None:
        """Record a durable checkpoint."""
        self.checkpoint_step = step
        prometheus.CHECKPOINT.set(step)

    def followed(self, step: int | None) -> None:
        """Record the step up to which the bucket has the log; None before this trainer has written its head there."""
        self.bucket_step = step
        prometheus.BUCKET.set(step or 0)

    def ended(self, disposition: str, rule: FilterRule | None = None) -> None:
        """Count a ticket that ended; `rule` is the filter that dropped it, if one did."""
        self.tickets[disposition] = self.tickets.get(disposition, 0) + 1
        prometheus.TICKETS.labels(disposition).inc()
        if rule is not None:
            self.filtered[rule] = self.filtered.get(rule, 0) + 1
            prometheus.FILTERED.labels(rule).inc()

    def timed(self, part: str, seconds: float) -> None:
        prometheus.PART_SECONDS.labels(part).observe(seconds)
