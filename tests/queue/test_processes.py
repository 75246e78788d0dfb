"""`kill -9` of producers, trainer and server, wiped servers and trainers that come back from the dead: the weights at
the end are, bit for bit, those of a run without faults.

Faults strike when the run reaches given steps, so the test does the same on slow machines; only the phase within a step
is left to chance.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shared.queue.server import prepare
from tests.queue import workers
from tools.embedded_redis import running

PRODUCERS = ("producer 1", "producer 2")
LIMIT_S = 150.0


class Cluster:
    """The processes of one run, restarted whenever they end. Leaving the context kills what is left."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.spec = prepare(folder / "redis")
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.zombies: list[subprocess.Popen[bytes]] = []
        self.exits: list[int] = []
        self._server = ExitStack()

    def __enter__(self) -> Cluster:
        self.redis = self._server.enter_context(running(self.spec))
        for name in (*PRODUCERS, "trainer"):
            self.children[name] = self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.children.values(), *self.zombies):
            process.kill()
            process.wait()
        self._server.close()

    def start(self, name: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-m", "tests.queue.workers", name.split()[0], str(self.checkpoints)]
        return subprocess.Popen(arguments, env={**os.environ, "QUEUE_URL": self.spec.url})

    def keep_running(self) -> None:
        for name, process in self.children.items():
            if process.poll() is not None and not self.finished():
                self.exits.append(process.returncode)
                self.children[name] = self.start(name)

    def step(self) -> int:
        return max((int(path.name.rpartition("s")[2]) for path in workers.checkpoints(self.checkpoints)), default=0)

    def finished(self) -> bool:
        return self.step() == workers.STEPS

    # Faults

    def kill(self, name: str) -> None:
        self.children[name].kill()
        self.children[name].wait()

    def kill_trainer(self) -> None:
        self.kill("trainer")

    def kill_producers(self) -> None:
        for name in PRODUCERS:
            self.kill(name)

    def kill_server(self, wipe: bool = False) -> None:
        self.redis.kill()
        self._server.close()
        if wipe:
            shutil.rmtree(self.spec.folder / "appendonlydir")
        self.redis = self._server.enter_context(running(self.spec))

    def wipe_server(self) -> None:
        self.kill_server(wipe=True)

    def kill_everything(self) -> None:
        self.redis.kill()
        self.kill_trainer()
        self.kill_producers()
        self.kill_server()

    def replace_trainer(self) -> None:
        """The trainer hangs, a successor takes over, the trainer wakes up."""
        zombie = self.children["trainer"]
        zombie.send_signal(signal.SIGSTOP)
        self.zombies.append(zombie)
        self.children["trainer"] = self.start("trainer")
        before = max(workers.checkpoints(self.checkpoints)).name[:7]
        self.until(lambda: max(workers.checkpoints(self.checkpoints)).name[:7] > before)
        zombie.send_signal(signal.SIGCONT)

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < end, f"stuck at step {self.step()}"
            self.keep_running()
            time.sleep(0.02)


@pytest.mark.timeout(LIMIT_S * 2)
def test_weights_survive_every_kill(tmp_path: Path):
    chance = random.Random(0)
    with Cluster(tmp_path) as cluster:
        faults = [
            cluster.kill_trainer,
            cluster.kill_producers,
            cluster.kill_server,
            cluster.replace_trainer,
            cluster.wipe_server,
            cluster.kill_everything,
        ]
        for i, fault in enumerate(faults):
            cluster.until(lambda at=9 * (i + 1): cluster.step() >= at)
            time.sleep(chance.uniform(0.0, 0.1))
            fault()
        cluster.until(cluster.finished)
        for process in (*cluster.zombies, cluster.children["trainer"]):
            process.wait(60)
        _, _, weights = workers.newest(cluster.checkpoints)
        assert [zombie.returncode for zombie in cluster.zombies] == [workers.FENCED_EXIT]
        assert set(cluster.exits) <= {-signal.SIGKILL, workers.FENCED_EXIT}
    assert weights.tobytes() == workers.reference().tobytes()
    assert np.isfinite(weights).all()
