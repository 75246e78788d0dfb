"""Every service with a folder of its own, and nothing between them but Redis and HTTP; kill -9 of orchestrator and
trainer.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from shared.process.ports import free_port
from shared.queue.server import ServerSpec
from shared.run.folder import RunFolder
from tests.support.net import HTTP
from tools.embedded_redis import embedded_server
from volley.layout import PROJECT, python_of, variables_of
from volley.reporting import jsonl
from volley_proof.commands.replay import replayed
from volley_proof.verify.command import verify

pytestmark = pytest.mark.timeout(600)
CONFIG, N_STEPS = PROJECT / "tests/system/small.yaml", 6
REAL = {
    "env": ("services.env", "base"),
    "rollout": ("services.rollout", "rollout"),
    "orchestrator": ("services.orchestrator", "base"),
    "trainer": ("services.trainer", "trainer"),
}
SIMULATED = REAL | {"rollout": ("tools.simulated.rollout", "base"), "trainer": ("tools.simulated.trainer", "base")}
EVALUATED_FIRST = "orchestrator.generation.eval_share=null"
"""Training waits for evaluations: else one whose weights no server has any more, after a kill, is dropped."""


def until(seen: Callable[[], bool], logs: Callable[[], str]) -> None:
    """Raises AssertionError, with the logs, after four minutes."""
    deadline = time.monotonic() + 240
    while not seen():
        assert time.monotonic() < deadline, logs()
        time.sleep(0.1)


class SeparateServices:
    """Programs, by name a module and its environment, that each have a folder for `run.dir` and as the working
    directory.
    """

    def __init__(self, folder: Path, redis: ServerSpec, programs: dict[str, tuple[str, str]], *overrides: str) -> None:
        self._root, self._running, self._programs = folder, dict[str, subprocess.Popen[bytes]](), programs
        self._ports = {name: free_port() for name in programs}
        password = folder / "redis_password"
        password.write_text(redis.url.partition("://:")[2].partition("@")[0], encoding="utf-8")
        password.chmod(0o600)
        self._overrides = [
            f"model.path={PROJECT / 'configs/models/tiny'}",
            f"trainer.max_steps={N_STEPS}",
            "orchestrator.eval_every_n_steps=2",
            *overrides,
            f"services.redis_url=redis://127.0.0.1:{redis.url.rpartition(':')[2].partition('/')[0]}/0",
            f"services.redis_password_file={password}",
            *(f"services.{name}.port={port}" for name, port in self._ports.items()),
        ]

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self._root / name / "system")

    def start(self, name: str) -> None:
        own, (module, environment) = self._root / name, self._programs[name]
        own.mkdir(exist_ok=True)
        with (own / "log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [python_of(environment), "-m", module, "--config", CONFIG, *self._overrides, f"run.dir={own}"],
                cwd=own,
                stdout=log,
                stderr=log,
                env={**variables_of(environment, cpu=True), "PYTHONPATH": str(PROJECT)},
            )

    def follow(self) -> subprocess.Popen[bytes]:
        """Progress and report, with the trainer's folder."""
        command = [python_of("base"), "-m", "volley", "follow", "--config", CONFIG]
        environment = {**variables_of("base", cpu=True), "PYTHONPATH": str(PROJECT)}
        with (self._root / "log").open("ab") as log:
            self._running["follow"] = subprocess.Popen(
                [*command, *self._overrides, f"run.dir={self._root / 'trainer'}"],
                cwd=self._root,
                stdout=log,
                stderr=log,
                env=environment,
            )
        return self._running["follow"]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def lose(self, name: str) -> None:
        """Its folder is lost with it."""
        self.kill(name)
        shutil.rmtree(self.folder(name).path)
        self.start(name)

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def until_trained(self, step: int) -> None:
        """Raises AssertionError, with the logs, after four minutes."""
        metrics = self.folder("trainer").metrics
        until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) >= step, self.logs)

    def logs(self) -> str:
        return "\n".join(
            path.read_text(encoding="utf-8")[-3000:] for path in (self._root / "log", *self._root.glob("*/log"))
        )

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def separate_services(
    folder: Path, programs: dict[str, tuple[str, str]], *overrides: str
) -> Iterator[SeparateServices]:
    with embedded_server(folder / "redis") as redis, ExitStack() as stack:
        services = SeparateServices(folder, redis, programs, *overrides)
        stack.callback(services.stop)
        for name in programs:
            services.start(name)
        yield services


def survives(services: SeparateServices, *victims: tuple[int, str]) -> RunFolder:
    """The run's folder, after services were killed once a step was trained, and what it proves."""
    following = services.follow()
    for step, victim in victims:
        services.until_trained(step)
        services.kill(victim)
        services.start(victim)
    assert following.wait(300) == 0, services.logs()
    run, own = services.folder("trainer"), services.folder("orchestrator")
    result = verify(run)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert [row["step"] for row in jsonl.read(run.evals)] == [0, 2, 4, 6]
    assert (run.evals.read_bytes(), run.samples.read_bytes()) == (own.evals.read_bytes(), own.samples.read_bytes())
    written = {path.name for path in own.path.iterdir()}
    assert written <= {
        "evals.jsonl",
        "evals.lock",
        "samples.jsonl",
        "mixture.jsonl",
        "mixture.lock",
        "evals.beginning",
    }, written
    assert not services.folder("rollout").checkpoints.exists()
    return run


@pytest.mark.long
def test_simulated_services_without_a_common_folder_survive_the_loss_of_each_but_env(tmp_path: Path) -> None:
    with separate_services(tmp_path, SIMULATED, "sft.max_steps=0", EVALUATED_FIRST) as services:
        survives(services, (1, "orchestrator"), (2, "rollout"), (3, "trainer"))


@pytest.mark.long
def test_an_orchestrator_that_loses_its_folder_gives_tickets_the_tasks_of_the_mixture_that_was_chosen(
    tmp_path: Path,
) -> None:
    mixture = ("data.mixture.frozen_lake.weight=2", "data.mixture.sokoban.weight=1", "orchestrator.lease_s=2")
    with separate_services(tmp_path, SIMULATED, "sft.max_steps=0", *mixture) as services:
        run, own = services.folder("trainer"), services.folder("orchestrator")
        services.until_trained(1)
        assert HTTP.post(f"{services.url('trainer')}/pause").status_code == 200  # or it is done before the loss
        chosen = {"mixture": {"sokoban": 6}}
        answer = httpx.patch(f"{services.url('orchestrator')}/runs/system", json=chosen, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        until(lambda: run.mixture.exists(), services.logs)
        n_before = len(run.metrics.read_bytes().splitlines())
        assert n_before < N_STEPS
        services.lose("orchestrator")
        assert HTTP.post(f"{services.url('trainer')}/resume").status_code == 200
        assert services.follow().wait(300) == 0, services.logs()
        result = verify(run)
    assert result["ok"], result["violations"]
    assert len(jsonl.read(run.metrics)) > n_before, "there are groups of after the loss"
    assert len(jsonl.read(run.mixture)) == 1
    assert (run.mixture.read_bytes(), run.evals.read_bytes()) == (own.mixture.read_bytes(), own.evals.read_bytes())


@pytest.mark.long
def test_services_without_a_common_folder_survive_the_loss_of_orchestrator_and_trainer(tmp_path: Path) -> None:
    with separate_services(tmp_path, REAL, EVALUATED_FIRST) as services:
        run = survives(services, (1, "orchestrator"), (3, "trainer"))
    assert replayed(run, ["--from-step", "4"], None, show=False)["ok"]
