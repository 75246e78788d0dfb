"""Claim tasks of a Volley run, play them, and send the rewards (docs/sessions.md).

A worker repeats each request until it is answered: claims by their request id, ends and rewards because a repeated one
changes nothing. A session that the run has given up meanwhile is left.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CLAIM_WAIT_S = 20
LONGEST_PAUSE_S = 10.0
LOST = frozenset({404, 409, 410})
"""Statuses of a session that is over for the run."""
LIMITS = ("context_length_exceeded", "calls_used_up")
"""Errors of calls after which an episode is rewarded as it stands."""

log = logging.getLogger("volley_agents")


class AgentFailed(Exception):
    """An episode that gives no reward; the run repeats it."""


class SessionLost(Exception):
    """A session that the run has given up."""


@dataclass(frozen=True)
class Session:
    """A claimed task: the model's address and key, and the messages that the environment's class returned.

    Sessions of one `ticket` are a group; an evaluation's ticket is 0.
    """

    id: str
    key: str
    base_url: str
    model: str
    task: str
    ticket: int
    messages: list[dict[str, Any]]

    @property
    def place(self) -> tuple[str, int]:
        """Split and index, as the class of `tasks_file` writes them."""
        split, _, index = self.messages[-1]["content"].partition(" ")
        return split, int(index)


@dataclass(frozen=True)
class Outcome:
    """Reward of an episode. `success` None: the reward is at least 1."""

    reward: float
    success: bool | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class Run:
    """Client of a run's orchestrator.

    Args:
        url: the orchestrator's address.
        token: a service's token.
        env: claims tasks of this environment alone.
    """

    def __init__(self, url: str, token: str | None = None, env: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(base_url=f"{url.rstrip('/')}/v1", headers=headers, timeout=CLAIM_WAIT_S + 20)
        self._env = env

    async def claim(self, request_id: str) -> Session | None:
        """Return the next task, None if there is none for some seconds."""
        body = {"request_id": request_id, "wait_s": CLAIM_WAIT_S} | ({"env": self._env} if self._env else {})
        answer = await self._send("/sessions", body)
        if answer.status_code == 204:
            return None
        made = answer.json()
        return Session(**{name: made[name] for name in Session.__dataclass_fields__})

    async def end(self, session: Session, outcome: Outcome | AgentFailed) -> None:
        """End a session with its reward, or with the reason of a failure. Raises SessionLost."""
        if isinstance(outcome, AgentFailed):
            await self._send(f"/sessions/{session.id}/end", {"failed": str(outcome)[:500] or "failed"})
            return
        await self._send(f"/sessions/{session.id}/end", {"output": ""})
        success = outcome.reward >= 1 if outcome.success is None else outcome.success
        reward = {"reward": outcome.reward, "success": success, "components": dict(outcome.components)}
        await self._send(f"/sessions/{session.id}/reward", reward)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Send until there is an answer. Raises SessionLost, httpx.HTTPStatusError for a refusal."""
        pause = 0.5
        while True:
            try:
                answer = await self._http.post(path, json=body)
            except httpx.TransportError as error:
                log.warning("the orchestrator cannot be reached: %s: %s", type(error).__name__, error)
            else:
                if answer.status_code in LOST and path != "/sessions":
                    raise SessionLost(answer.text[:300])
                if answer.status_code != 429 and answer.status_code < 500:
                    answer.raise_for_status()
                    return answer
                log.warning("the orchestrator answered %d: %s", answer.status_code, answer.text[:300])
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


async def work(run: Run, play: Callable[[Session], Awaitable[Outcome]], parallel: int) -> None:
    """Claim, play and end tasks, `parallel` at once, until cancelled.

    `play` raises AgentFailed, or anything, for an episode without reward.
    """
    name = uuid.uuid4().hex[:12]

    async def one(number: int) -> None:
        n = 0
        while True:
            if (session := await run.claim(f"{name}/{number}/{n}")) is None:
                continue
            n += 1
            try:
                outcome: Outcome | AgentFailed = await play(session)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an agent may raise anything
                outcome = error if isinstance(error, AgentFailed) else AgentFailed(f"{type(error).__name__}: {error}")
                log.warning("%s failed: %s", session.task, outcome)
            try:
                await run.end(session, outcome)
            except SessionLost as error:
                log.warning("%s is over for the run: %s", session.task, error)

    async with asyncio.TaskGroup() as group:
        for number in range(parallel):
            group.create_task(one(number))


def tasks_file(name: str, n_train: int, n_eval: int) -> str:
    """Write the class that stands for these tasks in the run, for `volley train data.env=FILE`."""
    return f'''"""Tasks of {name}, which a worker plays outside: docs/bridges.md."""


class Tasks:
    agent = "external"
    splits = {{"train": {n_train}, "eval": {n_eval}}}

    def reset(self, split, index, seed):
        return f"{{split}} {{index}}"
'''


def split(n_tasks: int, n_eval: int, name: str) -> tuple[int, int]:
    """Return the sizes of the splits: the first `n_eval` tasks are held out. Raises SystemExit if none remain."""
    if n_eval < 1 or n_tasks <= n_eval:
        raise SystemExit(f"{name} has {n_tasks} tasks, {n_eval} held out: at least one for training and one held out")
    return n_tasks - n_eval, n_eval


def task_index(place: tuple[str, int], n_eval: int) -> int:
    """Return the position of a task in the whole: the first `n_eval` are held out."""
    name, index = place
    return index if name == "eval" else n_eval + index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all workers have."""
    parser.add_argument("--eval-tasks", type=int, default=50, help="number of tasks, from the first, that are held out")
    parser.add_argument("--write-tasks", type=Path, metavar="FILE", help="write the class for data.env, and end")
    parser.add_argument("--orchestrator", metavar="URL", help="address of the run's orchestrator")
    parser.add_argument("--token-file", type=Path, help="file with a service's token (VOLLEY_TOKEN_FILE_SERVICE)")
    parser.add_argument("--env", metavar="NAME", help="play tasks of this environment of the run alone")
    parser.add_argument("--parallel", type=int, default=8, help="episodes at once (default: 8)")


def run_of(given: argparse.Namespace) -> Run:
    """Make the client that the arguments ask for. Raises SystemExit without an address."""
    if not given.orchestrator:
        raise SystemExit("name --orchestrator URL (volley access RUN prints it), or --write-tasks FILE")
    file = given.token_file or os.environ.get("VOLLEY_TOKEN_FILE_SERVICE")
    return Run(given.orchestrator, Path(file).read_text(encoding="utf-8").strip() if file else None, given.env)


def until_stopped(main: Awaitable[None]) -> None:
    """Run until it ends, or SIGINT or SIGTERM comes."""

    async def outer() -> None:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            log.info("stopped")

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(outer())
