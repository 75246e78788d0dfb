"""Traces: places that all processes compute alike, spans across HTTP, and collectors that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

import httpx
import orjson
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import packages
from shared.clients.base import HttpClient
from shared.errors import ConfigError, Unavailable
from shared.process import telemetry, traced, tracing
from shared.services_schema import Limits
from shared.web.http import create_app
from tests.support.collector import collecting
from volley_traces.export import endpoint_of, exporting, tracing_to


class Kept(InMemorySpanExporter):
    """Exporter that keeps its spans; `named` has them by name."""

    def named(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.get_finished_spans()}


def _recorded(*of: str) -> dict[str, ReadableSpan]:
    """Record the spans of a small piece of work."""
    kept = Kept()
    with exporting(kept, "test", "r"):
        tracing.follow("r", "run_id")
        for name in of:
            with tracing.span(name, parent=tracing.of_ticket(7)):
                pass
    return kept.named()


def test_nothing_is_recorded_while_it_is_off() -> None:
    with tracing.span("a", {"volley.ticket": 1}, place=tracing.of_ticket(1)) as span:
        span.set({"b": 1})
        assert tracing.here() is None
        assert tracing.headers() == {}
        tracing.record("c", tracing.here(), 0.0)
    assert tracing.of_ticket(1) is None


def test_processes_find_the_same_trace_for_a_ticket_of_a_run() -> None:
    one, other = _recorded("orchestrator")["orchestrator"], _recorded("trainer")["trainer"]
    assert one.parent is not None
    assert one.context.trace_id == other.context.trace_id
    assert one.parent == other.parent
    assert one.context.span_id != other.context.span_id


def test_tickets_of_another_run_or_beginning_have_other_traces() -> None:
    with exporting(Kept(), "test", "r"):
        places = []
        for run, run_id, ticket in (("r", "a", 1), ("r", "a", 2), ("r", "b", 1), ("s", "a", 1)):
            tracing.follow(run, run_id)
            places.append(tracing.of_ticket(ticket))
        assert len({place.trace_id for place in places if place}) == 4


def test_the_root_of_a_ticket_stands_where_others_expect_it() -> None:
    kept = Kept()
    with exporting(kept, "test", "r"):
        place = tracing.of_ticket(3)
        with tracing.span("ticket", place=place):
            tracing.record("inside", tracing.here(), time.time() - 1)
    root, inside = kept.named()["ticket"], kept.named()["inside"]
    assert place is not None
    assert (root.context.trace_id, root.context.span_id) == place[:2]
    assert inside.parent is not None
    assert inside.parent.span_id == place.span_id
    assert inside.end_time - inside.start_time >= 1e9


async def test_a_ticket_that_is_given_back_leaves_its_place_to_the_next_worker() -> None:
    kept = Kept()

    async def work(seconds: float) -> None:
        with tracing.span("ticket", place=tracing.of_ticket(1)), tracing.span("episode"):
            await asyncio.sleep(seconds)

    with exporting(kept, "test", "r"):
        given_back = asyncio.ensure_future(work(60))
        await asyncio.sleep(0)
        given_back.cancel()
        await asyncio.gather(given_back, return_exceptions=True)
        await work(0)
    names = [span.name for span in kept.get_finished_spans()]
    assert sorted(names) == ["episode", "episode", "ticket"]


def test_an_error_is_named_and_passes_on() -> None:
    kept = Kept()
    with exporting(kept, "test", "r"), pytest.raises(Unavailable), tracing.span("call"):
        raise Unavailable("the answer was: I give up")
    span = kept.named()["call"]
    assert "give up" not in span.to_json(), "texts are not sent"
    assert span.attributes is not None
    assert span.attributes["error.type"] == "Unavailable"
    assert not span.status.is_ok


@pytest.mark.parametrize("flag", ["00", "01"])
def test_a_trace_that_its_caller_does_not_record_is_not_recorded_further_on(flag: str) -> None:
    kept, trace = Kept(), "a" * 32
    with exporting(kept, "test", "r"), tracing.span("inside", parent=tracing.received(f"00-{trace}-{'b' * 16}-{flag}")):
        sent = tracing.headers()["traceparent"]
    assert (sent[:36], sent[-2:]) == (f"00-{trace}-", flag)
    assert len(kept.get_finished_spans()) == int(flag)


@pytest.mark.parametrize("caller", [True, False])
async def test_a_request_continues_its_callers_trace(caller: bool) -> None:
    kept = Kept()
    app = create_app("service", limits=Limits(), tokens=None, ready=lambda: None)

    @app.get("/work/{id}")
    async def work(id: str) -> dict[str, str]:
        with tracing.span("inside"):
            return {"id": id}

    with exporting(kept, "test", "r"):
        async with HttpClient("http://service", transport=httpx.ASGITransport(app)) as client:
            if caller:
                with tracing.span("outside"):
                    await client.get("/work/3")
            else:
                await client.get("/work/3")
    spans = kept.named()
    if not caller:
        assert set(spans) == {"inside"}
        return
    outside, request, inside = spans["outside"], spans["GET /work/{id}"], spans["inside"]
    assert request.parent is not None
    assert inside.parent is not None
    assert outside.context.span_id == request.parent.span_id
    assert request.context.span_id == inside.parent.span_id
    assert dict(request.attributes or {})["http.response.status_code"] == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        "x" * 9000,
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "00-é-1-01",
        "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
    ],
)
async def test_a_header_that_is_no_traceparent_is_ignored(header: str) -> None:
    app = create_app("service", limits=Limits(), tokens=None, ready=lambda: None)
    kept = Kept()
    with exporting(kept, "test", "r"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
            answer = await client.get("/health", headers={"traceparent": header.encode()})
    assert answer.status_code == 200
    assert not kept.get_finished_spans()


def test_log_lines_carry_the_id_of_their_trace(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    try:
        telemetry.configure("env")
        log = telemetry.Log("t")
        with exporting(Kept(), "test", "r"), tracing.span("a"):
            log.warning("inside")
            place = tracing.here()
        log.warning("outside")
    finally:
        root.handlers[:] = before
    inside, outside = (orjson.loads(line) for line in capfd.readouterr().err.splitlines())
    assert place is not None
    assert inside["trace_id"] == f"{place.trace_id:032x}"
    assert "trace_id" not in outside


class Raising(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("no")

    def shutdown(self) -> None:
        raise OSError("no")


def test_an_exporter_that_raises_harms_nobody() -> None:
    with exporting(Raising(), "test", "r"):
        for _ in range(2000):
            with tracing.span("a"):
                pass


@pytest.fixture(params=["away", "failing", "slow"])
def bad_collector(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "away":
        yield "http://127.0.0.1:9"
        return
    with collecting(500, 0.0) if request.param == "failing" else collecting(200, 5.0) as collector:
        yield collector.url


def test_a_collector_that_fails_delays_nobody(bad_collector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    monkeypatch.setattr("volley_traces.export._END_S", 0.2)
    done = 0
    with tracing_to(bad_collector, "test", "r"):
        for _ in range(3000):
            with tracing.span("a"):
                done += 1
    assert done == 3000
    assert not tracing.is_on()


def test_spans_reach_a_collector() -> None:
    with collecting() as collector:
        with tracing_to(collector.url, "env", "gsm8k"), tracing.span("a", {"volley.ticket": 3}):
            pass
        (span,) = collector.spans
    assert (span.service, span.name, span.attributes["volley.ticket"]) == ("volley-env", "a", 3)


def test_a_share_of_the_traces_is_the_same_share_in_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    kept = Kept()
    with exporting(kept, "test", "r"):
        for ticket in range(64):
            with tracing.span("ticket", {"volley.ticket": ticket}, place=tracing.of_ticket(ticket)):
                pass
            tracing.record("train", tracing.of_ticket(ticket), time.time(), attributes={"volley.ticket": ticket})
    by_name = {
        name: {dict(span.attributes or {})["volley.ticket"] for span in kept.get_finished_spans() if span.name == name}
        for name in ("ticket", "train")
    }
    assert by_name["ticket"] == by_name["train"]
    assert 0 < len(by_name["ticket"]) < 64


@pytest.mark.parametrize(
    ("collector", "variables", "wanted"),
    [
        (None, {}, False),
        ("http://c:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_collector_comes_from_the_run_or_the_environment(
    collector: str | None, variables: dict[str, str], wanted: bool
) -> None:
    assert traced.is_wanted(collector, variables) is wanted


@pytest.mark.parametrize("lacks", ["opentelemetry-sdk", "the package volley-rl-traces"])
def test_a_run_that_wants_traces_needs_what_sends_them(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if "volley" in lacks:
        monkeypatch.setattr(packages, "found", lambda group: {})
    monkeypatch.setattr("volley_traces.sending._PACKAGE", "no_such_package.at_all")
    with pytest.raises(ConfigError, match=lacks), traced.traced("env", "r", "http://c:4318"):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    with traced.traced("env", "r", None):
        assert not tracing.is_on()


def test_spans_are_posted_below_the_collectors_address() -> None:
    for address in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert endpoint_of(address) == "http://c:4318/v1/traces"
