"""Spans of agents' calls: in the episode's trace, or in that of a caller that sends its own."""

from __future__ import annotations

import asyncio
from contextvars import Context
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from packages.agents.tests.sessions.programs import ASK
from packages.agents.tests.sessions.recorder import MODEL, recording, said
from shared.process import tracing
from volley_traces.export import exporting

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("caller", [None, CALLER, "nothing-of-the-kind"])
async def test_a_call_belongs_to_its_episode_or_to_its_caller(tmp_path: Path, caller: str | None) -> None:
    kept = InMemorySpanExporter()
    with exporting(kept, "orchestrator", "r"):
        async with recording(tmp_path, said("left")) as recorder:
            with tracing.span("episode", parent=tracing.of_ticket(1)):
                episode = tracing.here()
                async with recorder.playing() as session:
                    headers = {"traceparent": caller} if caller else {}
                    async with recorder.http(recorder.sessions.key_of(session)) as client:
                        asked = client.post(
                            "/chat/completions", json={"model": MODEL, "messages": ASK}, headers=headers
                        )
                        answer = await asyncio.create_task(asked, context=Context())
                    assert answer.status_code == 200, answer.text
    spans = {span.name: span for span in kept.get_finished_spans()}
    call, model = spans["agent call"], spans["model call"]
    assert episode is not None
    assert call.parent is not None
    assert model.parent is not None
    assert model.parent.span_id == call.context.span_id
    if caller == CALLER:
        request = spans["POST /v1/chat/completions"]
        assert f"{request.context.trace_id:032x}" == CALLER.split("-")[1]
        assert call.parent.span_id == request.context.span_id
        assert [link.context.span_id for link in call.links] == [episode.span_id]
    else:
        assert (call.parent.trace_id, call.parent.span_id) == episode[:2]
        assert not call.links
