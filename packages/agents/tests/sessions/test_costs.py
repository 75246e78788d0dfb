"""Costs of requests of a session, or without a key, for the orchestrator."""

import threading
from dataclasses import replace

import pytest

from packages.agents.tests.sessions.recorder import MODEL, TOKENIZER, WIDE, recording

LONG = "play " * 200_000
ROUTES = {
    "/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/completions": {"prompt": LONG},
    "/responses": {"input": LONG},
    "/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]},
    "/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
}


@pytest.fixture
def tokenized(monkeypatch):
    """Lengths of the texts that are tokenized, and the names of the threads."""
    found, encode = list[tuple[int, str]](), type(TOKENIZER).encoded

    def watched(self, text):
        encoding = encode(self, text)
        found.append((len(text), threading.current_thread().name))
        return encoding

    monkeypatch.setattr(type(TOKENIZER), "encoded", watched)
    return found


@pytest.mark.parametrize("path", ROUTES)
async def test_a_text_longer_than_the_context_is_refused_untokenized(tmp_path, tokenized, path):
    async with recording(tmp_path, bounds=replace(WIDE, context_length=64)) as recorder, recorder.playing() as session:
        http = recorder.http(recorder.sessions.key_of(session))
        answer = await http.post(path, json={"model": MODEL, **ROUTES[path]})
        assert (answer.status_code, "maximum context length" in answer.text) == (400, True)
        assert max((n for n, _ in tokenized), default=0) < 1000
        assert session.limit == (None if "count" in path else "context"), "counting is no call"


@pytest.mark.parametrize("path", ROUTES)
async def test_a_text_is_tokenized_beside_the_event_loop(tmp_path, tokenized, path):
    async with recording(tmp_path) as recorder, recorder.playing() as session:
        fields = ROUTES[path]
        short = {"prompt": "play"} if "prompt" in fields else {"input": "play"} if "input" in fields else {}
        short = short or {"messages": [{"role": "user", "content": "play"}]}
        tokenized.clear()
        await recorder.http(recorder.sessions.key_of(session)).post(path, json={"model": MODEL, **fields, **short})
        assert tokenized
        assert {name.rpartition("_")[0] for _, name in tokenized} == {"tokenize"}


def test_tokenizing_does_not_hold_the_interpreters_lock():
    beats, ended = [0], threading.Event()

    def beat():
        while not ended.wait(0.001):
            beats[0] += 1

    thread = threading.Thread(target=beat)
    thread.start()
    before = beats[0]
    TOKENIZER.encode(LONG)
    n = beats[0] - before
    ended.set()
    thread.join()
    assert n > 10, "it takes hundreds of them"


@pytest.mark.parametrize("method_path", ["GET /models", *(f"POST {path}" for path in ROUTES)])
async def test_a_key_is_checked_before_a_body_is_read(tmp_path, method_path):
    method, path = method_path.split()
    async with recording(tmp_path) as recorder:
        live, over = await recorder.begin(1), await recorder.begin(2)
        pruned = await recorder.begin(3)
        for session in (over, pruned):
            await session.void("over")
        await recorder.sessions.prune()
        await recorder.sessions._store.run(
            lambda db: db.execute("DELETE FROM sessions WHERE id = ?", (pruned.record.id,))
        )
        key_of = recorder.sessions.key_of
        for key, status in ((key_of(live)[:-1], 401), ("", 401), (key_of(over), 410), (key_of(pruned), 410)):
            read = False

            async def body():
                nonlocal read
                read = True
                yield b"{}"

            answer = await recorder.http(key).request(method, path, content=body())
            assert (answer.status_code, read) == (status, False)
