"""The dashboard beside a run: `volley train` listens, and starts the server when a browser connects.

So it takes neither time nor memory of a run that nobody looks at.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shared.process.ports import hold_free
from shared.run.folder import RunFolder
from shared.run_config import value_of
from shared.schema import RunConfig
from volley.printing import print_lines
from volley_dashboard import helper_process
from volley_dashboard.keys import DASHBOARD
from volley_dashboard.page.entrance import link, new_code

PORT = 8100
CODE = "VOLLEY_DASHBOARD_CODE"
"""Variable with the code of the link, for the server's process."""
_STOP_S = 5.0


def sidecar(folder: RunFolder, config: RunConfig) -> AbstractContextManager[None]:
    """Offer the dashboard of a run inside the context, if its configuration wants it."""
    return in_browser(folder, print_lines) if value_of(config, DASHBOARD) else nullcontext()


@contextmanager
def in_browser(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Offer the dashboard inside the context; `say` gets its link."""
    try:
        listener = hold_free("127.0.0.1", PORT)
        listener.listen(16)
    except OSError as error:
        say(f"no dashboard: {error.strerror}")
        yield
        return
    code = new_code()
    say(f"dashboard: {link(listener, code)}")
    with listener, _serving(listener, folder, code):
        yield


@contextmanager
def _serving(listener: socket.socket, folder: RunFolder, code: str) -> Iterator[None]:
    servers = list[subprocess.Popen[bytes]]()
    woken, wake = socket.socketpair()

    def wait() -> None:
        readable, _, _ = select.select([listener, woken], [], [])
        if listener in readable and woken not in readable:
            servers.append(_start(listener, folder, code))

    thread = threading.Thread(target=wait, name="dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        wake.close()
        thread.join()
        woken.close()
        for started in servers:
            helper_process.end(started, _STOP_S)


def _start(listener: socket.socket, folder: RunFolder, code: str) -> subprocess.Popen[bytes]:
    number = listener.fileno()
    arguments = ["dashboard", str(folder.path.parent), "--listener", str(number)]
    return helper_process.start(
        arguments, folder.logs / "dashboard.log", pass_fds=[number], env={**os.environ, CODE: code}
    )
