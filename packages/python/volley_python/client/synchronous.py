"""`volley.Client`: the same as `AsyncClient`, without asyncio.

The client's event loop runs in a thread of its own, because a notebook's thread has a running one already.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from volley_python.client.asynchronous import AsyncClient, AsyncSession, end_after
from volley_python.client.records import RunEvent, Trajectories

if TYPE_CHECKING:
    from volley_python.client.tables import Table


class _LoopThread:
    """Event loop in a daemon thread, which starts with the first call, in each process that a program forks too."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting, self._process = threading.Lock(), os.getpid()

    def call[T](self, made: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. If waiting for it is interrupted, the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(made, self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate[T](self, made: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                yield self.call(_next(made))
            except StopAsyncIteration:
                return

    def close(self) -> None:
        self._forget_parents()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        self._forget_parents()
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="volley-client", daemon=True).start()
            return self._loop

    def _forget_parents(self) -> None:
        """In a forked process, give up the loop: its thread runs in the parent only."""
        if self._process != os.getpid():
            self._loop, self._starting, self._process = None, threading.Lock(), os.getpid()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):
        loop.run_forever()
    loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop, and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _next[T](made: AsyncIterator[T]) -> T:
    return await anext(made)


class Session:
    """One episode of an agent; attributes and methods as of `AsyncSession`."""

    def __init__(self, session: AsyncSession, loop: _LoopThread) -> None:
        self._session, self._loop = session, loop
        self.id, self.key, self.base_url, self.model = session.id, session.key, session.base_url, session.model
        self.env, self.task, self.ticket = session.env, session.task, session.ticket
        self.sample_index, self.messages, self.tools = session.sample_index, session.messages, session.tools
        self.judged, self.expires_at = session.judged, session.expires_at

    def __repr__(self) -> str:
        return repr(self._session).replace("AsyncSession", "Session", 1)

    def chat(self, messages: list[Mapping[str, Any]], **fields: Any) -> Mapping[str, Any]:
        """Call the model; return the answer's message."""
        return self._loop.call(self._session.chat(messages, **fields))

    def end(self, output: str = "") -> None:
        """End the session with the agent's output."""
        self._loop.call(self._session.end(output))

    def fail(self, reason: str) -> None:
        """End the session because the agent failed."""
        self._loop.call(self._session.fail(reason))

    def reward(self, reward: float, *, success: bool = False, components: Mapping[str, float] | None = None) -> None:
        """Set the reward of the ended session, if the environment does not judge."""
        self._loop.call(self._session.reward(reward, success=success, components=components))

    def describe(self) -> Mapping[str, Any]:
        """Return state, calls and turns of the session."""
        return self._loop.call(self._session.describe())


class Client:
    """Client of one run; arguments, methods and errors as of `AsyncClient`, in whose place it blocks."""

    def __init__(
        self,
        run: Path | str | None = None,
        *,
        env: str | None = None,
        orchestrator: str | None = None,
        token: str | None = None,
        ca_file: Path | str | None = None,
        trust: bool = False,
    ) -> None:
        self._client = AsyncClient(run, env=env, orchestrator=orchestrator, token=token, ca_file=ca_file, trust=trust)
        self._loop = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client's thread. The end of the program does so too."""
        self._loop.close()

    def environments(self) -> Mapping[str, Any]:
        """Return `{"environments": [...], "installed": [...]}`: names, states, versions and weights."""
        return self._loop.call(self._client.environments())

    def submit(
        self,
        file: Path | str | None = None,
        *,
        code: str | None = None,
        name: str | None = None,
        weight: float = 0.0,
        entry: str | None = None,
        config: Mapping[str, Any] | None = None,
        replace: bool = False,
        wait_s: float | None = 600.0,
    ) -> Mapping[str, Any]:
        """Submit an environment to the run, and wait until it is validated. Returns its row."""
        given: dict[str, Any] = {"code": code, "name": name, "weight": weight, "entry": entry, "config": config}
        return self._loop.call(self._client.submit(file, **given, replace=replace, wait_s=wait_s))

    def environment(self, name: str) -> list[Mapping[str, Any]]:
        """Return the versions of a submitted environment, oldest first; NAME@VERSION for one of them."""
        return self._loop.call(self._client.environment(name))

    def activate(self, name: str) -> Mapping[str, Any]:
        """Put a version into use."""
        return self._loop.call(self._client.activate(name))

    def retire(self, name: str) -> Mapping[str, Any]:
        """Retire an environment: no new groups of it."""
        return self._loop.call(self._client.retire(name))

    def claim(self, env: str | None = None, *, wait_s: float = 60.0, request_id: str | None = None) -> Session:
        """Claim the next task for an agent outside. End the session; `session` does so by itself."""
        return Session(self._loop.call(self._client.claim(env, wait_s=wait_s, request_id=request_id)), self._loop)

    @contextmanager
    def session(self, env: str | None = None, *, wait_s: float = 60.0) -> Iterator[Session]:
        """Claim a task. At the end of the context the session ends; after an exception, as failed."""
        session = self.claim(env, wait_s=wait_s)
        try:
            yield session
        except BaseException as error:
            self._loop.call(end_after(session._session, error))
            raise
        self._loop.call(end_after(session._session))

    def status(self) -> dict[str, Any]:
        """Return the state of the run's services, and which waits for which: as `volley status --json`."""
        return self._loop.call(self._client.status())

    def summary(self) -> dict[str, Any]:
        """Return name, state (running, stopped, finished), step, last reward and success of the run."""
        return self._loop.call(self._client.summary())

    def steps(self) -> Table:
        """Return the optimizer steps that count, a row for each; metrics are the columns."""
        return self._loop.call(self._client.steps())

    def supervised_steps(self) -> Table:
        """Return the supervised steps, of SFT or DPO; a run of these has a row of its examples as step 0."""
        return self._loop.call(self._client.supervised_steps())

    def evaluations(self) -> Table:
        """Return the held-out evaluations, a row for each step and environment."""
        return self._loop.call(self._client.evaluations())

    def ledger(self) -> Table:
        """Return the end of every ticket."""
        return self._loop.call(self._client.ledger())

    def trajectories(self, **filters: Any) -> Trajectories:
        """Return the archived episodes that meet all filters, without reading their tokens yet."""
        return self._loop.call(self._client.trajectories(**filters))

    def ticket(self, ticket: int, *, version: str = "") -> dict[str, Any]:
        """Return all episodes of a ticket token by token, with its lines of the ledger. Raises NotFound."""
        return self._loop.call(self._client.ticket(ticket, version=version))

    def follow(self, *, from_start: bool = False, poll_s: float = 0.5) -> Iterator[RunEvent]:
        """Yield steps, evaluations and ends of tickets as they come, until no process here works on the run."""
        return self._loop.iterate(self._client.follow(from_start=from_start, poll_s=poll_s))
