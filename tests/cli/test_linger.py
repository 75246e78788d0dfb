"""The first of several hosts answers for a while after the end of the run, so that the others notice the end."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from shared import config
from shared.process.ports import free_port
from tests.support.stack import SIMULATED as CONFIG
from tools.chaos.arena import SIMULATED
from volley.commands import train
from volley.local.hosts import RunHost
from volley.local.stack import StackSeams


@dataclass(frozen=True)
class EndlessPlace(RunHost):
    """A host that lingers without end; `lingers` is set once it begins to."""

    lingers: threading.Event = field(default_factory=threading.Event)

    def __getattribute__(self, name: str) -> Any:
        if name == "linger_s":
            self.lingers.set()
            return 3600.0
        return super().__getattribute__(name)


def test_services_answer_after_the_end_of_the_run_until_the_host_has_lingered(tmp_path: Path) -> None:
    port = free_port()
    overrides = [f"run.dir={tmp_path}", "run.dashboard=false", "trainer.max_steps=1", "services.rollout_replicas=1"]
    loaded = config.load([CONFIG], [*overrides, f"services.orchestrator.port={port}"])
    place = EndlessPlace("127.0.0.1", {"env": 1, "rollout": 1, "orchestrator": 1, "trainer": 1})
    answers, ended = list[int](), threading.Event()

    def ask_and_stop() -> None:
        while not (place.lingers.wait(0.1) or ended.is_set()):
            pass
        if not ended.is_set():
            answers.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code)
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask_and_stop)
    asking.start()
    try:
        code = train.start_or_continue(loaded, StackSeams(SIMULATED, place=place))
    finally:
        ended.set()
        asking.join()
    assert (code, answers) == (128 + signal.SIGTERM, [200])
