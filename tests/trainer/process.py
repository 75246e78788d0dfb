"""The real trainer process, and a producer whose groups are a pure function of the ticket."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from shared.process.ports import free_port
from shared.queue.client import connect
from shared.queue.queue import TicketQueue
from shared.queue.records import Reservation
from shared.types import Branch, Group, Trajectory, VersionSpan, WeightVersion
from tests.support.net import HTTP
from tests.support.redis import configured
from tests.trainer.support import group

ROOT = Path(__file__).parents[2]
BATCH, SIZE, ETA = 2, 2, 0
SIMULATED = "tools.simulated.trainer"
"""The module of a trainer without a model, where it is the process that is tested and not what it learns."""


def config(folder: Path, redis_url: str, port: int, **overrides: Any) -> dict[str, Any]:
    """A run of 5 synchronous steps of the committed tiny model on groups of 2."""
    tree: dict[str, Any] = {
        "run": {"name": "r", "dir": str(folder), "seed": 3},
        "model": {"path": str(ROOT / "configs/models/tiny"), "initial_weights": "random"},
        "data": {"env": "frozen_lake"},
        "grpo_config": {"num_generations": SIZE, "off_policy_steps": ETA},
        "algorithm": {"name": "grpo", "beta": 0.05},
        "trainer": {
            "max_steps": 5,
            "groups_per_step": BATCH,
            "order": "ticket",
            "length_buckets": [16],
            "train_micro_batch_size": 2,
        },
        "rollout": {"engine": {"context_length": 16}},
        "services": {**configured(redis_url, folder), "trainer": {"port": port}},
    }
    for dotted, value in overrides.items():
        *parents, leaf = dotted.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def in_use(devices: int | None = None) -> dict[str, str]:
    """The environment of a process that compiles as people's do, with so many devices, or as many as it gives
    itself.
    """
    flags = f"--xla_force_host_platform_device_count={devices}" if devices else ""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


@dataclass
class TrainerProcess:
    """`python -m services.trainer`, or one that learns something else, started again and again with the same
    configuration.
    """

    tree: dict[str, Any]
    folder: Path
    module: str = "services.trainer"
    url: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None)
    devices: int | None = None

    def start(self) -> None:
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.tree), encoding="utf-8")
        self.url = f"http://127.0.0.1:{self.tree['services']['trainer']['port']}"
        log = (self.folder / "trainer.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "--config", str(path)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=in_use(self.devices),
        )

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Inside, the process can write to no file: a limit on the size of its files stands for the disk."""
        assert self.process is not None
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # it was stopped meanwhile
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """SIGKILL, if it lives."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def terminate(self, timeout_s: float = 60) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def log(self) -> str:
        return (self.folder / "trainer.log").read_text(encoding="utf-8")

    def status(self) -> dict[str, Any]:
        return HTTP.get(f"{self.url}/status").json()

    def ask(self, route: str) -> None:
        HTTP.post(f"{self.url}/{route}").raise_for_status()

    def wait(self, what: Any, timeout_s: float = 280) -> dict[str, Any]:
        """The first status for which `what` holds."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process is not None
            assert self.process.poll() is None, self.log()[-3000:]
            try:
                status = self.status()
            except httpx.TransportError:
                status = {}
            if status and what(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"waited {timeout_s} s; last status {status}; log {self.log()[-3000:]}")


@contextmanager
def trainer(
    folder: Path, redis_url: str, module: str = "services.trainer", **overrides: Any
) -> Iterator[TrainerProcess]:
    folder.mkdir(parents=True, exist_ok=True)
    made = TrainerProcess(config(folder, redis_url, free_port(), **overrides), folder, module)
    made.start()
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.kill()


async def produce(redis_url: str, total: int, make: Any, *, max_staleness: int = ETA, run: str = "r") -> None:
    """Serves tickets until cancelled; `make(ticket, version)` is the group, version the one that was committed last:
    number and epoch of one look at the queue, as a trainer may begin between two.
    """
    redis = connect(redis_url)
    try:
        queue = TicketQueue(redis, run)
        while True:
            reserved = await queue.reserve_wait(30.0, BATCH, max_staleness, total, 0.5)
            if isinstance(reserved, Reservation):
                state = await queue.state()
                version = WeightVersion(state.epoch, state.version)
                await queue.publish(reserved.ticket, make(reserved.ticket, str(version)).encode())
    finally:
        await redis.aclose()


def deterministic(ticket: int, version: str) -> Group:
    """Make the group of a ticket; episodes of even tickets have a branch, which needs a second micro-batch."""
    made = group(ticket, version, n=SIZE, length=14, vocab=500)
    if ticket % 2:
        return made
    return replace(made, trajectories=tuple(replace(t, branches=(_branch(t),)) for t in made.trajectories))


def _branch(one: Trajectory) -> Branch:
    """Another answer to the second turn: see support.group."""
    return Branch(
        0,
        9,
        one.token_ids[:4][::-1],
        np.ones(4, np.uint8),
        one.logprobs[9:13],
        (VersionSpan(one.versions[0].version, 9, 13),),
        (),
    )


@contextmanager
def producing(redis_url: str, total: int, make: Any = deterministic, **options: Any) -> Iterator[None]:
    """`produce` in a thread of its own."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(produce(redis_url, total, make, **options))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
