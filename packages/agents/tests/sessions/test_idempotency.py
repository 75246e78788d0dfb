"""Calls of one session under any order of repeats, disconnects and crashes: nothing is answered twice differently."""

import asyncio
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from packages.agents.tests.sessions.recorder import opening
from shared.errors import Conflict, Unavailable
from shared.types import VersionSpan
from tests.orchestrator.fakes import spec
from volley_agents.sessions.answers import RecordedCall, sampled_of
from volley_agents.sessions.failures import SessionOver
from volley_agents.sessions.messages import digest_of
from volley_agents.sessions.records import CallRequest
from volley_agents.sessions.sessions import Sessions
from volley_agents.sessions.tree import ROOT, Node
from volley_serving.dialects.records import Answered, Head, Usage


class Process:
    """A recorder's process: its loop, its sessions, and one session; `stop` is its end, by kill or in order."""

    def __init__(self, folder):
        self.loop = asyncio.new_event_loop()
        self.sessions = Sessions(folder / "sessions.sqlite3", 60.0, 10_000)
        self.worker = self.loop.create_task(self.sessions.work())
        self.session = self.run(self._session())

    async def _session(self):
        session = await self.sessions.at(spec()) or await self.sessions.begin(spec(), opening(), "r1")
        await session.load()
        return session

    def run(self, work):
        return self.loop.run_until_complete(work)

    def stop(self):
        self.worker.cancel()
        self.run(asyncio.wait([self.worker]))
        self.loop.close()


class Calls(RuleBasedStateMachine):
    """`answers` are what each key, and each body in order, was answered with."""

    bodies = st.sampled_from(["a", "b"])
    keyed = Bundle("keyed")

    @initialize()
    def start(self):
        self.folder = TemporaryDirectory()
        self.process = Process(Path(self.folder.name))
        self.texts = itertools.count()
        self.by_key, self.by_body = {}, {"a": [], "b": []}
        self.undelivered = {"a": [], "b": []}

    def teardown(self):
        self.process.stop()
        self.folder.cleanup()

    def sampled(self, gate=None):
        session, text = self.process.session, f"answer {next(self.texts)}"

        async def sample(number):
            if gate is not None:
                await gate.wait()
            node = session.number_nodes(1)[0]
            ids = np.array([len(text)], np.int32)
            digest = digest_of(text)
            version = (VersionSpan("e000001-s000000", 0, 1),)
            made = Node(
                node, ROOT, 0, "user", ids, ids, np.zeros(1, np.float32), version, "stop", digest, digest, (b"", b"")
            )
            return RecordedCall(number, Head("m"), [Answered(sampled_of(made), text)], Usage(1, 1), [made])

        return sample

    def ask(self, request, gate=None):
        return self.process.session.call(request, self.sampled(gate))

    def answer(self, request, *, delivered):
        recorded, entry = self.process.run(self.ask(request))
        if delivered:
            self.process.session.delivered(entry)
        return recorded.answers[0].content

    @rule(target=keyed, body=bodies)
    def key(self, body):
        return f"key {len(self.by_key)} {next(self.texts)}", body

    @rule(pair=keyed, delivered=st.booleans())
    def call_with_key(self, pair, delivered):
        key, body = pair
        text = self.answer(CallRequest(digest_of(body), key), delivered=delivered)
        assert self.by_key.setdefault(key, text) == text
        if text not in self.by_body[body]:
            self.by_body[body].append(text)
            self.undelivered[body].append(text)
        if delivered and text in self.undelivered[body]:
            self.undelivered[body].remove(text)

    @rule(pair=keyed)
    def call_with_key_of_another_body(self, pair):
        key, _ = pair
        if key in self.by_key:
            with pytest.raises(Conflict):
                self.process.run(self.ask(CallRequest(digest_of("other"), key)))

    @rule(body=bodies, delivered=st.booleans(), is_retry=st.booleans())
    def call(self, body, delivered, is_retry):
        text = self.answer(CallRequest(digest_of(body), None, is_retry), delivered=delivered)
        if self.undelivered[body]:
            assert text == self.undelivered[body][-1]
        elif not is_retry:
            assert text not in self.by_body[body]
        if text not in self.by_body[body]:
            self.by_body[body].append(text)
            self.undelivered[body].append(text)
        if delivered and text in self.undelivered[body]:
            self.undelivered[body].remove(text)

    @rule(body=bodies, n=st.integers(1, 3))
    def leave_before_the_answer(self, body, n):
        async def leave():
            gate, n_before = asyncio.Event(), self.process.session.n_calls
            key = f"left {next(self.texts)}"
            waiting = [asyncio.create_task(self.ask(CallRequest(digest_of(body), key), gate)) for _ in range(n)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            gate.set()
            await asyncio.sleep(0)
            assert self.process.session.n_calls == n_before

        self.process.run(leave())

    @rule(body=bodies)
    def ask_twice_at_once_with_one_key(self, body):
        async def both():
            gate, request = asyncio.Event(), CallRequest(digest_of(body), f"twice {next(self.texts)}")
            waiting = [asyncio.create_task(self.ask(request, gate)) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()  # the connection broke, and the client asks again
            gate.set()
            await asyncio.wait(waiting)
            again, entry = await self.ask(request)
            self.process.session.delivered(entry)
            text = waiting[1].result()[0].answers[0].content
            assert again.answers[0].content == text
            self.by_key[request.key] = text
            self.by_body[body].append(text)

        self.process.run(both())

    @rule()
    def crash(self):
        self.process.stop()
        self.process = Process(Path(self.folder.name))
        recorded = {text for texts in self.by_body.values() for text in texts}
        assert self.process.session.n_calls == len(recorded) == len(self.process.session.tree.nodes)


Calls.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCalls = Calls.TestCase


async def test_a_call_in_progress_is_given_up_when_its_session_ends(tmp_path):
    sessions = Sessions(tmp_path / "sessions.sqlite3", 60.0, 10)
    worker = asyncio.create_task(sessions.work())
    session = await sessions.begin(spec(), opening(), "r1")
    sampling, forever = asyncio.Event(), asyncio.Event()

    async def sample(number):
        sampling.set()
        await forever.wait()
        raise AssertionError(number)

    calling = asyncio.create_task(session.call(CallRequest(b"x"), sample))
    await sampling.wait()
    await session.end()
    with pytest.raises(Unavailable):
        await calling
    with pytest.raises(SessionOver):
        await session.call(CallRequest(b"x"), sample)
    worker.cancel()
    await asyncio.wait([worker])
