"""Execution of the tool calls of one message: validated, bounded, and concurrent where they are independent.

A mistake of the model becomes the text of an answer. A broken tool raises, and the episode fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bounds import shortened
from shared.errors import Busy, RateLimited, VolleyError, first_error
from shared.process import telemetry
from volley_sandbox.tools.base import ToolDescription, ToolFault, ToolSession
from volley_sandbox.tools.settings import ToolUse
from volley_serving.dialects.calls import ToolCall

TURN_S = 25.0
"""Seconds for all calls of a message; a client waits a little longer for a step."""

_CALLS = telemetry.Counter(
    "volley_env_tool_calls_total", "Tool calls of models, by what became of them", ["tool", "outcome"],
    registry=telemetry.REGISTRY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """Answer to a call; `ok` says that the call was carried out."""

    text: str
    ok: bool


class EpisodeTools:
    """Tools of one episode.

    Args:
        sessions: open sessions with distinct tool names; they are closed with the episode.
    """

    def __init__(self, sessions: Sequence[ToolSession], use: ToolUse) -> None:
        self._sessions, self._use = sessions, use
        self._by_name = {tool.name: session for session in sessions for tool in session.tools}
        self._left = use.max_calls
        self._slots = asyncio.Semaphore(use.parallel)
        self.n_calls = self.n_faults = 0

    @property
    def tools(self) -> tuple[ToolDescription, ...]:
        return tuple(tool for session in self._sessions for tool in session.tools)

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """Answer each call, in order; calls beyond the limits share one answer.

        Raises Busy (none of them has begun, so the message may be repeated), RateLimited (some had begun when one found
        no capacity), VolleyError.
        """
        taken = calls[: min(self._use.max_calls_per_turn, self._left)]
        self._left -= len(taken)
        answers: list[ToolAnswer | None] = [None] * len(taken)
        lanes: dict[str, list[int]] = {}
        for i, call in enumerate(taken):
            session = self._by_name.get(call.name)
            lanes.setdefault((session.lane if session is not None else None) or f"call {i}", []).append(i)
        deadline = asyncio.get_running_loop().time() + TURN_S
        begun: set[int] = set()
        refused = False

        async def work(numbers: Sequence[int]) -> None:
            nonlocal refused
            for i in numbers:
                async with self._slots:
                    if refused:
                        return
                    begun.add(i)
                    try:
                        answers[i] = await self._answer_call(taken[i], deadline)
                    except Busy:
                        begun.discard(i)
                        refused = True
                        raise

        try:
            async with asyncio.TaskGroup() as tasks:
                for numbers in lanes.values():
                    tasks.create_task(work(numbers))
        except* VolleyError as failed:
            error = first_error(failed)
            if not isinstance(error, Busy):
                raise error from None
            if begun:
                detail = f"{error.detail}, after other calls of the message had begun"
                raise RateLimited(detail, "create another episode", error.retry_after_s) from error
            self._left += len(taken)
            raise error from None
        found = [answer for answer in answers if answer is not None]
        self.n_faults += sum(not answer.ok for answer in found)
        if len(taken) < len(calls):
            found.append(self._refused(len(calls) - len(taken)))
        self.n_calls += len(taken)
        return found

    async def close(self) -> None:
        """Close the sessions."""
        for session in self._sessions:
            await session.close()

    def _refused(self, n: int) -> ToolAnswer:
        if self._left == 0:
            why = f"there are {self._use.max_calls} in all, and none is left: answer without"
        else:
            why = f"at most {self._use.max_calls_per_turn} are taken from one message"
        return ToolAnswer(f"error: {n} tool calls were not carried out: {why}", False)

    async def _answer_call(self, call: ToolCall, deadline: float) -> ToolAnswer:
        session = self._by_name.get(call.name)
        try:
            if call.problem:
                raise ToolFault(call.problem)
            if session is None:
                raise ToolFault(f"there is no tool {call.name[:80]!r} (there are: {', '.join(self._by_name)})")
            text = await self._bounded(session, call, deadline)
        except ToolFault as fault:
            _CALLS.labels(call.name if session else "", "fault").inc()
            return ToolAnswer(shortened(f"error: {fault}", self._use.max_output), False)
        _CALLS.labels(call.name, "done").inc()
        return ToolAnswer(shortened(text, self._use.max_output), True)

    async def _bounded(self, session: ToolSession, call: ToolCall, deadline: float) -> str:
        timeout_s = min(self._use.timeout_s, deadline - asyncio.get_running_loop().time())
        if timeout_s <= 0:
            raise ToolFault(f"it was not carried out: the calls before it took more than {TURN_S:g} s")
        arguments: Mapping[str, Any] = call.arguments or {}
        return await session.call(call.name, arguments, timeout_s)
