"""Environments of a NeMo-Gym resources server, played as NeMo-Gym's agents play them, with Volley's policy.

`verify` servers (nemo_gym 0.4.0, `simple_agent`): POST /seed_session with a row of data opens a session, identified by
a cookie; each tool is a POST to its name; an answer without calls is sent to POST /verify with the row and the whole
response, and its `reward` is the episode's. `step` servers (`gymnasium_agent`): POST /reset, then POST /step with the
row and the response of that turn, which answers Gymnasium's five-tuple.

A server has no tasks: rows are submitted with its address. It has no request to end a session, and after a restart it
takes an old cookie for a new, empty session. Therefore each episode holds an idle connection; when the connection is
closed, the session is lost.
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

from services.env.backend import call_seconds
from services.env.episode_types import MAX_REWARD, Demonstration, Info, Message, StepResult, check_task, user
from shared import codec
from shared.bounds import MAX_OBJECTS, shortened
from shared.clients.base import HttpClient
from shared.clients.wires import HttpReply
from shared.errors import DecodeError, NemoGymRefused, NotFound, StorageDenied, Unavailable
from shared.process import offload
from shared.types import MAX_MESSAGE
from volley_sandbox.backends.remote import address as addresses
from volley_sandbox.backends.remote.nemo_gym_rows import (
    TaskRow,
    output_items,
    read_files,
    read_row,
    response,
    tool_output,
)
from volley_sandbox.backends.remote.paths import at_path
from volley_sandbox.backends.remote.site import CONNECT_S, RemoteContext, RemoteDescription, RemoteSite
from volley_sandbox.backends.submitted import KnownSplits
from volley_serving.dialects.calls import CallFormat, ToolCall, before_calls, tool_calls_of

MAX_CALLS = 32
"""Most calls of one message that are carried out."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_GATEWAY = frozenset({502, 503, 504})
"""Status codes of a proxy whose server is unreachable."""
_MAX_TOLD, _MAX_FIELDS = 300, 64


class NemoGymConfig(BaseModel):
    """Settings of a NeMo-Gym server.

    Attributes:
        max_turns: messages of the model; after the last one the episode is verified as it stands, and truncated.
        success: path of a flag in the answer of /verify, or in the `info` of /step, that says whether the task is
        solved; by default, a total reward of at least 1.
        tool_format: format of the model's tool calls.
        max_output: characters of a tool's answer that the model reads; the middle of longer answers is dropped.
        watch: end an episode when its idle connection is closed, which detects a server's restart; false for a proxy
        that closes idle connections.
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
    """A connection without data in either direction, which ends with the server."""

    def __init__(self) -> None:
        self.alive = True

    def data_received(self, data: bytes) -> None:
        self.alive = False

    def eof_received(self) -> None:
        self.alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False


class NemoGymBackend(KnownSplits):
    """A NeMo-Gym resources server as an environment. `context.folder` holds a file of tasks for each split."""

    is_remote, has_demonstration = True, False

    def __init__(self, context: RemoteContext, config: NemoGymConfig) -> None:
        self.name, self.config, self.log = context.name, config, context.log
        self.splits_of = context.splits
        self.site = RemoteSite(context.address, context.access, config.max_sessions, context.log)
        self._folder, self._ca_file = context.folder, context.access.ca_file
        self._lines: Mapping[str, Sequence[bytes]] | None = None
        self._style: Literal["verify", "step"] | None = None

    async def describe(self) -> RemoteDescription:
        """Describe the environment. Raises VolleyError if no NeMo-Gym server answers."""
        lines = await self._read()
        async with self.client() as client:
            await self._style_of(client)
        return RemoteDescription("nemo_gym", {split: len(rows) for split, rows in lines.items()})

    async def task(self, split: str, index: int) -> str:
        return f"{split}/{index}@{(await self._row(split, index)).digest}"

    async def reset(self, split: str, index: int, seed: int) -> NemoGymEpisode:
        """Start an episode. `seed` is not sent, because the protocol has none."""
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

    def stuck_reason(self) -> str | None:
        return self.site.trouble

    @asynccontextmanager
    async def client(self) -> AsyncIterator[HttpClient]:
        """Open a client with the cookies of one session."""
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
        """Send a request and return the object of its answer.

        Raises ServiceUnreachable, Unavailable, NemoGymRefused, DecodeError.
        """
        reply = await self.exchange(client, "POST", path, body)
        if reply.status >= 300:
            text = reply.content[:_MAX_TOLD].decode("utf-8", "replace")
            self.log.append(f"{path}: {reply.status}: {text}")
            raise NemoGymRefused(
                f"{self.site.address} answered {path} with {reply.status}: {text}",
                "check the row of data against the server's requirements, and see the server's log",
            )
        return await self._object(reply, path)

    async def exchange(self, client: HttpClient, method: str, path: str, body: Any = None) -> HttpReply:
        """Send a request. Raises ServiceUnreachable, Unavailable (a proxy answers instead of the server)."""
        with self.site.noting():
            reply = await client.exchange(method, path, body)
        if reply.status in _GATEWAY:
            raise Unavailable(
                f"{self.site.address} answered {path} with {reply.status}", "check that the server is running"
            )
        return reply

    async def _object(self, reply: HttpReply, path: str) -> Mapping[str, Any]:
        what = f"the answer of {self.site.address}{path}"
        value = await offload.by_size(
            len(reply.content), lambda: codec.from_json(reply.content, what, MAX_OBJECTS, "replace")
        )
        if not isinstance(value, dict):
            raise DecodeError(f"{what} is not a JSON object", "check that the address is a NeMo-Gym resources server")
        return value

    async def _opened(self, client: HttpClient, row: TaskRow) -> tuple[Literal["verify", "step"], tuple[Message, ...]]:
        style = await self._style_of(client)
        if style == "verify":
            await self.ask(client, "/seed_session", row.sent)
            opening = row.opening
        else:
            opening = (*row.opening, *_observed(await self.ask(client, "/reset", row.sent)))
        if not opening:
            raise DecodeError(f"{self.site.address} sent no observation, and the row's input is empty")
        return style, opening

    async def _style_of(self, client: HttpClient) -> Literal["verify", "step"]:
        """Detect the server's protocol by the paths that it declares; cached."""
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
                    "give the address of the resources server, not of its head server, agent or model",
                )
        return self._style

    async def _watched(self, stack: AsyncExitStack) -> SilentConnection:
        """Open the idle connection. Raises ServiceUnreachable."""
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
        """Read the tasks. Raises StorageDenied."""
        if self._lines is None:
            folder = self._folder
            assert folder is not None, "tasks are stored with the submission"
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
    """A session of the server. `output` holds the model's messages so far and the answers to its calls."""

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
        """Raises Unavailable if the server restarted since the episode began and lost its session."""
        if self._watch is None:
            return
        await asyncio.sleep(0)  # process a close that arrived before the answer
        if not self._watch.alive:
            self._backend.log.append(f"{self.task}: the server closed the connection of the session")
            raise Unavailable(
                f"{self._backend.site.address} closed the connection of the session, so it has restarted",
                "behind a proxy that closes idle connections, set config.watch: false",
            )

    async def _verified(self, message: Message, calls: Sequence[ToolCall]) -> StepResult:
        """One turn of a `verify` server: answers of its tools, or its verdict."""
        ids = self._record_message(message, calls)
        answers, all_ok = await self._called(calls, ids)
        last = self._turns >= self._backend.config.max_turns
        if calls and not last:
            return StepResult(answers, 0.0, False, False, Info({"reward": 0.0}, False, None if all_ok else "tool"))
        verdict = await self._backend.ask(
            self._client, "/verify", {**self._row.sent, "response": response(self._row, self._output)}
        )
        reward = _reward(verdict)
        findings = {key: value for key, value in verdict.items() if key not in self._row.sent and key != "reward"}
        extra = {"verdict": _plain(findings)}
        info = Info({"reward": reward}, self._success(verdict, reward), None if all_ok else "tool", extra)
        return StepResult(answers, reward, terminated=not calls, truncated=bool(calls), info=info)

    async def _stepped(self, message: Message, calls: Sequence[ToolCall]) -> StepResult:
        """One turn of a `step` server, which carries out the calls itself."""
        before = len(self._output)
        ids = self._record_message(message, [call for call in calls if not call.problem])
        sent = {**self._row.sent, "response": response(self._row, self._output[before:])}
        answer = await self._backend.ask(self._client, "/step", sent)
        reward, terminated, truncated = _reward(answer), bool(answer.get("terminated")), bool(answer.get("truncated"))
        self._total += reward
        findings: Mapping[str, Any] = found if isinstance(found := answer.get("info"), dict) else {}
        messages = [*_outputs(findings, ids), *_observed(answer)]
        over = terminated or truncated or self._turns >= self._backend.config.max_turns
        info = Info(
            {"reward": reward}, over and self._success(findings, self._total), None, {"step_info": _plain(findings)}
        )
        nothing = () if over else (user(""),)
        return StepResult(tuple(messages) or nothing, reward, terminated, over and not terminated, info)

    def _record_message(self, message: Message, calls: Sequence[ToolCall]) -> list[str]:
        """Append the model's message to the output; return ids for its calls."""
        ids = [f"call_{secrets.token_hex(8)}" for _ in calls]
        text = message["content"]
        self._output += output_items(before_calls(text) if calls and "tool_calls" not in message else text, calls, ids)
        return ids

    async def _called(self, calls: Sequence[ToolCall], ids: Sequence[str]) -> tuple[tuple[Message, ...], bool]:
        """Answers to a message's calls, and True if all were carried out."""
        answers, all_ok = list[Message](), True
        for number, (call, call_id) in enumerate(zip(calls, ids, strict=True)):
            text, done = await self._call(call) if number < MAX_CALLS else (f"error: at most {MAX_CALLS} calls", False)
            text, all_ok = shortened(text, self._backend.config.max_output), all_ok and done
            self._output.append(tool_output(call_id, text))
            answers.append(Message(role="tool", content=text))
        return tuple(answers), all_ok

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Answer of a tool, also an error, and True if the call was carried out.

        Only the row's own tools are called, because /verify is a path like any tool's.
        """
        if call.problem:
            return f"error: {call.problem}", False
        if call.name not in self._names or not _TOOL_NAME.fullmatch(call.name):
            return f"error: there is no tool {call.name[:80]!r} (there are: {', '.join(sorted(self._names))})", False
        reply = await self._backend.exchange(self._client, "POST", f"/{call.name}", call.arguments or {})
        return reply.content.decode("utf-8", "replace"), reply.status < 300

    def _success(self, findings: Mapping[str, Any], reward: float) -> bool:
        path = self._backend.config.success
        return bool(at_path(findings, path)) if path else reward >= 1.0


def _reward(answer: Mapping[str, Any]) -> float:
    """Reward of an answer. Raises DecodeError."""
    value = answer.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DecodeError(f"the server's reward {str(value)[:80]} is not a finite number")
    if abs(value) > MAX_REWARD:
        raise DecodeError(f"the server's reward {value:g} is beyond ±{MAX_REWARD:g}")
    return float(value)


def _plain(findings: Mapping[str, Any]) -> dict[str, Any]:
    """Part of a server's findings that is returned with the episode: numbers, flags and short texts."""
    short = {key: value for key, value in findings.items() if not isinstance(value, str) or len(value) <= _MAX_TOLD}
    kept = {key: value for key, value in short.items() if value is None or isinstance(value, bool | int | float | str)}
    return dict(list(kept.items())[:_MAX_FIELDS])


def _outputs(findings: Mapping[str, Any], ids: Sequence[str]) -> list[Message]:
    """Outputs of a turn's calls, in the order of the calls."""
    found = findings.get("tool_outputs")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    place = {call_id: number for number, call_id in enumerate(ids)}
    rows.sort(key=lambda row: place.get(str(row.get("call_id")), len(ids)))
    return [Message(role="tool", content=str(row.get("output", ""))) for row in rows]


def _observed(answer: Mapping[str, Any]) -> list[Message]:
    observation = answer.get("observation")
    return [user(str(observation)[:MAX_MESSAGE])] if observation else []
