"""An environment service whose episodes are played by programs in this process, and a runner that lets them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from packages.agents.tests.sessions.recorder import MODEL, TOKENIZER, WIDE, Recorder, recording
from services.orchestrator.episodes.environments import EnvironmentCalls
from services.orchestrator.episodes.partials import PartialRollouts
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import TokenBounds, TurnSampler
from services.orchestrator.status import RunStatus
from shared.clients.env import Opening, ProgramReply, StepReply
from shared.errors import NotFound
from tests.orchestrator.fakes import ScriptedEngine, ScriptedEnv
from volley_agents.sessions.agents import SessionAgents

type Program = Callable[[openai.AsyncOpenAI], Awaitable[str]]
ASK = [{"role": "user", "content": "play"}]


async def talk(client: openai.AsyncOpenAI, n: int = 2) -> str:
    """A conversation of n calls."""
    messages = list(ASK)
    for _ in range(n):
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "next"}]
    return str(messages[-2]["content"])


@dataclass
class ProgramEnv(ScriptedEnv):
    """Args: play: the program; kind, judged: as the environment declares its agent; connect: makes its client."""

    play: Program = talk
    kind: str = "program"
    judged: bool = True
    connect: Callable[[str], openai.AsyncOpenAI] | None = None
    programs: dict[str, asyncio.Task[str]] = field(default_factory=dict)
    outputs: list[str | None] = field(default_factory=list)

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        made = await super().create(request_id, env, split, index, seed=seed)
        return Opening(made.episode_id, made.task, made.messages, agent=self.kind, judged=self.judged)

    async def run_program(self, episode_id, request_id, base_url, api_key, model) -> ProgramReply:
        self._require(episode_id)
        if episode_id not in self.programs:
            self.programs[episode_id] = asyncio.create_task(self.play(self.connect(api_key)))
        return ProgramReply("running")

    async def program(self, episode_id: str, wait_s: float = 0.0) -> ProgramReply:
        self._require(episode_id)
        task = self.programs[episode_id]
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            return ProgramReply("running")
        if task.cancelled() or task.exception() is not None:
            return ProgramReply("failed", 1, f"it ended with {task.exception() if not task.cancelled() else 'a kill'}")
        return ProgramReply("exited", 0, "", task.result())

    async def finish(self, episode_id: str, request_id: str, output: str | None = None) -> StepReply:
        self._require(episode_id)
        self.outputs.append(output)
        return StepReply([], 1.0, True, False, True, {"right": 1.0})

    async def delete_episode(self, episode_id: str) -> None:
        await super().delete_episode(episode_id)
        if (task := self.programs.get(episode_id)) is not None:
            task.cancel()

    def _require(self, episode_id: str) -> None:
        if episode_id not in self.open:
            raise NotFound(f"there is no episode {episode_id}")


@asynccontextmanager
async def orchestrating(
    folder: Path,
    env: ProgramEnv,
    bounds: TokenBounds = WIDE,
    engine: ScriptedEngine | None = None,
    partials: PartialRollouts | None = None,
):
    """A process of the orchestrator: yields its recorder and its runner."""
    async with recording(folder, bounds=bounds, engine=engine) as recorder:
        env.connect = lambda key: client_of(recorder, key)
        status, balancer = RunStatus(), recorder.balancer
        sampler = TurnSampler(balancer, status, TOKENIZER.end_ids, bounds)
        agents = SessionAgents(
            recorder.sessions, env, EnvironmentCalls(env, status), sampler, "http://recorder/v1", MODEL
        )
        yield recorder, EpisodeRunner(TOKENIZER, env, balancer, status, bounds, agents, partials)


def client_of(recorder: Recorder, key: str, **settings: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key, base_url="http://recorder/v1", http_client=recorder.http(), **{"max_retries": 0, **settings}
    )
