"""The rollout service with an engine's process that hangs where its script says: faults of a process without the weight
of a model.

`python -m tests.rollout.scripted --config …` is the service, `python -m tests.rollout.scripted_worker FD` its engine.
The engine's silence is noticed soon; from SIGUSR1 on it is not suffered for long.
"""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.rollout.api import generation
from services.rollout.app import open_rollout
from services.rollout.engines.sglang_jax import client
from services.rollout.settings import from_config
from shared.boot import RunningService, main
from shared.schema import RunConfig

client.SILENCE_S, generation.SILENT_S = 600.0, 2.0


def lose_patience(_number: int, _frame: object) -> None:
    client.SILENCE_S = 4.0


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[RunningService]:
    async with open_rollout(
        from_config(config), lambda spec: client.open_engine(spec, "tests.rollout.scripted_worker")
    ) as service:
        yield service


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lose_patience)
    main("rollout", open_service=open_service)
