"""kill -9 of trainer and server, again and again in the middle of transfers: right weights, or the old ones."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.cli.layout import PROJECT
from tests.rollout.server import wait_until
from tests.support import models
from tests.support.net import free_port

CONFIG = models.tiny_config(
    hidden_size=8, intermediate_size=8, vocab_size=400_000
)  # 12.8 MB: two chunks and small ones
N_KILLS = 10


def trainer_program(root: Path, port: int) -> None:
    """Publishes version after version, each with a seed that is its step, and serves them slowly."""
    import asyncio
    from functools import partial

    from services.trainer.publishing import routes
    from services.trainer.publishing.publications import Publications
    from services.trainer.publishing.routes import PublishingState
    from shared.run.weights import ManifestLeaf
    from shared.services_schema import Limits
    from shared.types import WeightVersion
    from shared.web.http import create_app
    from shared.weights.serving import Uplink
    from tests.support.asgi import served

    epoch_file = root / "epoch"
    epoch = int(epoch_file.read_text()) + 1 if epoch_file.exists() else 1
    epoch_file.write_text(str(epoch))
    made = Publications(root / "published", "test")

    def publish(step: int) -> None:
        arrays = models.random_weights(CONFIG, 1000 * epoch + step)
        leaves = [ManifestLeaf(name, value.shape, "float32") for name, value in arrays.items()]
        reads = {name: partial(np.asarray, value) for name, value in arrays.items()}
        version = made.publish(WeightVersion(epoch, step), leaves, reads, CONFIG, None)
        with (root / "digests").open("a") as file:
            file.write(json.dumps([str(version.version), version.digest]) + "\n")
        made.announce(version)

    async def serve() -> None:
        app = create_app("trainer", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)

        async def sources() -> tuple[str, ...]:
            return (f"http://127.0.0.1:{port}",)

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


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, *command], cwd=PROJECT, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_in_the_middle_of_transfers_leave_right_weights_or_the_old_ones(tmp_path: Path) -> None:
    port, trainer_port = free_port(), free_port()
    model = models.write_hf(tmp_path / "model", CONFIG)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: test, dir: {tmp_path / 'host'}}}\nmodel: {{path: {model}}}\ndata: {{env: none}}\n"
        f"services: {{rollout: {{port: {port}}}, trainer: {{port: {trainer_port}}}}}\n"
    )
    url, rng = f"http://127.0.0.1:{port}", np.random.default_rng(0)
    trainer = ("-m", "tests.rollout.test_transfer_kills", str(tmp_path), str(trainer_port))
    server = ("-m", "tools.simulated.rollout", "--config", str(config))
    seen = set[tuple[str, str]]()

    def serves() -> tuple[str, str] | None:
        try:
            told = httpx.get(f"{url}/weights", timeout=10, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return None
        if told.get("current") is not None:
            seen.add((told["current"], told["digest"]))
            return told["current"], told["digest"]
        return None

    def moved_on_from(before: tuple[str, str] | None) -> bool:
        return (now := serves()) is not None and now != before

    with running(*server) as first:
        rollout = first
        for kill in range(N_KILLS):
            with running(*trainer):
                before = serves()
                wait_until(lambda before=before: moved_on_from(before), 60)
                deadline = time.monotonic() + rng.uniform(0, 2)
                while time.monotonic() < deadline:
                    serves()
            if kill % 3 == 2:
                rollout.kill()
                rollout.wait()
                rollout = subprocess.Popen([sys.executable, *server], cwd=PROJECT, stderr=subprocess.DEVNULL)
        rollout.kill()
        rollout.wait()
    published = {tuple(json.loads(line)) for line in (tmp_path / "digests").read_text().splitlines()}
    assert seen <= published
    assert len(seen) >= N_KILLS


if __name__ == "__main__":
    trainer_program(Path(sys.argv[1]), int(sys.argv[2]))
