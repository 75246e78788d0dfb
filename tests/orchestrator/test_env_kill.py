"""An env service killed with SIGKILL in the middle of episodes: each goes on, and no turn is sampled twice."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from services.env.environments.kinds import kinds
from services.orchestrator.episodes.turn import TokenBounds
from shared.clients.env import EnvClient
from shared.clients.rollout import Generation
from shared.process.ports import free_port
from shared.types import Trajectory
from tests.orchestrator.fakes import Say, ScriptedEngine, balancer_of, dispatcher_of, spec
from tests.support.tokenizer import tiny_tokenizer

BOUNDS = TokenBounds(30_000, 64, max_turns=6, timeout_s=120.0, max_attempts=1)
GAMES = ("frozen_lake", "sokoban", "blocksworld", "tetris", "gymnasium")
SAID = ("Right", "Down", "Left", "Up", "0", "1", "2", "3", "(move 1 2)", "drop", "nothing")
COUNTER = """
class Counter:
    splits = {"train": 400, "eval": 50}

    def reset(self, split, index, seed):
        self.n = 0
        return f"{split} {index}"

    def step(self, text):
        self.n += 1
        return f"{self.n} turns", 1.0, False, False, {}

    def snapshot(self):
        return self.n

    def restore(self, snapshot):
        self.n = snapshot
"""
"""Its answers would tell that an episode was played again from its beginning: they count."""


@dataclass
class EnvService:
    """The service as a process that is started again after a kill."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        file = self.folder / "run.yaml"
        env = {"port": self.port, "unsandboxed": ["counter"]}
        run = {"model": {"path": "none"}, "run": {"dir": str(self.folder)}, "services": {"env": env}}
        file.write_text(yaml.safe_dump({**run, "data": {"env": "frozen_lake"}}), encoding="utf-8")
        self.process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.env", "--config", str(file))

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[EnvService, EnvClient]]:
    service = EnvService(folder)
    await service.start()
    try:
        async with EnvClient(f"http://127.0.0.1:{service.port}") as client:
            await _until_ready(client)
            yield service, client
    finally:
        await service.kill()


async def _until_ready(client: EnvClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.ready()
            except Exception:  # noqa: BLE001 - it is starting
                await asyncio.sleep(0.05)


@dataclass
class PlayingEngine(ScriptedEngine):
    """Says something that one of the games may understand, and kills the service at requests of these numbers."""

    service: EnvService | None = None
    kills_at: tuple[int, ...] = ()
    n_asked: int = 0

    async def generate(self, input_ids: np.ndarray, sampling: Mapping[str, Any], rid: str, **more: Any) -> Generation:
        self.n_asked += 1
        if self.service is not None and self.n_asked in self.kills_at:
            await self.service.kill()
            await self.service.start()
        return await super().generate(input_ids, sampling, rid, **more)

    def _seeded(self, sampling: Mapping[str, Any]) -> Say:
        tokenizer = tiny_tokenizer()
        text = random.Random(sampling["sampling_seed"]).choice(SAID)
        return Say([*tokenizer.encode(f"<answer>{text}</answer>"), tokenizer.eos_id])


async def played(client: EnvClient, engine: PlayingEngine, envs: tuple[str, ...]) -> list[Trajectory]:
    dispatcher = dispatcher_of(client, balancer_of(engine), BOUNDS)  # pyright: ignore[reportArgumentType]
    specs = [replace(spec(ticket, sample), env=env) for ticket, env in enumerate(envs, start=1) for sample in range(2)]
    return await asyncio.gather(*(dispatcher.episode(one, "train") for one in specs))


async def test_episodes_go_on_after_the_service_is_killed_and_no_turn_is_sampled_twice(tmp_path: Path) -> None:
    assert {*GAMES} == kinds().keys() - {"code", "gsm8k", "math", "reasoning_gym", "text_to_sql"}, "those of one turn"
    async with running(tmp_path) as (service, client):
        await client.submit({"name": "counter", "source": COUNTER, "weight": 0.0})
        async with asyncio.timeout(60):
            while (await client.versions("counter"))[-1]["state"] != "active":
                await asyncio.sleep(0.05)
        envs = (*GAMES, "counter")
        calm = PlayingEngine()
        expected = await played(client, calm, envs)
        n = len(calm.prompts)
        assert n > 40
        killing = PlayingEngine(service=service, kills_at=(n // 4, n // 2, 3 * n // 4))
        found = await played(client, killing, envs)
    assert len(killing.prompts) == n, "a turn was sampled again"
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert (one.turns, one.reward, one.end, one.attempt) == (other.turns, other.reward, other.end, 0)
    failures = [one.failures for one in found]
    assert {name for counts in failures for name in counts} <= {"ServiceUnreachable", "NotReady", "EpisodeLost"}
    assert sum(map(bool, failures)) >= len(found) // 2, "episodes were lost"
