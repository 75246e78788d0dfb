"""Environments of a NeMo-Gym resources server, played as NeMo-Gym's own agents play them; the policy is Volley's.

`verify` servers (nemo_gym 0.4.0, `simple_agent`): POST /seed_session with a row of data opens a session, which is a
cookie; each tool is a POST to its name; an answer without calls is sent to POST /verify with the row and the whole
response, and its `reward` is the episode's. `step` servers (`gymnasium_agent`): POST /reset, then POST /step with the
row and the response of that turn; it answers Gymnasium's five-tuple.

A server has no tasks: rows are submitted with its address. It has no request that ends a session either, and a server
that was started again takes an old cookie for a session that has seen nothing. So each episode holds a connection on
which nothing is said: when that is gone, the session is.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.env.backend import KnownSplits, call_seconds
from services.env.backends.remote import address as addresses
from services.env.backends.remote.nemo_gym_rows import (
    TaskRow,
    output_items,
    read_files,
    read_row,
    response,
    tool_output,
)
from services.env.backends.remote.paths import at_path
from services.env.backends.remote.site import CONNECT_S, RemoteContext, RemoteDescription, RemoteSite
from services.env.episode_types import MAX_REWARD, Demonstration, Info, Message, StepResult, check_task, user
from services.env.tools.calls import CallFormat, ToolCall, before_calls, tool_calls_of
from shared import codec
from shared.bounds import MAX_OBJECTS, shortened
from shared.clients.base import HttpClient, HttpReply
from shared.errors import DecodeError, NemoGymRefused, NotFound, StorageDenied, Unavailable
from shared.process import offload
from shared.types import MAX_MESSAGE

MAX_CALLS = 32
"""Calls of one message that are carried out."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_GATEWAY = frozenset({502, 503, 504})
"""What something before the server answers while it is not there."""
_MAX_TOLD, _MAX_FIELDS = 300, 64


class NemoGymConfig(BaseModel):
    """How a NeMo-Gym server is played.

    Attributes:
        max_turns: messages of the model; after the last the episode is verified as it stands, and truncated.
        success: the path of a flag in the answer of /verify, or in the `info` of /step, that says whether the task is
            solved; without it, a reward of at least 1 in all does.
        tool_format: how the model writes calls of tools.
        max_output: characters of a tool's answer that the model reads; of a longer one the middle is left out.
        watch: whether an episode ends when the connection it holds is closed, which is how a server's restart is seen;
            false for a proxy that closes connections on which nothing is said.
        max_sessions: episodes at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: Annotated[int, Field(ge=1, le=1000)] = 10
    success: Annotated[str, Field(max_length=200)] | None = None
    tool_format: CallFormat = "auto"
    max_output: Annotated[int, Field(ge=100, le=100_000)] = 4000
    watch: bool = True
    max_sessions: Annotated[int, Field(ge=1, le=4096)] = 64


class SilentConnection(asyncio.Protocol):
    """A connection on which neither side says anything; it ends when the server does."""

    def __init__(self) -> None:
        self.alive = True

    def data_received(self, data: bytes) -> None:
        self.alive = False

    def eof_received(self) -> None:
        self.alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False


class NemoGymBackend(KnownSplits):
    """A NeMo-Gym resources server as an environment; `context.folder` holds its tasks, a file for each split."""

    is_remote, has_demonstration = True, False

    def __init__(self, context: RemoteContext, config: NemoGymConfig) -> None:
        self.name, self.config, self.log = context.name, config, context.log
        self.splits_of = context.splits
        self.site = RemoteSite(context.address, context.access, config.max_sessions, context.log)
        self._folder, self._ca_file = context.folder, context.access.ca_file
        self._lines: Mapping[str, Sequence[bytes]] | None = None
        self._style: Literal["verify", "step"] | None = None

    async def describe(self) -> RemoteDescription:
        """Raises VolleyError where nothing answers, or something else than a NeMo-Gym server."""
        lines = await self._read()
        async with self.client() as client:
            await self._style_of(client)
        return RemoteDescription("nemo_gym", {split: len(rows) for split, rows in lines.items()})

    async def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{(await self._row(split, index)).digest}"

    async def reset(self, split: str, index: int, seed: int) -> NemoGymEpisode:
        """`seed` is not passed on: the protocol has none."""
        row = await self._row(split, index)
        async with self.site.session(), AsyncExitStack() as stack:
            client = await stack.enter_async_context(self.client())
            watch = await self._watched(stack) if self.config.watch else None
            with call_seconds(self.name, "reset").time():
                style, opening = await self.site.within("reset", self._opened(client, row))
            task = f"{split}/{index}@{row.digest}"
            return NemoGymEpisode(self, client, stack.pop_all(), watch, row, task, opening, style)

    async def demonstration(self, split: str, index: int) -> Demonstration:
        raise NotFound(f"{self.name} has no demonstrations", "NeMo-Gym servers have none")

    def why_stuck(self) -> str | None:
        return self.site.trouble

    @asynccontextmanager
    async def client(self) -> AsyncIterator[HttpClient]:
        """A client with the cookies of one session."""
        site = self.site
        client = HttpClient(
            str(site.address),
            token=site.token,
            timeout_s=site.deadline_s,
            ca_file=self._ca_file,
            socket_factory=addresses.checked_socket,
            as_json=True,
            keep_cookies=True,
        )
        async with client:
            yield client

    async def ask(self, client: HttpClient, path: str, body: Any) -> Mapping[str, Any]:
        """The object that a request of the protocol is answered with. Raises ServiceUnreachable, Unavailable,
        NemoGymRefused, DecodeError.
        """
        reply = await self.exchange(client, "POST", path, body)
        if reply.status >= 300:
            told = reply.content[:_MAX_TOLD].decode("utf-8", "replace")
            self.log.append(f"{path}: {reply.status}: {told}")
            raise NemoGymRefused(
                f"{self.site.address} answered {path} with {reply.status}: {told}",
                "does the row of data have what this server asks for? its own log says more",
            )
        return await self._object(reply, path)

    async def exchange(self, client: HttpClient, method: str, path: str, body: Any = None) -> HttpReply:
        """Raises ServiceUnreachable, Unavailable (a proxy answers in the server's place)."""
        with self.site.noting():
            reply = await client.exchange(method, path, body)
        if reply.status in _GATEWAY:
            raise Unavailable(f"{self.site.address} answered {path} with {reply.status}", "is that server running?")
        return reply

    async def _object(self, reply: HttpReply, path: str) -> Mapping[str, Any]:
        what = f"the answer of {self.site.address}{path}"
        value = await offload.by_size(
            len(reply.content), lambda: codec.from_json(reply.content, what, MAX_OBJECTS, "replace")
        )
        if not isinstance(value, dict):
            raise DecodeError(f"{what} is no JSON object", "is this a NeMo-Gym resources server?")
        return value

    async def _opened(self, client: HttpClient, row: TaskRow) -> tuple[Literal["verify", "step"], tuple[Message, ...]]:
        style = await self._style_of(client)
        if style == "verify":
            await self.ask(client, "/seed_session", row.sent)
            opening = row.opening
        else:
            opening = (*row.opening, *_observed(await self.ask(client, "/reset", row.sent)))
        if not opening:
            raise DecodeError(f"{self.site.address} gave nothing to begin with, and the row's input is empty")
        return style, opening

    async def _style_of(self, client: HttpClient) -> Literal["verify", "step"]:
        """Which of the two protocols the server speaks, by the paths that it declares; asked once."""
        if self._style is None:
            reply = await self.exchange(client, "GET", "/openapi.json")
            declared = (await self._object(reply, "/openapi.json")).get("paths") if reply.status == 200 else None
            paths = declared if isinstance(declared, dict) else {}
            if "/seed_session" in paths and "/verify" in paths:
                self._style = "verify"
            elif "/reset" in paths and "/step" in paths:
                self._style = "step"
            else:
                raise DecodeError(
                    f"{self.site.address} declares neither /seed_session and /verify nor /reset and /step",
                    "is this the address of a NeMo-Gym resources server, not of its head server, agent or model?",
                )
        return self._style

    async def _watched(self, stack: AsyncExitStack) -> SilentConnection:
        """Raises ServiceUnreachable."""
        address, tls = self.site.address, self.site.tls
        try:
            sock = await addresses.connect(address, CONNECT_S)
            async with asyncio.timeout(CONNECT_S):
                transport, watch = await asyncio.get_running_loop().create_connection(
                    SilentConnection, sock=sock, ssl=tls, server_hostname=address.host if tls else None
                )
        except OSError as error:
            raise self.site.unreachable("", error) from error
        stack.callback(transport.abort)
        return watch

    async def _read(self) -> Mapping[str, Sequence[bytes]]:
        """Raises StorageDenied."""
        if self._lines is None:
            folder = self._folder
            assert folder is not None, "tasks are kept with the submission"
            try:
                self._lines = await asyncio.to_thread(read_files, folder)
            except OSError as error:
                raise StorageDenied(f"the tasks of {self.name} cannot be read: {error}") from error
        return self._lines

    async def _row(self, split: str, index: int) -> TaskRow:
        check_task(self.name, self.splits_of, split, index)
        line = (await self._read())[split][index]
        return await offload.by_size(len(line), lambda: read_row(line))


class NemoGymEpisode:
    """A session of the server. `output` is what the model has said so far, and what it was answered."""

    database: None = None

    def __init__(
        self,
        backend: NemoGymBackend,
        client: HttpClient,
        held: AsyncExitStack,
        watch: SilentConnection | None,
        row: TaskRow,
        task: str,
        opening: tuple[Message, ...],
        style: Literal["verify", "step"],
    ) -> None:
        self.task, self.opening, self.tools = task, opening, row.tools
        self._backend, self._client, self._held, self._watch = backend, client, held, watch
        self._row, self._style, self._open = row, style, True
        self._names = frozenset(tool["function"]["name"] for tool in row.tools)
        self._output: list[dict[str, Any]] = []
        self._turns, self._total = 0, 0.0

    async def step(self, message: Message) -> StepResult:
        calls = await tool_calls_of(message, self._backend.config.tool_format, self.tools) if self.tools else []
        self._turns += 1
        answer = self._stepped(message, calls) if self._style == "step" else self._verified(message, calls)
        with call_seconds(self._backend.name, "step").time():
            result = await self._backend.site.within("step", answer)
        await self._check_session()
        return result

    async def close(self) -> None:
        if self._open:
            self._open = False
            try:
                await self._held.aclose()
            finally:
                self._backend.site.leave()

    async def _check_session(self) -> None:
        """Raises Unavailable where the server went away since the episode began, and with it all that it knew."""
        if self._watch is None:
            return
        await asyncio.sleep(0)  # what came before the answer is read before the answer is believed
        if not self._watch.alive:
            self._backend.log.append(f"{self.task}: the server closed the connection of the session")
            raise Unavailable(
                f"{self._backend.site.address} closed the connection of the session: it was started again",
                "behind a proxy that closes connections on which nothing is said, set config.watch: false",
            )

    async def _verified(self, message: Message, calls: Sequence[ToolCall]) -> StepResult:
        """One turn of a `verify` server: its tools, or its verdict."""
        ids = self._said(message, calls)
        answers, fine = await self._called(calls, ids)
        last = self._turns >= self._backend.config.max_turns
        if calls and not last:
            return StepResult(answers, 0.0, False, False, Info({"reward": 0.0}, False, None if fine else "tool"))
        verdict = await self._backend.ask(
            self._client, "/verify", {**self._row.sent, "response": response(self._row, self._output)}
        )
        reward = _reward(verdict)
        told = {key: value for key, value in verdict.items() if key not in self._row.sent and key != "reward"}
        extra = {"verdict": _plain(told)}
        info = Info({"reward": reward}, self._success(verdict, reward), None if fine else "tool", extra)
        return StepResult(answers, reward, terminated=not calls, truncated=bool(calls), info=info)

    async def _stepped(self, message: Message, calls: Sequence[ToolCall]) -> StepResult:
        """One turn of a `step` server, which carries out the calls itself."""
        before = len(self._output)
        ids = self._said(message, [call for call in calls if not call.problem])
        sent = {**self._row.sent, "response": response(self._row, self._output[before:])}
        answer = await self._backend.ask(self._client, "/step", sent)
        reward, terminated, truncated = _reward(answer), bool(answer.get("terminated")), bool(answer.get("truncated"))
        self._total += reward
        told: Mapping[str, Any] = found if isinstance(found := answer.get("info"), dict) else {}
        messages = [*_outputs(told, ids), *_observed(answer)]
        over = terminated or truncated or self._turns >= self._backend.config.max_turns
        info = Info({"reward": reward}, over and self._success(told, self._total), None, {"step_info": _plain(told)})
        nothing = () if over else (user(""),)
        return StepResult(tuple(messages) or nothing, reward, terminated, over and not terminated, info)

    def _said(self, message: Message, calls: Sequence[ToolCall]) -> list[str]:
        """Notes what the model said; the ids of its calls."""
        ids = [f"call_{secrets.token_hex(8)}" for _ in calls]
        text = message["content"]
        self._output += output_items(before_calls(text) if calls and "tool_calls" not in message else text, calls, ids)
        return ids

    async def _called(self, calls: Sequence[ToolCall], ids: Sequence[str]) -> tuple[tuple[Message, ...], bool]:
        """The answers to the calls of a message, and whether all of them were carried out."""
        answers, fine = list[Message](), True
        for number, (call, call_id) in enumerate(zip(calls, ids, strict=True)):
            text, done = await self._call(call) if number < MAX_CALLS else (f"error: at most {MAX_CALLS} calls", False)
            text, fine = shortened(text, self._backend.config.max_output), fine and done
            self._output.append(tool_output(call_id, text))
            answers.append(Message(role="tool", content=text))
        return tuple(answers), fine

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """What a tool answers, also when it complains, and whether it was carried out. Nothing but the row's own tools
        is asked for: /verify is a path like any other.
        """
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self._names or not _TOOL_NAME.fullmatch(call.name):
            return f"error: there is no tool {call.name[:80]!r} (there are: {', '.join(sorted(self._names))})", False
        reply = await self._backend.exchange(self._client, "POST", f"/{call.name}", call.arguments or {})
        return reply.content.decode("utf-8", "replace"), reply.status < 300

    def _success(self, told: Mapping[str, Any], reward: float) -> bool:
        path = self._backend.config.success
        return bool(at_path(told, path)) if path else reward >= 1.0


def _reward(answer: Mapping[str, Any]) -> float:
    """Raises DecodeError."""
    value = answer.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DecodeError(f"the server's reward {str(value)[:80]} is no finite number")
    if abs(value) > MAX_REWARD:
        raise DecodeError(f"the server's reward {value:g} is beyond ±{MAX_REWARD:g}")
    return float(value)


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """What of a server's findings is told with the episode: numbers, flags and short texts."""
    short = {key: value for key, value in told.items() if not isinstance(value, str) or len(value) <= _MAX_TOLD}
    kept = {key: value for key, value in short.items() if value is None or isinstance(value, bool | int | float | str)}
    return dict(list(kept.items())[:_MAX_FIELDS])


def _outputs(told: Mapping[str, Any], ids: Sequence[str]) -> list[Message]:
    """What the calls of a turn gave, in the order of the calls."""
    found = told.get("tool_outputs")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    place = {call_id: number for number, call_id in enumerate(ids)}
    rows.sort(key=lambda row: place.get(str(row.get("call_id")), len(ids)))
    return [Message(role="tool", content=str(row.get("output", ""))) for row in rows]


def _observed(answer: Mapping[str, Any]) -> list[Message]:
    observation = answer.get("observation")
    return [user(str(observation)[:MAX_MESSAGE])] if observation else []
