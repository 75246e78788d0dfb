"""The four ends of a service, each with a real process."""

import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from shared.process.exit_codes import AGAIN
from shared.process.ports import free_port
from tests.support.net import wait_http

PROGRAM = """
    import asyncio, logging, sys, time
    from contextlib import asynccontextmanager
    from pathlib import Path
    from shared import errors
    from shared import boot
    from shared.process import telemetry
    from shared.web.http import create_app
    from shared.data_schema import DataSection
    from shared.schema import ModelSection, RunConfig
    from shared.services_schema import EnvEndpoint, Limits, ServicesSection
    from shared.errors import ServiceUnreachable

    folder, port, mode, told = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], []
    limits = Limits(grace_s=1, header_timeout_s=600, body_timeout_s=600)
    config = RunConfig(model=ModelSection(path="x"), data=DataSection(env="e"),
                       services=ServicesSection(env=EnvEndpoint(port=port), limits=limits))

    @asynccontextmanager
    async def open_service(config):
        if mode == "unreachable":
            raise ServiceUnreachable("redis at nowhere")
        try:
            if mode == "slow start":
                (folder / "opening").touch()
                await asyncio.sleep(600)
            app = create_app("env", limits=config.services.limits, tokens=None, ready=lambda: None)
            @app.get("/slow")
            async def slow():
                await asyncio.sleep(600)
            @app.get("/blocking")
            async def a_handler_that_blocks():
                while not told:
                    time.sleep(0.01)
                time.sleep(0.5)
            async def worker():
                if mode == "crash":
                    await asyncio.sleep(0.2)
                    raise RuntimeError("boom")
                if mode == "configuration":
                    raise errors.ConfigError("trainer.groups_per_step may not change", "choose run.name=…")
                if mode == "stuck thread":
                    (folder / "stuck").touch()
                    await asyncio.to_thread(time.sleep, 600)
                try:
                    await asyncio.sleep(600)
                finally:
                    (folder / "worker").touch()
            yield boot.RunningService(app, [worker])
        finally:
            (folder / "cleaned").touch()

    class Told(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    telemetry.configure("env")
    logging.getLogger("volley.watchdog").addHandler(Told())
    boot.CLEANUP_S = 2.0 if mode == "stuck thread" else 100.0
    with boot.bind(config.services.env) as listener:
        raise SystemExit(boot.run(config, open_service, listener))
"""


class Program:
    def __init__(self, folder: Path, mode: str) -> None:
        (folder / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
        self.folder, self.port = folder, free_port()
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "program.py"), str(folder), str(self.port), mode],
            cwd=root,
            env={"PYTHONPATH": str(root)},
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=200)
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path):
    started = []

    def go(mode: str) -> Program:
        started.append(Program(tmp_path, mode))
        return started[-1]

    yield go
    for program in started:
        program.process.kill()
        program.process.wait()


def test_sigterm_ends_with_zero_and_cleanup(start, tmp_path):
    program = start("plain")
    wait_http(f"http://127.0.0.1:{program.port}/ready")
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == 0
    assert (tmp_path / "cleaned").exists()
    assert (tmp_path / "worker").exists()


def test_crashed_worker_ends_with_one_and_cleanup(start, tmp_path):
    code, err = start("crash").end()
    assert code == 1
    assert "boom" in err
    assert (tmp_path / "cleaned").exists()


def test_a_worker_that_finds_the_configuration_wrong_ends_with_two(start, tmp_path):
    code, err = start("configuration").end()
    assert code == 2
    assert "trainer.groups_per_step may not change (choose run.name=…)" in err
    assert (tmp_path / "cleaned").exists()


def test_open_connections_do_not_delay_the_end_beyond_the_grace(start, tmp_path):
    program = start("plain")
    wait_http(f"http://127.0.0.1:{program.port}/ready")
    with (
        socket.create_connection(("127.0.0.1", program.port)) as slow,
        socket.create_connection(("127.0.0.1", program.port)) as half,
    ):
        slow.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        half.sendall(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        time.sleep(0.2)
        program.process.send_signal(signal.SIGTERM)
        assert program.end()[0] == 0
    assert (tmp_path / "cleaned").exists()


def test_a_thread_that_hangs_does_not_keep_the_process(start, tmp_path):
    program = start("stuck thread")
    while not (tmp_path / "stuck").exists():
        assert program.process.poll() is None, "it ended before it began"
        time.sleep(0.01)
    program.process.send_signal(signal.SIGTERM)
    code, err = program.end()
    assert code == 1
    assert "ended by force" in err


def test_a_blocked_loop_is_logged_with_its_stack_and_measured(start):
    program = start("plain")
    wait_http(f"http://127.0.0.1:{program.port}/ready")
    wait_http(f"http://127.0.0.1:{program.port}/blocking")
    with urllib.request.urlopen(f"http://127.0.0.1:{program.port}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    program.process.send_signal(signal.SIGTERM)
    warning = next(
        event for line in program.end()[1].splitlines() if (event := json.loads(line))["event"] == "event loop blocked"
    )
    assert warning["stack"][-1].endswith(" a_handler_that_blocks")
    late = {name: float(value) for name, value in re.findall(r'loop_lag_seconds_bucket{le="([^"]+)"} (\S+)', metrics)}
    assert late["+Inf"] > late["1.0"]
    assert "process_resident_memory_bytes" in metrics
    assert "process_open_fds" in metrics


def test_signal_while_starting_ends_with_zero_and_cleanup(start, tmp_path):
    program = start("slow start")
    while not (tmp_path / "opening").exists():
        assert program.process.poll() is None, "it ended before it began"
        time.sleep(0.01)
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == 0
    assert (tmp_path / "cleaned").exists()


def test_a_taken_port_is_one_line(tmp_path):
    config = tmp_path / "c.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(
            f"model: {{path: x}}\ndata: {{env: frozen_lake}}\nservices: {{env: {{port: {port}}}}}\n", encoding="utf-8"
        )
        done = subprocess.run(
            [sys.executable, "-m", "services.env", "--config", str(config)],
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )
    assert done.returncode == AGAIN
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
