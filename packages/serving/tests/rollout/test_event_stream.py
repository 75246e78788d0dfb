"""An answer of events is never cut in silence."""

from __future__ import annotations

from typing import Any

import pytest

from volley_serving.event_stream import EventBuffer, EventStream


@pytest.mark.parametrize("begun", [False, True])
async def test_a_bug_does_not_look_like_the_end_of_an_answer(begun: bool) -> None:
    sent = list[Any]()

    async def produce(put: Any, _receive: Any) -> None:
        if begun:
            put(b"data: 1\n\n")
        raise ZeroDivisionError

    async def receive() -> Any: ...

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        await EventStream(produce, lambda _: b"")({}, receive, send)
    assert [one["type"] for one in sent] == ["http.response.start", "http.response.body"] * begun
    assert all(one["more_body"] for one in sent[1:])


async def test_events_that_the_client_has_not_taken_are_counted() -> None:
    put = EventBuffer()
    for data in (b"one", b"two"):
        put(data)
    assert (put.n_bytes, await put.take(), put.n_bytes) == (6, b"one", 3)
