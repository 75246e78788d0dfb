"""`volley dashboard`: look at runs in a browser."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.process.ports import hold, hold_free, host_problem
from shared.services_schema import ServicesSection
from shared.web.serving import make_server
from volley.printing import print_result
from volley.run_arguments import add_trust
from volley_dashboard.page.app import make_app
from volley_dashboard.page.entrance import Entrance, link
from volley_dashboard.page.runs import Runs
from volley_dashboard.page.sidecar import CODE, PORT


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="FOLDER",
        help="folders of runs, or folders that hold them (default: runs)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, help=f"default: {PORT}, or a free one if it is taken")
    parser.add_argument("--listener", type=int, metavar="FD", help=argparse.SUPPRESS)
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises as `main`."""
    if arguments.listener is not None:
        return _serve_beside(arguments.targets, arguments.listener)
    return main(arguments.targets, host=arguments.host, port=arguments.port)


def _serve_beside(folders: Sequence[Path], descriptor: int) -> int:
    """Serve on a socket of the parent process until standard input ends."""
    with socket.socket(fileno=descriptor) as listener:
        entrance = Entrance(os.environ.pop(CODE, None))
        return asyncio.run(_serve(Runs(folders), entrance, listener, _end_of_input))


def main(targets: Sequence[Path], *, host: str, port: int | None) -> int:
    """Serve until a signal. Raises ConfigError."""
    for folder in targets:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder", "name the folder of a run, or one that holds runs")
    try:
        listener = hold_free(host, PORT) if port is None else hold(host, port)
    except (OSError, OverflowError) as error:
        reason = host_problem(error) if isinstance(error, OSError) else None
        raise ConfigError(
            f"cannot listen on {host}:{PORT if port is None else port}: {reason or error}",
            "name another --host or --port",
        ) from error
    with listener:
        entrance = Entrance()
        assert entrance.code is not None
        address = link(listener, entrance.code)
        print_result({"url": address}, f"dashboard: {address}")
        return asyncio.run(_serve(Runs(targets), entrance, listener, asyncio.Event().wait))


async def _serve(
    runs: Runs, entrance: Entrance, listener: socket.socket, until: Callable[[], Coroutine[Any, Any, object]]
) -> int:
    """Serve until a signal, or until `until` returns."""
    app = make_app(runs, entrance)
    server = make_server(app, ServicesSection())
    loop, state = asyncio.get_running_loop(), app.state.dashboard

    def stop() -> None:
        state.ended.set()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(runs.warm))
        waiting = group.create_task(until())
        waiting.add_done_callback(lambda _: stop())
        await server.serve(sockets=[listener])
        waiting.cancel()
    return 0


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
