"""Clients' requests, recorded, executed and settled: what lies between the routes and the engine.

Invariants: the store is used in one thread, the engine in another; a model's requests are executed in the order of
their numbers, one at a time; several models take turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from shared.errors import InputError, NotFound, RateLimited, VolleyError
from shared.process import telemetry
from volley_tinker.server import specs
from volley_tinker.server.entries import JSON, Checkpoint, Future, History, Request, RequestResult, created, failed
from volley_tinker.server.samples import sample_request
from volley_tinker.server.sampling import SampleServer, SampleTask, version_of
from volley_tinker.server.specs import ModelSpec
from volley_tinker.server.store import FutureStore

_MOST_PENDING, _MOST_AHEAD = 512, 4096
_SWEEP_S = 60.0
_KEPT_SAMPLERS = 16
_UNRECORDED_S = 3600.0
_log = telemetry.Log("tinker")


class TinkerEngine(Protocol):
    """Methods of `TrainEngine`. Every one blocks, and is called in one thread."""

    def has(self, model: str) -> bool: ...

    def forget(self, model: str) -> None: ...

    def load(self, model: str, history: History) -> None: ...

    def execute(self, future: Future) -> RequestResult: ...

    def state_due(self, model: str) -> bool: ...

    def save_state(self, model: str, seq: int) -> tuple[str, str, str]: ...

    def export(self, checkpoint: Checkpoint | None, name: str) -> Path: ...


@dataclass
class TinkerService:
    """Args:
    name, architecture, tokenizer: of the base model; the name as clients write it, the tokenizer's folder or hub id.
    context: most tokens of a sequence.
    open_engine: loads the base model; called in the thread of `train`.
    result_ttl_s: how long results are kept.
    """

    name: str
    architecture: str
    tokenizer: str
    store: FutureStore
    database: Executor
    train: Executor
    context: int
    open_engine: Callable[[], TinkerEngine]
    result_ttl_s: float
    servers: list[SampleServer] = field(default_factory=list[SampleServer])
    engine: TinkerEngine | None = None
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _served: dict[str, float] = field(default_factory=dict[str, float])
    _finished: set[str] = field(default_factory=set[str])

    async def db[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self.database, lambda: call(*args, **kwargs))

    async def _train[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.train, lambda: call(*args, **kwargs))

    def why_not(self) -> str | None:
        """Return why no request should be routed here; None if they may be."""
        return "the base model is being loaded" if self.engine is None else None

    async def create_session(self, described: Mapping[str, Any]) -> str:
        session = str(uuid.uuid4())
        await self.db(self.store.add_session, session, described)
        return session

    async def create_model(self, body: Mapping[str, Any]) -> Future:
        """Record a model and settle its creation. Raises InputError, NotFound."""
        session, seq = await self._session(body)
        self.check_base(body.get("base_model"))
        spec = specs.model_spec(body, self.name)
        model = f"{session}:train:{seq}"
        request = json_request(model, 0, "create_model", body)
        metadata = {"metadata": specs.metadata(body.get("user_metadata"))}
        future = await self.db(self.store.add_model, model, session, spec.to_json() | metadata, request)
        if future.outcome is None:
            if spec.unembedding and spec.rank:
                _log.warning("the unembedding gets no adapter", model=model)
            await self.settle(future, created(model))
        return await self.db(self.store.future, future.id)

    async def create_model_from(self, body: Mapping[str, Any]) -> Future:
        """Record a model whose first request loads saved weights. Raises InputError, NotFound."""
        session, seq = await self._session(body)
        if body.get("base_model") is not None:
            self.check_base(body["base_model"])
        specs.check_optimizer(body.get("optimizer_config"))
        found = await self._loadable(specs.text(body, "path"))
        model = f"{session}:train:{seq}"
        spec = dict(found.spec) | {"metadata": specs.metadata(body.get("user_metadata"))}
        future = await self.db(self.store.add_model, model, session, spec, json_request(model, 0, "load_weights", body))
        self._work.set()
        return future

    async def finish_session(self, session: str, reason: str) -> None:
        """Finish a session, and drop its models from memory. Raises NotFound."""
        await self.db(self.store.session, session)
        await self.db(self.store.finish_session, session, reason)
        self._finished.update(await self.db(self.store.models, session))
        self._work.set()

    async def _session(self, body: Mapping[str, Any]) -> tuple[str, int]:
        session = specs.text(body, "session_id")
        _, finished = await self.db(self.store.session, session)
        if finished is not None:
            raise InputError(f"session {session} has finished: {finished}", "create another session")
        return session, specs.whole("model_seq_id", body.get("model_seq_id"), 0, 2**31)

    def check_base(self, base: Any) -> None:
        """Raise InputError for another base model than this server's."""
        if base != self.name:
            raise InputError(f"base_model {str(base)[:80]!r} is not served here", f"this server has {self.name}")

    async def submit(self, request: Request) -> Future:
        """Record a request of a model; what is wrong with it becomes its result, because its number is taken.

        Raises NotFound, InputError, RateLimited.
        """
        await self.db(self.store.model, request.owner)
        if request.seq < 1:
            raise InputError(f"seq_id {request.seq} is not of 1, 2, …")
        ahead = request.seq - await self.db(self.store.next_seq, request.owner)
        if ahead > _MOST_AHEAD:
            raise InputError(f"seq_id {request.seq} is {ahead} after the next one to execute")
        if ahead > 0 and await self.db(self.store.n_pending, request.owner) >= _MOST_PENDING:
            raise RateLimited(
                f"{_MOST_PENDING} requests of {request.owner[:80]} are already waiting", retry_after_s=2.0
            )
        future = await self.db(self.store.record, request)
        if future.outcome is None:
            self._work.set()
        return future

    async def sample(self, body: Mapping[str, Any]) -> tuple[Future, int]:
        """Record a sampling request; return it with its number of samples. Raises InputError, NotFound."""
        context = self.context
        owner, seq = body.get("sampling_session_id"), body.get("seq_id")
        if owner is None:
            owner, seq = f"sample:{uuid.uuid4()}", 0
            if body.get("model_path") is None:
                self.check_base(body.get("base_model"))
        else:
            owner = specs.text(body, "sampling_session_id")
            seq = specs.whole("seq_id", seq, 0, 2**63 - 1)
            await self.db(self.store.sampler, owner)
        request = sample_request(body, context)
        checkpoint = await self._weights_of(body)
        if await self.db(self.store.n_pending, owner) >= 8 * _MOST_PENDING:
            raise RateLimited("too many samples of this session are already waiting", retry_after_s=1.0)
        future = await self.db(self.store.record, json_request(owner, seq, "sample", body))
        if future.outcome is None and future.id not in self._settled:
            self._settled[future.id] = asyncio.Event()
            self._server(checkpoint).add(SampleTask(future, checkpoint))
        return future, request.num_samples

    async def _weights_of(self, body: Mapping[str, Any]) -> Checkpoint | None:
        """Find the weights that a sampling request wants; None for the base. Raises NotFound."""
        path = None if body.get("model_path") is None else specs.text(body, "model_path")
        if body.get("sampling_session_id") is not None:
            path = await self.db(self.store.sampler, body["sampling_session_id"])
        return None if path is None else await self._loadable(path)

    async def _loadable(self, path: str) -> Checkpoint:
        """Find saved weights. Raises NotFound, and InputError if they were saved for download only."""
        found = await self.db(self.store.checkpoint, path)
        if found.kind == "external":
            raise InputError(f"{path} was saved for download", "save_weights and save_weights_for_sampler are loaded")
        return found

    def _server(self, checkpoint: Checkpoint | None) -> SampleServer:
        return self.servers[hash(version_of(checkpoint)) % len(self.servers)]

    async def create_sampler(self, body: Mapping[str, Any]) -> str:
        """Open a sampling session. Raises InputError, NotFound."""
        session = specs.text(body, "session_id")
        await self.db(self.store.session, session)
        seq, path = (
            specs.whole("sampling_session_seq_id", body.get("sampling_session_seq_id"), 0, 2**62),
            body.get("model_path"),
        )
        if path is None:
            self.check_base(body.get("base_model"))
        else:
            await self._loadable(specs.text(body, "model_path"))
        sampler = f"{session}:sample:{seq}"
        await self.db(self.store.add_sampler, sampler, session, path)
        return sampler

    async def settle(self, future: Future, made: RequestResult) -> None:
        """Settle a future, and wake those who wait for it."""
        await self.db(self.store.settle, future, made)
        self._wake(future.id)

    async def wait(self, future: str, timeout_s: float) -> Future:
        """Return a future when it is settled, or after a time. Raises NotFound."""
        if (found := await self.db(self.store.future, future)).outcome is not None:
            return found
        event = self._settled.setdefault(future, asyncio.Event())
        if (found := await self.db(self.store.future, future)).outcome is None:  # or it was settled meanwhile
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()
            return await self.db(self.store.future, future)
        self._wake(future)
        return found

    def _wake(self, future: str) -> None:
        if (event := self._settled.pop(future, None)) is not None:
            event.set()

    async def export(self, checkpoint: Checkpoint | None, name: str) -> Path:
        """Write whole weights for a rollout server."""
        assert self.engine is not None
        return await self._train(self.engine.export, checkpoint, name)

    async def run(self) -> None:
        """Worker that loads the base model, then executes the models' requests."""
        self.engine = await self._train(self.open_engine)
        for future in await self.db(self.store.pending_samples):
            await self._again(future)
        self._work.set()
        while True:
            await self._work.wait()
            self._work.clear()
            while (future := await self._next()) is not None:
                await self._execute(future)

    async def _again(self, future: Future) -> None:
        """Queue a sampling request that an earlier process has not answered."""
        try:
            checkpoint = await self._weights_of(orjson.loads(future.body or b"{}"))
        except VolleyError as error:
            await self.settle(future, failed(error))
            return
        self._settled.setdefault(future.id, asyncio.Event())
        self._server(checkpoint).add(SampleTask(future, checkpoint))

    async def _next(self) -> Future | None:
        """Return the next request to execute: of the model that has waited longest, if its predecessors are settled.

        Models of finished sessions leave the memory here, where no request is being executed.
        """
        assert self.engine is not None
        while self._finished:
            await self._train(self.engine.forget, self._finished.pop())
        first = await self.db(self.store.first_pending)
        for model in sorted(first, key=lambda model: self._served.get(model, 0.0)):
            if first[model] == await self.db(self.store.next_seq, model):
                return await self.db(self.store.future, f"{model}:{first[model]}")
        return None

    async def _execute(self, future: Future) -> None:
        assert self.engine is not None
        model, self._served[future.owner] = future.owner, time.monotonic()
        if not self.engine.has(model):
            try:
                await self._train(self.engine.load, model, await self.db(self._history, model))
            except VolleyError as error:
                _log.error("model not restored", model=model, reason=str(error))
                await self.settle(future, failed(error))
                return
        made = await self._train(self.engine.execute, future)
        await self.settle(future, made)
        if made.weights and self.saves_state(model):
            await self._save_state(model, future.seq)

    def saves_state(self, model: str) -> bool:
        """Return whether a model's state is saved after this request."""
        assert self.engine is not None
        return self.engine.state_due(model)

    def _history(self, model: str) -> History:
        state = self.store.state_of(model)
        after = self.store.settled_after(model, -1 if state is None else state[0])
        return History(ModelSpec.from_json(self.store.model(model)), state, after)

    async def _save_state(self, model: str, seq: int) -> None:
        assert self.engine is not None
        before = await self.db(self.store.state_of, model)
        file, digest, weights = await self._train(self.engine.save_state, model, seq)
        await self.db(self.store.set_state, model, seq, file, digest, weights)
        if before is not None and before[1] != file:
            (self.store.folder / before[1]).unlink(missing_ok=True)

    async def sweep(self) -> None:
        """Worker that removes expired results and checkpoints, and all but the newest unnamed sampler weights."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.time()
            await self.db(self.store.expire_results, now - self.result_ttl_s)
            expired, newest = list[Checkpoint](), dict[str, int]()
            for one in await self.db(self.store.checkpoints):
                if one.is_unnamed:
                    newest[one.model] = newest.get(one.model, 0) + 1
                old = newest.get(one.model, 0) > _KEPT_SAMPLERS and now - one.created > self.result_ttl_s
                if (one.is_unnamed and old) or (one.expires is not None and one.expires < now):
                    expired.append(one)
            for one in expired:
                with suppress(NotFound):
                    await self.db(self.store.delete_checkpoint, one.path)
            await self.db(self.store.remove_unrecorded, now - _UNRECORDED_S)


def json_request(owner: str, seq: int, kind: str, body: Mapping[str, Any]) -> Request:
    """Make a request of a JSON body; the order of its fields does not matter."""
    data = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return Request(owner, seq, kind, data, JSON, hashlib.sha256(data).hexdigest())
