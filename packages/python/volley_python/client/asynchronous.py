"""`volley.AsyncClient`: a run's services and records, for asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from volley_python.client.records import RunEvent, RunRecords, RunTail, Trajectories

if TYPE_CHECKING:
    from shared.clients.base import HttpClient
    from shared.clients.env import EnvClient
    from volley_python.client.run_reader import RunReader
    from volley_python.client.tables import Table

type RoleName = Literal["viewer", "service", "admin"]

_CLAIM_S = 20.0
"""Longest wait of one request for a session, in seconds."""
_JOIN_S = 20.0
"""Time in which a run learns of a new environment, in seconds."""
_POLL_S = 0.3
_CALL_S = 600.0
"""Longest time of a call of the model, in seconds."""


@dataclass(slots=True)
class AsyncSession:
    """One episode of an agent: call the model with `key` at `base_url`, by the SDK of OpenAI or Anthropic.

    Attributes: those of `POST /v1/sessions` in docs/sessions.md. `messages` is the task for the model, `tools` are JSON
    schemas, `expires_at` is in seconds since 1970. `judged`: the environment judges the output of `end`.
    """

    id: str
    key: str = field(repr=False)
    base_url: str
    model: str
    env: str
    task: str
    ticket: int
    sample_index: int
    messages: list[Mapping[str, Any]]
    tools: list[Mapping[str, Any]]
    judged: bool
    expires_at: float
    _client: AsyncClient = field(repr=False)
    has_ended: bool = False

    async def chat(self, messages: list[Mapping[str, Any]], **fields: Any) -> Mapping[str, Any]:
        """Call the model as `POST /v1/chat/completions` does; return the answer's message.

        Args:
            fields: further fields of the body, such as `tools` or `max_tokens`.

        Raises VolleyError: Expired if the session is over.
        """
        from shared.clients.base import HttpClient
        from shared.errors import MalformedAnswer

        body = {"messages": messages, "model": self.model, **fields}
        _, _, ca_file = self._client.address("orchestrator", "service")
        async with HttpClient(self.base_url, token=self.key, ca_file=ca_file, as_json=True, timeout_s=_CALL_S) as http:
            answer = await http.post("/chat/completions", body)
        try:
            return answer["choices"][0]["message"]
        except (KeyError, TypeError, IndexError) as error:
            raise MalformedAnswer(f"{self.base_url}/chat/completions answered without a message") from error

    async def end(self, output: str = "") -> None:
        """End the session with the agent's output. May be repeated with the same output."""
        await self._send("end", {"output": output})
        self.has_ended = True

    async def fail(self, reason: str) -> None:
        """End the session because the agent failed: it gets no reward, and the attempt is repeated."""
        await self._send("end", {"failed": reason[:2000] or "the agent failed"})
        self.has_ended = True

    async def reward(
        self, reward: float, *, success: bool = False, components: Mapping[str, float] | None = None
    ) -> None:
        """Set the reward of the ended session, if the environment does not judge. Raises Conflict if it does."""
        await self._send("reward", {"reward": reward, "success": success, "components": dict(components or {})})

    async def describe(self) -> Mapping[str, Any]:
        """Return state, calls and turns of the session."""
        async with self._client.service("orchestrator", "viewer") as http:
            return await http.get(f"/v1/sessions/{self.id}")

    async def _send(self, what: str, body: Mapping[str, Any]) -> None:
        async with self._client.service("orchestrator", "service") as http:
            await http.post(f"/v1/sessions/{self.id}/{what}", body, attempts=3)


async def end_after(session: AsyncSession, error: BaseException | None = None) -> None:
    """End a session that its user has not ended: as failed after an error. Otherwise raises VolleyError."""
    from shared.errors import VolleyError

    if session.has_ended:
        return
    if error is None:
        await session.end()
        return
    with suppress(VolleyError):  # the user's own error says more
        await session.fail(f"{type(error).__name__}: {error}")


_FIELDS = [one.name for one in dataclasses.fields(AsyncSession) if one.name not in ("_client", "has_ended")]


class AsyncClient:
    """Client of one run.

    Args:
        run: the run's folder: addresses and tokens of its services come from there, as for the commands, and the
            methods that read records need it.
        env, orchestrator: addresses of services, in place of those in the folder, or without one.
        token: token for `env` and `orchestrator`: an admin's for `submit`, a service's for `session`.
        ca_file: certificate authorities of these addresses.
        trust: trust the folder as your own: use addresses and files that it names, as with --trust.

    Every method raises VolleyError: ConfigError for wrong arguments or a folder of no run, ServiceUnreachable if a
    service does not answer, or the error of its answer.
    """

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
        from shared.errors import ConfigError

        self._path = None if run is None else Path(run)
        self._given = {name: url for name, url in (("env", env), ("orchestrator", orchestrator)) if url is not None}
        self._token, self._ca_file = token, None if ca_file is None else Path(ca_file)
        if run is None and not self._given:
            raise ConfigError("a client needs a run's folder or a service's address", 'Client("runs/quickstart")')
        if isinstance(run, str) and "://" in run:
            raise ConfigError(f"{run} is an address, not a folder", f'Client(env="{run}") or Client(orchestrator=…)')
        if trust and self._path is not None:
            from shared.run import trust as trusted
            from shared.run.folder import RunFolder

            trusted.accept(RunFolder(self._path.absolute()))
        self._records = None if self._path is None else RunRecords(self._path)

    def service(self, name: str, role: RoleName) -> HttpClient:
        """Return a client of one of the run's services, to be entered, with the token of the role.

        Raises ConfigError.
        """
        from shared.clients.base import HttpClient

        url, token, ca_file = self.address(name, role)
        return HttpClient(url, token=token, ca_file=ca_file)

    # --- environments -----------------------------------------------------------------------------------------------

    async def environments(self) -> Mapping[str, Any]:
        """Return `{"environments": [...], "installed": [...]}`: names, states, versions and weights."""
        async with self._env("viewer") as client:
            return await client.environments()

    async def submit(
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
        """Submit an environment to the run, and wait until it is validated. Returns its row, with `state` and `report`.

        Args:
            file: a Python file, .zip, .whl, or folder; or give `code`, the text of a Python file, with a `name`.
            weight: weight in the run, relative to weight 1 of its own environment; 0 joins none.
            entry: the environment's class, if the file has several.
            config: arguments of the class.
            replace: submit a new version of an existing name.
            wait_s: longest time to wait, in seconds; None returns at once.

        Raises InputError if the environment is rejected, with the failed checks, and Unavailable after `wait_s`.
        """
        from volley_python.submissions.source import EnvSource
        from volley_python.submissions.waiting import check_accepted, decided

        source = EnvSource(None if file is None else Path(file), code=code, entry=entry)
        body = await asyncio.to_thread(source.body, name, weight)
        if config is not None:
            body["config"] = dict(config)
        async with self._env("admin") as client:
            row = await client.submit(body, replace=replace)
            if wait_s is not None:
                row = await decided(client, row["name"], row["state"], wait_s)
                check_accepted(row)
            return row

    async def environment(self, name: str) -> list[Mapping[str, Any]]:
        """Return the versions of a submitted environment, oldest first; NAME@VERSION for one of them."""
        async with self._env("viewer") as client:
            return await client.versions(name)

    async def activate(self, name: str) -> Mapping[str, Any]:
        """Put a version into use."""
        async with self._env("admin") as client:
            return await client.activate(name)

    async def retire(self, name: str) -> Mapping[str, Any]:
        """Retire an environment: no new groups of it."""
        async with self._env("admin") as client:
            return await client.retire(name)

    # --- sessions of agents -----------------------------------------------------------------------------------------

    async def claim(
        self, env: str | None = None, *, wait_s: float = 60.0, request_id: str | None = None
    ) -> AsyncSession:
        """Claim the next task for an agent outside. End the session; `session` does so by itself.

        Args:
            env: only tasks of this environment.
            wait_s: longest time to wait for a task, in seconds.
            request_id: the same id gets the same session again (default: a new one).

        Raises Unavailable if there was no task in time, NotFound if the run does not play `env`; a run takes some
        seconds to learn of an environment that was just submitted, so that is asked again for a while.
        """
        from shared.errors import MalformedAnswer, NotFound, Unavailable

        body: dict[str, Any] = {"request_id": request_id or f"client-{uuid.uuid4().hex}", "env": env}
        began = time.monotonic()
        async with self.service("orchestrator", "service") as http:
            while True:
                left_s = max(0.0, began + wait_s - time.monotonic())
                try:
                    answer = await http.post("/v1/sessions", {**body, "wait_s": min(_CLAIM_S, left_s)}, attempts=3)
                except NotFound:
                    if time.monotonic() - began >= min(wait_s, _JOIN_S):
                        raise
                    await asyncio.sleep(_POLL_S)
                    continue
                if answer is not None:
                    break
                if not left_s:
                    raise Unavailable(f"no task of an agent came within {wait_s:g} s", "is the run going on?")
        try:
            return AsyncSession(**{name: answer[name] for name in _FIELDS}, _client=self)
        except (KeyError, TypeError) as error:
            raise MalformedAnswer(f"{http.base_url}/v1/sessions answered without a session: {error}") from error

    @asynccontextmanager
    async def session(self, env: str | None = None, *, wait_s: float = 60.0) -> AsyncIterator[AsyncSession]:
        """Claim a task as `claim` does. At the end of the context the session ends: with what `end` was given, with
        an empty output, or, after an exception, as failed.
        """
        session = await self.claim(env, wait_s=wait_s)
        try:
            yield session
        except BaseException as error:
            await end_after(session, error)
            raise
        await end_after(session)

    # --- records ----------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the state of the run's services, and which waits for which: as `volley status --json`."""
        from volley_python.diagnosis.observing import described, of_run

        return described(*await of_run(self._files().folder))

    async def summary(self) -> dict[str, Any]:
        """Return name, state (running, stopped, finished), step, last reward and success of the run."""
        return await asyncio.to_thread(self._read().summary)

    async def steps(self) -> Table:
        """Return the optimizer steps that count, a row for each; metrics are the columns."""
        return await asyncio.to_thread(self._read().table, "train")

    async def supervised_steps(self) -> Table:
        """Return the supervised steps, of SFT or DPO; a run of these has a row of its examples as step 0."""
        return await asyncio.to_thread(self._read().table, "sft")

    async def evaluations(self) -> Table:
        """Return the held-out evaluations, a row for each step and environment."""
        return await asyncio.to_thread(self._read().table, "evals")

    async def ledger(self) -> Table:
        """Return the end of every ticket."""
        return await asyncio.to_thread(self._read().ledger)

    async def trajectories(self, **filters: Any) -> Trajectories:
        """Return the archived episodes that meet all filters, without reading their tokens yet.

        Args:
            filters: text, env, task, end, success, failed, failure, ticket, and step, reward, tokens, staleness with
                `_min` or `_max`, as the options of `volley trajectories --help` describe them.
        """
        return await asyncio.to_thread(self._read().trajectories, filters)

    async def ticket(self, ticket: int, *, version: str = "") -> dict[str, Any]:
        """Return all episodes of a ticket token by token, with its lines of the ledger. Raises NotFound."""
        return await asyncio.to_thread(self._read().ticket, ticket, version)

    async def follow(self, *, from_start: bool = False, poll_s: float = 0.5) -> AsyncIterator[RunEvent]:
        """Yield steps, evaluations and ends of tickets as they come, until no process here works on the run.

        Args:
            from_start: yield first those that are there already.
            poll_s: time between looks at the files, in seconds.
        """
        tail = await asyncio.to_thread(RunTail, self._read(), from_start=from_start)
        while True:
            has_ended = await asyncio.to_thread(tail.has_ended)
            for event in await asyncio.to_thread(tail.new):
                yield event
            if has_ended:
                return
            await asyncio.sleep(poll_s)

    # --- where they are ---------------------------------------------------------------------------------------------

    def _read(self) -> RunRecords:
        from shared.errors import ConfigError

        if self._records is None:
            raise ConfigError("this client knows addresses, but no folder of a run", 'Client("runs/NAME")')
        self._records.check()
        return self._records

    def _files(self) -> RunReader:
        return self._read().files

    def _env(self, role: RoleName) -> EnvClient:
        from shared.clients.env import EnvClient

        url, token, ca_file = self.address("env", role)
        return EnvClient(url, token=token, ca_file=ca_file)

    def address(self, name: str, role: RoleName) -> tuple[str, str | None, Path | None]:
        """Return address, token and certificate authorities of a service. Raises ConfigError."""
        from shared.errors import ConfigError
        from shared.run.folder import RunFolder
        from shared.web.access import Role, token_for
        from volley.runs import addresses

        if name in self._given:
            return self._given[name], self._token, self._ca_file
        if self._path is None:
            raise ConfigError(f"this client does not know the address of {name}", f"give {name}=…, or a run's folder")
        found = addresses.read(RunFolder(self._path.absolute()))
        return found.url(name), token_for(found.token_files, Role[role.upper()]), found.ca_file
