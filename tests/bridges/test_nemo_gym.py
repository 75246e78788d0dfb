"""Agents of NeMo-Gym in a run's sessions: the worker between a recorder and an agent's server.

The agent's server here makes the requests that NeMo-Gym 0.7's `simple_agent` makes. The real package needs Python
3.13.14; docs/bridges.md has the commands.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from packages.agents.tests.sessions.programs import ProgramEnv, orchestrating
from packages.agents.tests.sessions.recorder import TOKENIZER, WIDE, said
from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.failures import AgentDied
from shared.process.ports import free_port
from tests.orchestrator.fakes import ScriptedEngine, spec
from tests.support.asgi import served

BRIDGE = Path("bridges/agents").absolute()
ROWS = [{"responses_create_params": {"input": [{"role": "user", "content": f"Row {n}"}]}} for n in range(4)]


def agent(model_url: str) -> FastAPI:
    """An agent that calls the model until it says "done", at most six times."""
    app = FastAPI()

    async def run(request: Request) -> Response:
        body = await request.json()
        asked, rollout = body["responses_create_params"], body["_ng_rollout_id"]
        async with httpx.AsyncClient(timeout=30) as http:
            for n in range(6):
                answer = await http.post(f"{model_url}/ng-rollout/{rollout}/v1/responses", json=asked)
                if answer.is_error:
                    return JSONResponse(f"inner server: {answer.text}", 500)
                output = answer.json()["output"]
                if output[0]["content"][0]["text"] == "done":
                    return JSONResponse({"reward": 1.0 / (n + 1), "response": answer.json()})
                more = [*output, {"role": "user", "content": "go on"}]
                asked = {**asked, "input": asked["input"] + more}
        return JSONResponse({"reward": 0.0})

    app.add_api_route("/run", run, methods=["POST"])
    return app


@asynccontextmanager
async def worker(folder: Path, orchestrator: str, agent_url: str, port: int) -> AsyncIterator[None]:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    command = [sys.executable, "-m", "volley_agents.nemo_gym", str(rows), "--eval-tasks", "1", "--parallel", "1"]
    more = ["--agent", agent_url, "--port", str(port), "--orchestrator", orchestrator]
    process = await asyncio.create_subprocess_exec(*command, *more, env={**os.environ, "PYTHONPATH": str(BRIDGE)})
    try:
        yield
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0


@pytest.mark.parametrize(("texts", "max_turns", "reward"), [(["a", "b", "done"], 64, 1 / 3), (["a"] * 6, 2, 0.0)])
async def test_calls_of_a_rollout_reach_its_session(
    tmp_path: Path, texts: list[str], max_turns: int, reward: float
) -> None:
    """The second episode is cut by the run's limit of calls: it has a reward, and is not played again."""
    env, port = ProgramEnv(kind="external", judged=False, prompt="train 1"), free_port()
    bounds = replace(WIDE, timeout_s=60.0, max_turns=max_turns)
    engine = ScriptedEngine(script=[said(text) for text in texts])
    async with (
        orchestrating(tmp_path, env, bounds, engine) as (recorder, runner),
        served(recorder.app) as url,
        served(agent(f"http://127.0.0.1:{port}")) as agent_url,
    ):
        recorder.app.state.sessions.base_url = f"{url}/v1"
        async with worker(tmp_path, url, agent_url, port):
            trajectory = await runner.run(spec(), TokenBudget(1))
    assert trajectory.reward == pytest.approx(reward)
    assert not trajectory.branches
    assert "Row 2" in TOKENIZER.decode(trajectory.token_ids.tolist())
    sampled = trajectory.token_ids[trajectory.loss_mask == 1].tolist()
    assert sampled == [token for ids in engine.outputs for token in ids]


async def test_an_agent_that_fails_gives_no_reward(tmp_path: Path) -> None:
    env, port = ProgramEnv(kind="external", judged=False, prompt="train 1"), free_port()
    async with (
        orchestrating(tmp_path, env, replace(WIDE, timeout_s=60.0)) as (recorder, runner),
        served(recorder.app) as url,
        worker(tmp_path, url, f"http://127.0.0.1:{free_port()}", port),
    ):
        with pytest.raises(AgentDied, match="cannot be reached"):
            await runner.run(spec(), TokenBudget(1))
