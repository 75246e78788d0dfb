"""Boot path of every service: parse the configuration, bind, open resources, serve, clean up.

A service ends in one of four ways, each of which releases all resources:
- SIGTERM or SIGINT: stop accepting, cancel workers, finish requests within the grace period, exit code 0;
- a worker raises: the same, with the error's exit code (`exit_codes`); a service never keeps answering without its
  workers;
- a connection that never finishes is cut off after the grace period; a hanging cleanup or thread is killed `CLEANUP_S`
  later;
- start-up fails (configuration, taken port, unreachable Redis): the event `CANNOT_START` and the error's exit code.

The socket is bound before resources are opened, so that a taken port fails early; heavy imports come after both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import uvloop

from shared import config
from shared.errors import ConfigError, Unavailable, VolleyError
from shared.process import telemetry, watchdog
from shared.process.events import CANNOT_START, CRASHED, FORCED
from shared.process.exit_codes import FAILED, exit_code
from shared.process.imports import uncollected
from shared.process.ports import host_problem
from shared.process.traced import traced
from shared.process.utf8 import restart_in_utf8
from shared.schema import RunConfig
from shared.services import SERVICES
from shared.services_schema import Endpoint, TokenFiles
from shared.web.serving import HttpServer, make_server
from shared.web.tls import check_certificate

if TYPE_CHECKING:
    from fastapi import FastAPI

CLEANUP_S = 10.0
"""Time after the grace period, in seconds, for cleanup and for threads that Python waits for."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_log = telemetry.Log("boot")


@dataclass(frozen=True)
class RunningService:
    """Result of `open_service`: the HTTP application, and the workers that run alongside it."""

    app: FastAPI
    workers: Sequence[Callable[[], Awaitable[None]]] = field(default=())


type OpenService = Callable[[RunConfig], AbstractAsyncContextManager[RunningService]]


def main(
    name: str, *, requires: str | None = None, open_service: OpenService | None = None, entry: str | None = None
) -> None:
    """Entry point of `python -m services.NAME`; the section `services.NAME` holds its address.

    Args:
        requires: a library that the service's child processes import; its absence is reported here.
        open_service: replaces `services.NAME.app`, whose import waits until the configuration is parsed.
        entry: the function that opens the service, as MODULE:NAME, by default `services.NAME.app:open_service`.
    """
    restart_in_utf8()
    parser = argparse.ArgumentParser(prog=f"python -m services.{name}")
    config.add_arguments(parser)
    parser.add_argument("--listener", type=int, metavar="FD", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    telemetry.configure(name)
    try:
        loaded = config.load(arguments.config, arguments.overrides)
        check_certificate(loaded.config.services.tls)
        endpoint: Endpoint = getattr(loaded.config.services, name)
        if loaded.config.services.token_files == TokenFiles() and endpoint.host not in LOOPBACK:
            _log.warning("no tokens are configured: every caller has full access", host=endpoint.host)
        section = loaded.config.run
        given: int | None = arguments.listener
        with (
            traced(name, section.name, section.traces),
            bind(endpoint) if given is None else socket.socket(fileno=given) as listener,
        ):
            code = run(loaded.config, open_service or _load(name, requires, entry), listener)
    except VolleyError as error:
        _log.error(CANNOT_START, error=type(error).__name__, detail=str(error))
        raise SystemExit(exit_code(error)) from None
    raise SystemExit(code)


def _load(name: str, requires: str | None, entry: str | None) -> OpenService:
    """Import the service. Raises ConfigError if its libraries are not installed."""
    try:
        if requires is not None and importlib.util.find_spec(requires) is None:
            raise ModuleNotFoundError(name=requires)
        with uncollected():
            return resolve_name(entry or f"{SERVICES[name].module}.app:open_service")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"services.{name} needs {error.name}, which this Python does not have",
            "run it with the Python of its virtual environment: .venvs/base, .venvs/rollout or .venvs/trainer",
        ) from error


def bind(endpoint: Endpoint) -> socket.socket:
    """Bind the endpoint's socket.

    Raises ConfigError if the address cannot be used, Unavailable while another program uses the port.
    """
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((endpoint.host, endpoint.port))
    except OSError as error:
        listener.close()
        if (problem := host_problem(error)) is not None:
            raise ConfigError(
                f"cannot listen on {endpoint.host}:{endpoint.port}: {problem}",
                "name an address of this machine with services.<name>.host=…",
            ) from error
        kind = Unavailable if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(
            f"cannot listen on {endpoint.host}:{endpoint.port}: {error.strerror or error}",
            "another program may use the port; choose one with services.<name>.port=…",
        ) from error
    return listener


def run(run_config: RunConfig, open_service: OpenService, listener: socket.socket) -> int:
    """Run `serve` on its own event loop; after a signal the process ends, by force if necessary."""
    return asyncio.run(serve(run_config, open_service, listener), loop_factory=uvloop.new_event_loop)


async def serve(run_config: RunConfig, open_service: OpenService, listener: socket.socket) -> int:
    """Run one service until a signal or a crash; return the exit code. Raises VolleyError if it cannot start."""
    async with contextlib.AsyncExitStack() as stack:
        grace_s = run_config.services.limits.grace_s
        with _cancelled_by_signal(grace_s) as stopped:
            service = await stack.enter_async_context(open_service(run_config))
        if stopped.is_set():
            return 0
        server = make_server(service.app, run_config.services)
        with watchdog.watching():
            return await _run(server, service, listener, grace_s)
    return 0


@contextlib.contextmanager
def _cancelled_by_signal(grace_s: float) -> Iterator[asyncio.Event]:
    """Cancel the current task on a signal, absorb that cancellation and set the yielded event."""
    stopped, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if not stopped.is_set():
            _end_within(grace_s + CLEANUP_S)
        stopped.set()
        task.cancel()

    with _on_signal(stop):
        try:
            yield stopped
        except asyncio.CancelledError:
            if not stopped.is_set() or task.uncancel() > 0:
                raise


async def _run(server: HttpServer, service: RunningService, listener: socket.socket, grace_s: float) -> int:
    crashed: list[BaseException] = []
    tasks: list[asyncio.Task[None]] = []

    def stop() -> None:
        if not server.should_exit:
            _end_within(grace_s + CLEANUP_S)
        server.force_exit, server.should_exit = server.should_exit, True
        cancel()

    def cancel() -> None:
        """Cancel each worker once: a second cancellation would interrupt its cleanup.

        `Task.cancelling` is unreliable: Python 3.12 leaves it set after a TaskGroup in the worker has failed.
        """
        while tasks:
            tasks.pop().cancel()

    async def guarded(worker: Callable[[], Awaitable[None]]) -> None:
        try:
            await worker()
        except Exception as error:  # noqa: BLE001 - the boundary: whatever a worker raises ends the process
            crashed.append(error)
            _report_crash(error)
            stop()

    with _on_signal(stop):
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(guarded(worker)) for worker in service.workers)
            await server.serve(sockets=[listener])
            cancel()
    return exit_code(crashed[0]) if crashed else 0


def _end_within(seconds: float) -> None:
    """Force the process to exit after `seconds`, even if a thread hangs."""
    timer = threading.Timer(seconds, _end_by_force, [seconds])
    timer.daemon = True
    timer.start()


def _end_by_force(after_s: float) -> None:
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
    _log.error(FORCED, after_s=after_s, threads=threads)
    os._exit(FAILED)


def _report_crash(error: Exception) -> None:
    if isinstance(error, VolleyError):
        _log.error("worker failed", error=type(error).__name__, detail=str(error))
    else:
        _log.exception(CRASHED, error=type(error).__name__)


@contextlib.contextmanager
def _on_signal(callback: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
