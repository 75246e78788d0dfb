"""`python -m volley_tinker.server --config tinker.yaml`: train for clients of Tinker's interface."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.boot import RunningService, main
from shared.process.imports import uncollected
from shared.schema import RunConfig


@asynccontextmanager
async def _open(config: RunConfig) -> AsyncIterator[RunningService]:
    with uncollected():
        from volley_tinker.server.app import open_tinker  # JAX and Tunix

    async with open_tinker(config) as service:
        yield service


if __name__ == "__main__":
    main("trainer", open_service=_open)
