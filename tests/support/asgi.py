"""An application served over real HTTP, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.services_schema import Limits, ServicesSection
from shared.web.serving import make_server

_QUICK = ServicesSection(limits=Limits(grace_s=1))


@asynccontextmanager
async def served(app: Any, services: ServicesSection = _QUICK, port: int = 0) -> AsyncIterator[str]:
    """Yields the base URL; the server has stopped when the context ends."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = make_server(app, services)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.005)
            try:
                yield services.local_url("env", listener.getsockname()[1])
            finally:
                server.should_exit = True
