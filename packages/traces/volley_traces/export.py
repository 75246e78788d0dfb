"""The tracer of OpenTelemetry's SDK: spans go to a collector by OTLP over HTTP, in batches, from a thread of their own.

At most `_MOST_QUEUED` spans wait; when a collector is away or slow, later ones are dropped. At the end of the process
the collector has `_END_S` for those that wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.process import tracing
from shared.process.telemetry import Log
from shared.process.tracing import Attributes, Kind, SpanContext

_MOST_QUEUED = 8192
_QUEUE_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE"
_END_S = 2.0
_KINDS: Mapping[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
}
type Count = Callable[[str, int], None]
"""Counts spans by state: those that ended, and those of them that were sent or failed."""
_W3C = TraceContextTextMapPropagator()
_log = Log("traces")
_given: ContextVar[SpanContext | None] = ContextVar("given", default=None)


def _ignore(state: str, n: int) -> None: ...


@contextlib.contextmanager
def tracing_to(collector: str | None, service: str, run: str, count: Count = _ignore) -> Iterator[None]:
    """Record the spans of this process and send them to the collector, until the end of the block.

    Args:
        collector: its address, http://HOST:4318; None for the one in OpenTelemetry's variables of the environment,
            which also give headers, certificates, the share of traces (OTEL_TRACES_SAMPLER) and further attributes.
    """
    with exporting(OTLPSpanExporter(endpoint=collector and endpoint_of(collector)), service, run, count):
        yield


def endpoint_of(collector: str) -> str:
    """Return the address that spans are posted to."""
    base = collector.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


@contextlib.contextmanager
def exporting(exporter: SpanExporter, service: str, run: str, count: Count = _ignore) -> Iterator[None]:
    """Record the spans of this process and give them to an exporter of the SDK, until the end of the block."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it reports every batch; `_Reported` the first
    resource = Resource.create(
        {
            "service.namespace": "volley",
            "service.name": f"volley-{service}",
            "service.instance.id": f"{os.uname().nodename}/{os.getpid()}",
            "volley.run": run,
        }
    )
    provider = TracerProvider(id_generator=_Ids(), resource=resource, shutdown_on_exit=False)
    n_queued = None if _QUEUE_VARIABLE in os.environ else _MOST_QUEUED
    provider.add_span_processor(_Counted(_Reported(exporter, count), count, n_queued))
    tracing.use(SdkTracer(provider), run)
    try:
        yield
    finally:
        tracing.use(None)
        ending = threading.Thread(target=provider.shutdown, name="end of traces", daemon=True)
        ending.start()
        ending.join(_END_S)


class _Ids(RandomIdGenerator):
    """Random ids, except for a span whose place is given."""

    def generate_trace_id(self) -> int:
        place = _given.get()
        return place.trace_id if place else super().generate_trace_id()

    def generate_span_id(self) -> int:
        place = _given.get()
        return place.span_id if place else super().generate_span_id()


class _Counted(BatchSpanProcessor):
    def __init__(self, exporter: SpanExporter, count: Count, n_queued: int | None) -> None:
        super().__init__(exporter, max_queue_size=n_queued)
        self._count = count

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._count("ended", 1)
        super().on_end(span)


class _Reported(SpanExporter):
    """Reports in the log when the collector stops taking spans, and when it takes them again."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter, self._count, self._fails = exporter, count, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        reason = "it did not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - the boundary: whatever an exporter raises, the service goes on
            result, reason = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        failed = result is not SpanExportResult.SUCCESS
        self._count("failed" if failed else "sent", len(spans))
        if failed != self._fails:
            self._fails = failed
            if failed:
                _log.warning("the collector takes no spans: they are dropped", reason=reason)
            else:
                _log.info("the collector takes spans again")
        return result

    def shutdown(self) -> None:
        with contextlib.suppress(Exception):
            self._exporter.shutdown()


class _SdkSpan:
    """`tracing.Span` of the SDK's."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, reason: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, reason))


class SdkTracer:
    """`tracing.Tracer` that makes spans of a provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("volley")

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes,
        *,
        kind: Kind,
        parent: SpanContext | None,
        link: SpanContext | None,
        place: SpanContext | None,
    ) -> Iterator[_SdkSpan]:
        around = Context() if place else _below(parent) if parent else None
        token = _given.set(place)
        span = self._tracer.start_span(
            name, around, kind=_KINDS[kind], attributes=attributes, links=_links(link), record_exception=False
        )
        _given.reset(token)
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            try:
                yield _SdkSpan(span)
            except (CancelledError, GeneratorExit):
                span.set_attribute("volley.cancelled", True)
                if place is None:
                    span.end()
                raise
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))  # its text may quote an answer
                span.end()
                raise
            span.end()

    def record(
        self,
        name: str,
        parent: SpanContext,
        began: float,
        ended: float,
        attributes: Attributes,
        link: SpanContext | None,
    ) -> None:
        span = self._tracer.start_span(
            name, _below(parent), attributes=attributes, links=_links(link), start_time=_nanoseconds(began)
        )
        span.end(_nanoseconds(max(began, ended)))

    def here(self) -> SpanContext | None:
        context = trace.get_current_span().get_span_context()
        return SpanContext(context.trace_id, context.span_id, context.trace_flags.sampled) if context.is_valid else None

    def sampled(self, trace_id: int) -> bool:
        return self._provider.sampler.should_sample(Context(), trace_id, "").decision.is_sampled()

    def headers(self) -> Mapping[str, str]:
        if (place := self.here()) is None:
            return {}
        return {"traceparent": f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.is_sampled:02x}"}

    def received(self, traceparent: str) -> SpanContext | None:
        context = trace.get_current_span(_W3C.extract({"traceparent": traceparent}, Context())).get_span_context()
        return SpanContext(context.trace_id, context.span_id, context.trace_flags.sampled) if context.is_valid else None


def _below(parent: SpanContext) -> Context:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.is_sampled else trace.TraceFlags.DEFAULT)
    context = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(context), Context())


def _links(link: SpanContext | None) -> Sequence[trace.Link]:
    if link is None:
        return ()
    context = trace.get_current_span(_below(link)).get_span_context()
    return (trace.Link(context),)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
