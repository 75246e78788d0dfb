"""Play agents of NeMo-Gym (0.7) in the sessions of a Volley run.

    python -m volley_agents.nemo_gym rows.jsonl --write-tasks tasks.py
    python -m volley_agents.nemo_gym rows.jsonl --agent http://127.0.0.1:9001 --port 9100 --orchestrator URL

NeMo-Gym's servers run unchanged: resources, and an agent that calls the model server `policy_model`. This worker is
that model server. It starts each episode by the agent's `/run`, with the session's id as rollout id; NeMo-Gym writes
that id into the path of every call of the model (`observability_enabled: true`), and the call goes to that session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from volley_agents.sessions import (
    LIMITS,
    AgentFailed,
    Outcome,
    Session,
    add_arguments,
    run_of,
    split,
    task_index,
    tasks_file,
    until_stopped,
    work,
)

TIMEOUT_S = 3600.0
ROUTE = re.compile(r"/ng-rollout/([^/]+)(?:/training-token-capture)?/v1/(chat/completions|responses|messages)")
_REPEATED = ("idempotency-key", "x-stainless-retry-count")
"""Headers by which a session knows a repeated call."""


class ModelServer:
    """ASGI application that answers calls of the model from the session named in their path."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.limited: set[str] = set()
        """Sessions that reached the run's limit of calls or tokens."""
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        status, answer = await self.answer(request.url.path, await request.body(), request.headers)
        await Response(answer, status, media_type="application/json")(scope, receive, send)

    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Pass a call on to its session; return status and body."""
        found = ROUTE.fullmatch(path)
        if found is None:
            told = "no call of the model; set observability_enabled: true, so that calls carry their rollout's id"
            return 404, json.dumps({"error": f"{path} is {told}"}).encode()
        if (session := self.sessions.get(found[1])) is None:
            return 410, json.dumps({"error": f"rollout {found[1]} is over"}).encode()
        asked = json.loads(body) | {"model": session.model}
        sent = {"Authorization": f"Bearer {session.key}"} | {
            name: value for name, value in headers.items() if name in _REPEATED
        }
        answer = await self._http.post(f"{session.base_url}/{found[2]}", json=asked, headers=sent)
        if any(limit in answer.text for limit in LIMITS) and answer.is_error:
            self.limited.add(session.id)
        return answer.status_code, answer.content

    async def close(self) -> None:
        await self._http.aclose()


class Player:
    """Player of rows. Args: agent: address of the agent's server; rows: the held-out ones first."""

    def __init__(self, models: ModelServer, agent: str, rows: list[dict[str, Any]], n_eval: int) -> None:
        self._models, self._rows, self._n_eval = models, rows, n_eval
        self._http = httpx.AsyncClient(base_url=agent, timeout=TIMEOUT_S)

    async def play(self, session: Session) -> Outcome:
        """Let the agent play one row. An episode that reached the run's limits has no reward but 0.

        Raises AgentFailed.
        """
        row = self._rows[task_index(session.place, self._n_eval)]
        self._models.sessions[session.id] = session
        try:
            answer = await self._http.post("/run", json={**row, "_ng_rollout_id": session.id})
        except httpx.HTTPError as error:
            raise AgentFailed(f"the agent cannot be reached: {type(error).__name__}: {error}") from error
        finally:
            del self._models.sessions[session.id]
        if answer.is_error:
            if session.id in self._models.limited:
                self._models.limited.discard(session.id)
                return Outcome(0.0)
            raise AgentFailed(f"the agent answered {answer.status_code}: {answer.text[:300]}")
        return Outcome(float(answer.json()["reward"]))

    async def close(self) -> None:
        await self._http.aclose()


async def _serve(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    models, run = ModelServer(), run_of(given)
    player = Player(models, given.agent, rows, given.eval_tasks)
    server = uvicorn.Server(
        uvicorn.Config(models, host=given.host, port=given.port, log_level="warning", lifespan="off")
    )
    serving = asyncio.ensure_future(server._serve())  # without signal handlers of its own
    try:
        await work(run, player.play, given.parallel)
    finally:
        server.should_exit = True
        await serving
        for one in (player, models, run):
            await one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays agents of NeMo-Gym in the sessions of a Volley run.")
    parser.add_argument("rows", type=Path, help="file of JSON lines with responses_create_params")
    parser.add_argument("--agent", metavar="URL", help="address of the agent's server")
    parser.add_argument("--host", default="127.0.0.1", help="address of policy_model, which this process serves")
    parser.add_argument("--port", type=int, default=9100)
    add_arguments(parser)
    given = parser.parse_args()
    lines = given.rows.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    sizes = split(len(rows), given.eval_tasks, str(given.rows))
    if given.write_tasks:
        given.write_tasks.write_text(tasks_file(str(given.rows), *sizes), encoding="utf-8")
        print(f"wrote {given.write_tasks}: {sizes[0]} tasks for training, {sizes[1]} held out")
        return
    if not given.agent:
        raise SystemExit("name --agent URL, the address of the agent's server")
    until_stopped(_serve(given, rows))


if __name__ == "__main__":
    main()
