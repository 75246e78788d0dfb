"""HTTP server of every service: uvicorn with Volley's connections, limits and TLS, and without signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from shared.services_schema import Limits, ServicesSection
from shared.web.connection import Connection

if TYPE_CHECKING:
    from fastapi import FastAPI

_KEEP_ALIVE_S = 30
_TLS_S = 5.0
_OWN_FILES = 256
"""File descriptors reserved for files, Redis and other services."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers; those of shared.boot run on the loop and reach the workers too."""

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self._limits = limits

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does for bound sockets, with Volley's connections and a deadline for the TLS handshake."""
        assert sockets is not None
        loop, n_max = asyncio.get_running_loop(), connections_for(self._limits.max_connections)
        deadlines: dict[str, Any] = {}
        if self.config.ssl is not None:
            deadlines = {"ssl_handshake_timeout": self._limits.header_timeout_s, "ssl_shutdown_timeout": _TLS_S}

        def connect() -> Connection:
            return Connection(self._limits, n_max, config=self.config, server_state=self.server_state, app_state={})

        self.servers = [
            await loop.create_server(
                connect, sock=listener, ssl=self.config.ssl, backlog=self.config.backlog, **deadlines
            )
            for listener in sockets
        ]
        self.started = True


def make_server(app: FastAPI, services: ServicesSection) -> HttpServer:
    """Make the server; its certificate has passed `shared.web.tls.check_certificate`.

    WebSockets are enabled by `app.state.websockets`.
    """
    max_body_bytes = getattr(app.state, "max_body_bytes", services.limits.max_body_bytes)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="websockets-sansio" if getattr(app.state, "websockets", False) else "none",
        ws_max_size=max_body_bytes,
        ws_per_message_deflate=False,
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=services.tls.cert_file,
        ssl_keyfile=services.tls.key_file,
        timeout_graceful_shutdown=max(1, int(services.limits.grace_s)),
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    return HttpServer(config, services.limits.model_copy(update={"max_body_bytes": max_body_bytes}))


def connections_for(wanted: int) -> int:
    """Return the number of connections that the limit of open files allows; raise the soft limit if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= wanted + _OWN_FILES:
        return wanted
    soft = max(soft, min(hard, wanted + _OWN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(soft // 2, min(wanted, soft - _OWN_FILES))
