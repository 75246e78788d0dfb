"""Traces: spans of what a ticket, an evaluation and a step went through, in all services.

Nothing is recorded until `use` names a tracer (the part `traces`); until then every function returns at once. The place
of a ticket's trace is computed from run and ticket, so no record on the wire carries it. Across HTTP the header
`traceparent` (W3C Trace Context) does.

Invariants: no function raises or waits, apart from the errors of the code inside a span. A service begins a trace for
a ticket, an evaluation's episode or a step; a request without `traceparent` has none.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol

__all__ = ["Span", "SpanContext", "Tracer", "follow", "here", "is_on", "of_step", "of_ticket", "record", "span", "use"]

type Attributes = Mapping[str, str | int | float | bool]
type Kind = Literal["internal", "server", "client"]


class SpanContext(NamedTuple):
    """A span as a parent of others: 128 bits of its trace, 64 of itself, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    is_sampled: bool = True


class Span(Protocol):
    """A span that has begun."""

    def set(self, attributes: Attributes) -> None: ...

    def rename(self, name: str) -> None: ...

    def fail(self, reason: str) -> None: ...


class Tracer(Protocol):
    """Recorder of spans. Its methods neither raise nor wait; arguments are those of the functions below."""

    def span(
        self,
        name: str,
        attributes: Attributes,
        *,
        kind: Kind,
        parent: SpanContext | None,
        link: SpanContext | None,
        place: SpanContext | None,
    ) -> AbstractContextManager[Span]: ...

    def record(
        self,
        name: str,
        parent: SpanContext,
        began: float,
        ended: float,
        attributes: Attributes,
        link: SpanContext | None,
    ) -> None: ...

    def here(self) -> SpanContext | None: ...

    def sampled(self, trace_id: int) -> bool: ...

    def headers(self) -> Mapping[str, str]: ...

    def received(self, traceparent: str) -> SpanContext | None: ...


class _NoSpan:
    def set(self, attributes: Attributes) -> None: ...

    def rename(self, name: str) -> None: ...

    def fail(self, reason: str) -> None: ...


_OFF: AbstractContextManager[Span] = nullcontext(_NoSpan())
_NONE: Mapping[str, str] = {}
_tracer: Tracer | None = None
_run = ""


def use(tracer: Tracer | None, run: str = "") -> None:
    """Record with this tracer from now on. Args: run: name of the run, for the places of its tickets."""
    global _tracer, _run
    _tracer, _run = tracer, run


def follow(run: str, run_id: str) -> None:
    """Set the run and its id; tickets of another id have other traces."""
    global _run
    _run = f"{run}/{run_id}"


def is_on() -> bool:
    return _tracer is not None


def span(
    name: str,
    attributes: Attributes = _NONE,
    *,
    kind: Kind = "internal",
    parent: SpanContext | None = None,
    link: SpanContext | None = None,
    place: SpanContext | None = None,
) -> AbstractContextManager[Span]:
    """Record what happens inside, with the class of an error that leaves it.

    Args:
        parent: default is the span around it; without one, a trace begins.
        link: another span that this one belongs with.
        place: its own place, for a trace that others join without being told. A span of this kind that is cancelled is
            not recorded: the work, and its place, pass to somebody else.
    """
    if _tracer is None:
        return _OFF
    return _tracer.span(name, attributes, kind=kind, parent=parent, link=link, place=place)


def record(
    name: str,
    parent: SpanContext | None,
    began: float,
    ended: float | None = None,
    attributes: Attributes = _NONE,
    link: SpanContext | None = None,
) -> None:
    """Record what has ended. `began` and `ended` are times as time.time() gives; the latter is now by default."""
    if _tracer is not None and parent is not None:
        _tracer.record(name, parent, began, time.time() if ended is None else ended, attributes, link)


def here() -> SpanContext | None:
    """Return the place of the present span, if there is one."""
    return None if _tracer is None else _tracer.here()


def of_ticket(ticket: int) -> SpanContext | None:
    """Return the place of a ticket's trace."""
    return _place(f"ticket {ticket}")


def of_step(step: int) -> SpanContext | None:
    """Return the place of a step's trace."""
    return _place(f"step {step}")


def _place(what: str) -> SpanContext | None:
    if _tracer is None:
        return None
    digest = hashlib.blake2b(f"volley {_run} {what}".encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1
    return SpanContext(trace_id, span_id, _tracer.sampled(trace_id))


def headers() -> Mapping[str, str]:
    """Return the headers that continue the present span in another service; empty without one."""
    return _tracer.headers() if _tracer is not None else _NONE


def received(traceparent: str) -> SpanContext | None:
    """Return the place that a request names; None if the header is none or tracing is off."""
    return _tracer.received(traceparent) if _tracer is not None and traceparent else None


def trace_id() -> str | None:
    """Return the id of the present trace, as 32 hexadecimal digits."""
    place = here()
    return f"{place.trace_id:032x}" if place else None
