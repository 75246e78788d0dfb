"""The env service with a counting echo environment, for a benchmark. Run like `python -m services.env`.

The environment is that of tools/openenv/echo_server.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shared.process.imports import uncollected

with uncollected():  # as the service itself
    from pydantic import BaseModel, ConfigDict

    from services.env import app
    from services.env.environments.kinds import EnvironmentKind, kinds
    from services.env.episode_types import Demonstration, Info, Message, StepResult, check_task, user
    from shared import boot
    from shared.boot import RunningService
    from shared.errors import NotFound
    from shared.schema import RunConfig

N_STEPS = 1000
_COUNTS = {"train": 100_000, "eval": 1000}


class EchoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EchoEpisode:
    """Ends after N_STEPS steps; the last has reward 1."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, seed: int) -> None:
        self.opening: tuple[Message, ...] = (user(f"seed {seed}"),)
        self._count = 0

    def step(self, message: Message) -> StepResult:
        self._count += 1
        over = self._count >= N_STEPS or message["content"] == "stop"
        echo = user(f"{self._count}: {message['content']}")
        return StepResult((echo,), float(over), over, False, Info({"reward": float(over)}, success=over))


class EchoEnvironment:
    splits = tuple(_COUNTS)

    def __init__(self, config: EchoConfig) -> None:
        self.config = config

    def num_tasks(self, split: str) -> int:
        check_task("echo", _COUNTS, split, 0)
        return _COUNTS[split]

    def task(self, split: str, index: int) -> str:
        check_task("echo", _COUNTS, split, index)
        return f"{split}/{index}"

    def reset(self, split: str, index: int, seed: int) -> EchoEpisode:
        check_task("echo", _COUNTS, split, index)
        return EchoEpisode(seed)

    def demonstration(self, split: str, index: int) -> Demonstration:
        raise NotFound("echo has no demonstrations")


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    kinds()["echo"] = EnvironmentKind(EchoConfig, EchoEnvironment)
    async with app.open_service(config) as service:
        yield service


if __name__ == "__main__":
    boot.main("env", open_service=open_service)
