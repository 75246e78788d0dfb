"""The engine's process is killed or stopped at every moment: the service ends or waits, and never hangs. Real
processes, no model.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from jax.errors import JaxRuntimeError

from services.rollout import metrics
from services.rollout.engines.base import EngineSpec
from services.rollout.engines.sglang_jax.client import open_engine
from services.rollout.engines.sglang_jax.link import frame
from services.rollout.engines.sglang_jax.worker import _as_weights_error, translated
from services.rollout.engines.staged import StagedWeights
from services.rollout.weights.updater import WeightUpdater
from shared.errors import ConfigError, DeviceFailed, EngineDied, OutOfMemory, Unavailable, VolleyError, WeightsError
from shared.models.config import ModelConfig
from shared.process.exit_codes import AGAIN, FAILED, REFUSED, exit_code
from shared.process.ports import free_port
from tests.rollout.server import wait_until
from tests.support import models
from tests.support.net import HTTP, wait_http

CONFIG = models.tiny_config(num_hidden_layers=1, hidden_size=8, intermediate_size=8, vocab_size=8)
MODEL = ModelConfig.parse(CONFIG)
VERSION = "e000001-s000001"


@dataclass
class ScriptedProcess:
    """`folder` is the model's; a file `hang-OP` in it makes the engine's process never answer OP."""

    folder: Path
    root: Path
    url: str
    process: subprocess.Popen[bytes]

    @property
    def engine(self) -> int:
        wait_until(lambda: (self.folder / "pid").is_file() and (self.folder / "pid").read_text(encoding="utf-8") != "")
        return int((self.folder / "pid").read_text(encoding="utf-8"))

    def ready(self) -> tuple[int, str]:
        answer = HTTP.get(f"{self.url}/ready", timeout=5)
        return answer.status_code, answer.text

    def post(self, path: str, body: dict) -> int:
        """The status; 0 if the connection was cut."""
        with contextlib.suppress(httpx.TransportError):
            return HTTP.post(f"{self.url}{path}", json=body, timeout=30).status_code
        return 0

    def reach(self, op: str) -> None:
        """Starts what makes the engine hang in OP, and returns when it does."""
        checkpoint = str(self.root / VERSION)
        calls = {
            "generate": ("/generate", {"input_ids": [5]}),
            "stage": ("/weights/stage", {"manifest": checkpoint}),
            "commit": ("/update_weights", {"manifest": checkpoint}),
        }
        if op in calls:
            pool = ThreadPoolExecutor(1)
            pool.submit(self.post, *calls[op])
            pool.shutdown(wait=False)
            wait_until(lambda: (self.folder / f"reached-{op}").exists())


@contextlib.contextmanager
def scripted(tmp_path: Path, op: str) -> Iterator[ScriptedProcess]:
    """A service whose engine hangs in `op`; with weights, unless it hangs while it gets them."""
    port, folder, root = free_port(), tmp_path / "model", tmp_path / "run" / "checkpoints"
    models.write_hf(folder, CONFIG)
    (folder / f"hang-{op}").touch()
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: run, dir: {tmp_path}}}\nmodel: {{path: {folder}}}\ndata: {{env: none}}\n"
        f"services: {{rollout: {{port: {port}}}, limits: {{grace_s: 2}}}}\n",
        encoding="utf-8",
    )
    if op not in ("stage", "commit"):
        models.write_checkpoint(root, VERSION, CONFIG, models.random_weights(CONFIG, 0), run="run")
    command = [sys.executable, "-m", "tests.rollout.scripted", "--config", str(config)]
    with subprocess.Popen(command, env=os.environ | {"SCRIPT": str(folder)}) as process:
        try:
            server = ScriptedProcess(folder, root, f"http://127.0.0.1:{port}", process)
            if op != "boot":
                wait_http(f"{server.url}/health")
            if op not in ("boot", "stage", "commit"):
                wait_http(f"{server.url}/ready")
            elif op != "boot":
                models.write_checkpoint(root, VERSION, CONFIG, models.random_weights(CONFIG, 0), run="run")
            yield server
        finally:
            process.kill()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((folder / "pid").read_text(encoding="utf-8")), signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("op", ["boot", "generate", pytest.param("stage", marks=pytest.mark.long), "commit"])
def test_the_service_ends_when_its_engine_is_killed(tmp_path: Path, op: str) -> None:
    with scripted(tmp_path, op) as server:
        engine = server.engine
        server.reach(op)
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(20) == AGAIN


def test_a_stopped_engine_is_not_routed_to_and_then_replaced(tmp_path: Path) -> None:
    """Stopped for a moment it is waited for, and time in which the service itself stood still does not count."""
    with scripted(tmp_path, "generate") as server:
        os.kill(server.engine, signal.SIGSTOP)
        wait_until(lambda: server.ready()[0] == 503)
        assert "silent" in server.ready()[1]
        assert server.post("/generate", {"input_ids": [5]}) == 503
        os.kill(server.engine, signal.SIGCONT)
        wait_until(lambda: server.ready()[0] == 200)
        server.process.send_signal(signal.SIGUSR1)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        server.process.send_signal(signal.SIGCONT)
        assert server.ready()[0] == 200
        server.reach("generate")
        engine = server.engine
        os.kill(engine, signal.SIGSTOP)
        assert server.process.wait(30) == AGAIN
        assert not lives(engine)


def test_sigterm_ends_the_service_of_a_stopped_engine(tmp_path: Path) -> None:
    with scripted(tmp_path, "generate") as server:
        server.reach("generate")
        engine = server.engine
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not lives(engine)


async def test_an_engine_too_busy_to_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end the workers that ask it, or keep weights from being updated."""
    monkeypatch.setattr("services.rollout.engines.sglang_jax.client.ANSWER_S", 0.05)
    monkeypatch.setattr("services.rollout.weights.updater.AUDIT_S", 0.01)
    model, root = models.write_hf(tmp_path / "model", CONFIG), tmp_path / "checkpoints"
    monkeypatch.setenv("SCRIPT", str(model))
    async with open_engine(EngineSpec(str(model), load_weights=False), "tests.rollout.scripted_worker") as engine:
        updates = WeightUpdater(engine, root, MODEL, "test")
        folder = models.write_checkpoint(root, VERSION, CONFIG, models.random_weights(CONFIG, 0))
        await updates.update(str(folder), None)
        for op in ("audit", "status", "abort"):
            (model / f"hang-{op}").touch()
        for call in (engine.audit(), engine.status(), engine.abort(None)):
            with pytest.raises(Unavailable, match="did not answer"):
                await call
        for worker in (updates.guard(), metrics.observe(engine)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(worker, 0.5)
        newer = models.write_checkpoint(root, "e000001-s000002", CONFIG, models.random_weights(CONFIG, 0))
        await updates.update(str(newer), None)
        assert updates.current == "e000001-s000002"


async def test_weights_that_nobody_waits_for_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would be held beside those that are staged in their stead."""
    model = models.write_hf(tmp_path / "model", CONFIG)
    monkeypatch.setenv("SCRIPT", str(model))
    for op in ("stage", "forget"):
        (model / f"hang-{op}").touch()
    async with open_engine(EngineSpec(str(model), load_weights=False), "tests.rollout.scripted_worker") as engine:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stage(StagedWeights(str(tmp_path), VERSION)), 0.2)
        await asyncio.to_thread(wait_until, (model / "reached-forget").exists)


@pytest.mark.parametrize(
    ("fails", "kind", "code", "words"),
    [
        ("signal", EngineDied, AGAIN, r"signal 9 \(SIGKILL\)"),
        ("exit", VolleyError, FAILED, "exit code 1"),
        ("configuration", ConfigError, REFUSED, "the pool does not fit"),
    ],
)
async def test_an_engine_that_cannot_boot_says_whether_another_start_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, kind: type[VolleyError], code: int, words: str
) -> None:
    monkeypatch.setenv("FAILS", fails)
    model = models.write_hf(tmp_path / "model", CONFIG)
    with pytest.raises(VolleyError, match=words) as failed:
        async with open_engine(EngineSpec(str(model), load_weights=False), "tests.rollout.failing_worker"):
            pass
    assert (type(failed.value), exit_code(failed.value)) == (kind, code)


def test_a_fault_of_a_device_may_pass_and_a_defect_does_not() -> None:
    fault = translated(JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_INSTRUCTION"))
    assert (exit_code(fault), "CUDA_ERROR_ILLEGAL_INSTRUCTION" in str(fault)) == (AGAIN, True)
    assert exit_code(translated(RuntimeError("a defect"))) == FAILED
    assert exit_code(translated(ConfigError("a mesh of 3"))) == REFUSED


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(24, "Too many open files"), Unavailable),
        (RuntimeError("can't start new thread"), Unavailable),
        (JaxRuntimeError("INTERNAL: a device is lost"), DeviceFailed),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), OutOfMemory),
        (MemoryError("no room"), OutOfMemory),
        (ValueError("a shape is wrong"), WeightsError),
    ],
)
def test_a_fault_of_the_machine_is_no_refusal_of_the_weights(error: Exception, kind: type[VolleyError]) -> None:
    assert type(_as_weights_error(error, "e000001-s000001")) is kind


TALKING = """
import sys
from services.rollout.engines.sglang_jax import worker
class Talking:
    def __init__(self, link): self.link = link
    def run(self):
        while True: self.link.{op}
worker._boot = lambda spec, link: (Talking(link), {{}})
sys.exit(worker.main(int(sys.argv[1])))
"""


@pytest.mark.parametrize("op", ["send({'op': 'done', 'results': []})", "receive(9.0)"])
def test_an_engine_whose_service_is_gone_ends_without_a_word(op: str) -> None:
    """It may notice before the signal that ends it with the service: with messages unread, the kernel resets the link.
    A traceback in the log would tell of a crash that was none.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", TALKING.format(op=op), str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        try:
            theirs.close()
            ours.sendall(frame({"op": "start", "spec": dataclasses.asdict(EngineSpec("model"))}))
            received = b""
            while b"ready" not in received:
                data = ours.recv(1 << 16)
                assert data != b"", received
                received += data
            time.sleep(0.1)
            ours.close()
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, b"")
