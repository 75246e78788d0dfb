"""kill -9 of trainer, servers that pull from it and from each other, and their connections, again and again in the
middle of transfers: right weights, or the old ones. Real services over HTTP, around engines that load weights and
compute nothing.
"""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from shared.process.ports import free_port
from tests.rollout.server import wait_until
from tests.support import models
from tests.support.net import HTTP
from volley.layout import PROJECT

CONFIG = models.tiny_config(
    hidden_size=8, intermediate_size=8, vocab_size=400_000
)  # 12.8 MB: two chunks and small ones
N_KILLS = 10


def trainer_program(root: Path, port: int, *sources_of_all: str) -> None:
    """Publishes version after version, each with a seed that is its step, and serves them slowly."""
    import asyncio
    from functools import partial

    from services.trainer.publishing import routes
    from services.trainer.publishing.publications import ModelToPublish, Publications
    from services.trainer.publishing.routes import PublishingState
    from shared.published.serving import Uplink
    from shared.run.checkpoint_files import ManifestLeaf
    from shared.services_schema import Limits
    from shared.types import WeightVersion
    from shared.web.http import create_app
    from tests.support.asgi import served

    epoch_file = root / "epoch"
    epoch = int(epoch_file.read_text(encoding="utf-8")) + 1 if epoch_file.exists() else 1
    epoch_file.write_text(str(epoch), encoding="utf-8")
    made = Publications(root / "published", "test")

    def publish(step: int) -> None:
        arrays = models.random_weights(CONFIG, 1000 * epoch + step)
        leaves = [ManifestLeaf(name, value.shape, "float32") for name, value in arrays.items()]
        reads = {name: partial(np.asarray, value) for name, value in arrays.items()}
        version = made.publish(WeightVersion(epoch, step), ModelToPublish(leaves, reads, CONFIG, None))
        with (root / "digests").open("a", encoding="utf-8") as file:
            file.write(json.dumps([str(version.version), version.digest]) + "\n")
        made.announce(version)

    async def serve() -> None:
        app = create_app("trainer", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)

        async def sources() -> tuple[str, ...]:
            return sources_of_all

        def slowly(digest: str) -> bytes:
            time.sleep(0.1)
            return made.read(digest)

        app.state.publishing = PublishingState(made, Uplink(slowly), sources)
        app.include_router(routes.router)
        async with served(app, port=port):
            step = 0
            while True:
                await asyncio.to_thread(publish, step := step + 1)
                await asyncio.sleep(1.0)

    asyncio.run(serve())


class Wire:
    """Passes connections on to a port, until they are `cut`."""

    def __init__(self, target: int) -> None:
        self._target, self._open = target, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(a, b), daemon=True).start()

    def _pass_on(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(2**16):
                b.sendall(data)
        _end(a, b)

    def cut(self) -> None:
        _end(*self._open)
        self._open.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


class Server:
    """A rollout server that may be killed and comes back; what it has said that it serves is in `seen`."""

    def __init__(self, folder: Path, model: Path, trainer_port: int, seen: set[tuple[str, str]]) -> None:
        self._port, self._seen = free_port(), seen
        folder.mkdir()
        config = folder / "run.yaml"
        config.write_text(
            f"run: {{name: test, dir: {folder / 'host'}}}\nmodel: {{path: {model}}}\ndata: {{env: none}}\n"
            f"services: {{rollout: {{port: {self._port}}}, trainer: {{port: {trainer_port}}}}}\n",
            encoding="utf-8",
        )
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [sys.executable, "-m", "tools.simulated.rollout", "--config", str(config)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=PROJECT, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._start()

    def serves(self) -> tuple[str, str] | None:
        try:
            told = HTTP.get(f"{self.url}/weights", timeout=10).json()
        except (httpx.HTTPError, ValueError):
            return None
        if told.get("current") is None:
            return None
        self._seen.add((told["current"], told["digest"]))
        return told["current"], told["digest"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_in_the_middle_of_transfers_leave_right_weights_or_the_old_ones(tmp_path: Path) -> None:
    trainer_port, rng, seen = free_port(), np.random.default_rng(0), set[tuple[str, str]]()
    model, wire = models.write_hf(tmp_path / "model", CONFIG), Wire(trainer_port)
    servers = [Server(tmp_path / name, model, wire.port, seen) for name in ("one", "peer")]
    sources = [f"http://127.0.0.1:{wire.port}", *(server.url for server in servers)]
    trainer = [sys.executable, "-m", "tests.rollout.test_transfer_kills", str(tmp_path), str(trainer_port), *sources]
    try:
        for _ in range(N_KILLS):
            before = [server.serves() for server in servers]
            with subprocess.Popen(trainer, cwd=PROJECT, stderr=subprocess.DEVNULL) as process:
                try:
                    for server, old in zip(servers, before, strict=True):
                        wait_until(lambda server=server, old=old: server.serves() not in (None, old), 60)
                    for fault in rng.permutation(np.array([wire.cut, *(server.restart for server in servers)])):
                        deadline = time.monotonic() + rng.uniform(0, 0.7)
                        while time.monotonic() < deadline:
                            for server in servers:
                                server.serves()
                        fault()
                finally:
                    process.kill()
    finally:
        wire.close()
        for server in servers:
            server.kill()
    published = {tuple(json.loads(line)) for line in (tmp_path / "digests").read_text(encoding="utf-8").splitlines()}
    assert seen <= published
    assert len(seen) >= N_KILLS


if __name__ == "__main__":
    trainer_program(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
