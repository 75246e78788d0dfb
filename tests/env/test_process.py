"""The service as a process, through the client the orchestrator uses."""

import contextlib
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.env.app import open_service
from shared import config as configuration
from shared.clients.env import EnvClient
from shared.errors import NotFound, Unavailable
from shared.process.ports import free_port

COMMAND = [sys.executable, "-m", "services.env", "--config"]


def config(folder: Path, *lines: str) -> str:
    path = folder / "run.yaml"
    path.write_text("\n".join(["model: {path: none}", f"run: {{dir: {folder}}}", *lines]), encoding="utf-8")
    return str(path)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Base URL and process id of a running service; it is stopped by SIGTERM and must then end well."""
    port = free_port()
    with subprocess.Popen(
        [*COMMAND, config(tmp_path, "data: {env: sokoban}", f"services: {{env: {{port: {port}}}}}")]
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=30, trust_env=False) as client:
                assert client.get(f"{url}/ready").status_code == 200
            yield url, process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
    assert process.returncode == 0


@pytest.fixture
def service(process: tuple[str, int]) -> str:
    return process[0]


def test_a_service_without_a_file_descriptor_turns_clients_away_and_lives(process: tuple[str, int]) -> None:
    url, pid = process
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    n_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (n_open + 2, limits[1]))
    held = [socket.create_connection(address, timeout=30) for _ in range(n_open + 20)]  # it may be closing some
    try:
        turned_away, _, _ = select.select(held, [], [], 30)
        assert turned_away[0].recv(1) == b""
    finally:
        for one in held:
            one.close()
    with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=30, trust_env=False) as client:
        assert client.get(f"{url}/health").status_code == 200


async def test_a_folder_has_one_service(process: tuple[str, int], tmp_path: Path) -> None:
    overrides = ["services.env.processes=1"]
    with pytest.raises(Unavailable, match=f"another env service uses {tmp_path}/"):
        async with open_service(configuration.load([tmp_path / "run.yaml"], overrides).config):
            pass
    overrides = ["services.env.allow_changed_code=true"]
    async with open_service(configuration.load([tmp_path / "run.yaml"], overrides).config):
        pass  # that of `volley reverify`


async def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path: Path) -> None:
    overrides = ["services.env.folder=/sys/volley"]
    for _ in range(2):
        async with open_service(configuration.load([config(tmp_path, "data: {env: frozen_lake}")], overrides).config):
            pass


async def test_a_demonstration_is_played_through_the_client(service: str) -> None:
    async with EnvClient(service) as client:
        await client.ready()
        assert await client.num_tasks("sokoban", "eval") == 256
        shown = (await client.demonstration("sokoban", "eval", 3)).messages
        opening = await client.create("r", "sokoban", "eval", 3, seed=0)
        assert list(opening.messages) == shown[:1]
        result = None
        for n, message in enumerate(m for m in shown if m["role"] == "assistant"):
            result = await client.step(opening.episode_id, str(n), message["content"])
        assert result is not None
        assert result.success
        assert result.terminated
        assert sum(result.reward_components.values()) == pytest.approx(result.reward)
        await client.delete_episode(opening.episode_id)
        with pytest.raises(NotFound):
            await client.step(opening.episode_id, "late", "?")
        with pytest.raises(NotFound, match="frozen_lake, blocksworld, gymnasium"):
            await client.create("x", "maze", "eval", 0, seed=0)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("{env: maze}", "there is no environment 'maze' (available: frozen_lake, blocksworld, gymnasium,"),
        ("{env: gsm8k, train: nowhere/train.jsonl}", "data file nowhere/train.jsonl: No such file or directory"),
        ("{env: frozen_lake, env_config: {sizes: 8}}", "unknown setting sizes"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_two(tmp_path: Path, data: str, named: str) -> None:
    command = [*COMMAND, config(tmp_path, f"data: {data}", "services: {env: {port: 0}}")]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert named in ended.stderr


HUNG = """
import asyncio, threading, time
from services.env.threads import ThreadRunner

async def main():
    runner, begun = ThreadRunner(1, 60.0, max_waiting=1), threading.Event()

    def hang():
        begun.set()
        time.sleep(600)

    call = asyncio.ensure_future(runner.run("scripted", "scripted", "step", hang))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.wait([call])
    runner.close()

asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", HUNG], timeout=60).returncode == 0
