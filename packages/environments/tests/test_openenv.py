"""Environments served as OpenEnv: by frames, by our own client, and by OpenEnv's package, whose server we play too."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from services.env.episode_types import assistant
from shared.errors import Unauthorized, Unavailable
from shared.process.ports import free_port
from tools.openenv import ECHO_SERVER, PLAYER
from tools.openenv.installed import openenv_python
from volley_sandbox.backends.remote.protocols import RemoteEnvironment, checked, open_remote
from volley_sandbox.backends.remote.site import RemoteAccess
from volley_sandbox.submissions.validation import validate

TOKENS = {role: f"the-token-of-the-{role}" for role in ("viewer", "service", "admin")}
SERVICE = {"Authorization": f"Bearer {TOKENS['service']}"}


@contextmanager
def running(*command: object, ready: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([str(part) for part in command]) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=30, trust_env=False) as client:
                assert client.get(ready).status_code == 200
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an env service with tokens."""
    folder, port = tmp_path_factory.mktemp("openenv"), free_port()
    for role, token in TOKENS.items():
        (folder / role).write_text(token, encoding="utf-8")
        (folder / role).chmod(0o600)
    files = ", ".join(f"{role}: {folder / role}" for role in TOKENS)
    config = folder / "run.yaml"
    config.write_text(
        f"model: {{path: none}}\ndata: {{env: frozen_lake}}\nrun: {{name: x, dir: {folder}}}\n"
        f"services: {{env: {{port: {port}}}, token_files: {{{files}}}}}\n",
        encoding="utf-8",
    )
    url = f"http://127.0.0.1:{port}"
    with running(sys.executable, "-m", "services.env", "--config", config, ready=f"{url}/ready") as process:
        yield url
    assert process.returncode == 0


@asynccontextmanager
async def session(url: str, env: str = "frozen_lake", **headers: str) -> AsyncIterator[ClientConnection]:
    address = f"{url.replace('http', 'ws')}/openenv/{env}/ws"
    async with connect(address, additional_headers={**SERVICE, **headers}, proxy=None) as connection:
        yield connection


async def ask(connection: ClientConnection, kind: str, **data: Any) -> Mapping[str, Any]:
    await connection.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await connection.recv())


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False, headers=SERVICE) as client:
        text = (await client.get(f"{url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def test_a_session_plays_episodes_one_after_the_other(service: str) -> None:
    async with session(service) as connection:
        assert (await ask(connection, "state"))["data"] == {"episode_id": None, "step_count": 0, "task": None}
        opened = await ask(connection, "reset", split="eval", index=3, seed=1, episode_id="mine")
        assert opened["type"] == "observation"
        assert opened["data"]["observation"]["task"].startswith("eval/3@")
        assert (opened["data"]["reward"], opened["data"]["done"]) == (None, False)
        stepped = await ask(connection, "step", message="<answer>Right</answer>")
        assert stepped["data"]["reward"] == 0.0
        assert (
            "4 turns" in stepped["data"]["observation"]["text"] or "5 turns" in stepped["data"]["observation"]["text"]
        )
        state = (await ask(connection, "state"))["data"]
        assert (state["episode_id"], state["step_count"]) == ("mine", 1)
        again = await ask(connection, "reset", seed=4)
        assert again["data"]["observation"]["task"].startswith("train/4@")
        assert await metric(service, "volley_env_episodes ") == 1
    await no_episode_left(service)


async def no_episode_left(url: str) -> None:
    async with asyncio.timeout(60):
        while await metric(url, "volley_env_episodes "):
            await asyncio.sleep(0.05)


async def test_a_wrong_frame_gets_an_error_and_the_session_goes_on(service: str) -> None:
    async with session(service) as connection:
        for frame, code, told in (
            ("{", "VALIDATION_ERROR", "not valid JSON"),
            ("[]", "VALIDATION_ERROR", "a frame is"),
            ('{"type": "dance"}', "UNKNOWN_TYPE", "'dance'"),
            ('{"type": "step", "data": {"message": "x"}}', "VALIDATION_ERROR", "no episode in this session"),
            ('{"type": "step", "data": {"text": "x"}}', "VALIDATION_ERROR", "unknown field text"),
            ('{"type": "reset", "data": {"split": "test"}}', "VALIDATION_ERROR", "no split 'test'"),
            ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", "seed"),
        ):
            await connection.send(frame)
            answer = json.loads(await connection.recv())
            assert (answer["type"], answer["data"]["code"]) == ("error", code)
            assert told in answer["data"]["message"]
        assert (await ask(connection, "reset"))["type"] == "observation"
        await connection.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            await connection.recv()
    async with session(service, "nothing") as connection:
        assert "there is no environment 'nothing'" in (await ask(connection, "reset"))["data"]["message"]


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/openenv/frozen_lake/ws", "", 401),
        ("/openenv/frozen_lake/ws", TOKENS["viewer"], 403),
        ("/openenv/frozen_lake", TOKENS["service"], 403),
        ("/episodes", TOKENS["admin"], 403),
        ("/nowhere", "", 401),
    ],
)
async def test_a_websocket_needs_the_role_of_its_path(service: str, path: str, token: str, status: int) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with pytest.raises(InvalidStatus) as refused:
        await connect(service.replace("http", "ws") + path, additional_headers=headers, proxy=None)
    assert refused.value.response.status_code == status


async def test_a_frame_sent_with_the_handshake_is_answered(service: str) -> None:
    """As fast clients do: nothing of it is taken for another request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.rpartition(":")[2]))
    head = (
        "GET /openenv/frozen_lake/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: {SERVICE['Authorization']}\r\n\r\n"
    )
    frame = b'{"type": "state"}'
    writer.write(head.encode() + bytes([0x81, 0x80 | len(frame), 0, 0, 0, 0]) + frame)
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        answer = await reader.readexactly(2)
        assert b'"step_count":0' in await reader.readexactly(answer[1])
    writer.close()


async def test_a_frame_that_is_too_large_ends_the_session(service: str) -> None:
    async with session(service) as connection:
        with contextlib.suppress(ConnectionClosed):
            await connection.send("x" * (9 * 2**20))
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_our_client_plays_what_we_serve(service: str) -> None:
    backend = backend_of(
        f"{service}/openenv/frozen_lake",
        {"action_field": "message", "observation": "text", "success": "success", "reset_with": "task"},
        {service: TOKENS["service"]},
    )
    found = await validate(lambda known: backend)
    assert found.report.passed, found.report
    assert found.report.reward_min == -0.1


async def test_another_env_service_is_played_by_its_own_requests(service: str) -> None:
    few = {"name": "few", "base": "frozen_lake", "config": {"eval_tasks": 16}}
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {TOKENS['admin']}"}) as client:
        assert (await client.post(f"{service}/environments", json=few)).status_code == 201
    access = RemoteAccess({service: TOKENS["service"]}, None, 30.0)
    wanted = checked(RemoteEnvironment("volley", service, {"environment": "few"}))
    log: deque[str] = deque(maxlen=100)
    found = await validate(
        lambda known: open_remote("far", wanted, access, log, known.splits if known else {}, known is not None)
    )
    assert found.report.passed, found.report
    assert found.description is not None
    assert (found.description.splits["eval"], found.description.has_demonstration) == (16, True)
    assert "demonstrations" in {check.name for check in found.report.checks}
    backend = open_remote("far", wanted, access, log, found.description.splits, True)
    episode = await backend.reset("eval", 3, 0)
    assert episode.task == await backend.task("eval", 3)
    assert (await episode.step(assistant("no action"))).info.error == "format"
    await episode.close()
    await no_episode_left(service)
    stranger = open_remote("far", wanted, RemoteAccess({}, None, 30.0), log, found.description.splits, True)
    with pytest.raises(Unauthorized):
        await stranger.reset("eval", 3, 0)


async def test_another_env_service_is_killed_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    url, config = f"http://127.0.0.1:{port}", tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: none}}\ndata: {{env: sokoban}}\nrun: {{name: x, dir: {tmp_path}}}\n"
        f"services: {{env: {{port: {port}}}}}\n",
        encoding="utf-8",
    )
    server = (sys.executable, "-m", "services.env", "--config", config)
    wanted = checked(RemoteEnvironment("volley", url, {"environment": "sokoban"}))
    log: deque[str] = deque(maxlen=100)
    backend = open_remote("far", wanted, RemoteAccess({}, None, 30.0), log, {"train": 10}, False)
    with running(*server, ready=f"{url}/ready") as process:
        lost = await backend.reset("train", 0, 0)
        process.kill()
        process.wait()
        with pytest.raises(Unavailable, match=f"{port}.*nothing listens there"):
            await backend.reset("train", 1, 0)
        assert str(port) in (backend.stuck_reason() or "")
    with running(*server, ready=f"{url}/ready"):
        with pytest.raises(Unavailable, match="lost the episode"):
            await lost.step(assistant("<answer>Up</answer>"))
        await lost.close()
        episode = await backend.reset("train", 1, 0)
        assert not (await episode.step(assistant("<answer>Up</answer>"))).over
        assert backend.stuck_reason() is None
        await episode.close()


def backend_of(url: str, config: Mapping[str, Any], tokens: Mapping[str, str] | None = None) -> Any:
    access = RemoteAccess(tokens or {}, None, 30.0)
    return open_remote("far", checked(RemoteEnvironment("openenv", url, config)), access, deque(maxlen=100), {}, False)


@pytest.fixture(scope="module")
def openenv() -> Path:
    """A Python that has OpenEnv's package."""
    try:
        return openenv_python()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_openenvs_client_plays_what_we_serve(service: str, openenv: Path) -> None:
    actions = ["<answer>Right</answer>", "no action", "<answer>Down</answer>"]
    command = [openenv, PLAYER, f"{service}/openenv/frozen_lake", *actions]
    environment = {**os.environ, "TOKEN": TOKENS["service"]}
    played = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120, check=True)
    found = json.loads(played.stdout.splitlines()[-1])
    assert found["seen"][0]["observation"]["task"].startswith("eval/3@")
    assert [step["reward"] for step in found["seen"][1:]] == [0.0, pytest.approx(-0.1), 0.0]
    assert found["state"]["step_count"] == 3
    assert found["metadata"]["error"] is None


@pytest.mark.long
async def test_openenvs_server_is_played_killed_and_played_again(openenv: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    backend = backend_of(url, {"action_field": "message", "observation": "text"})
    server = (openenv, ECHO_SERVER, port, 16)
    with running(*server, ready=f"{url}/health") as process:
        found = await validate(lambda known: backend)
        assert found.report.passed, found.report
        episode = await backend.reset("train", 0, 0)
        assert episode.opening[-1]["content"].startswith("seed ")
        assert (await episode.step(assistant("hello"))).messages[0]["content"] == "1: hello"
        last = await episode.step(assistant("stop"))
        assert (last.reward, last.terminated, last.info.success) == (1.0, True, True)
        await episode.close()
        episode = await backend.reset("train", 1, 0)
        process.kill()
        process.wait()
        with pytest.raises(Unavailable, match=str(port)):
            await episode.step(assistant("hello"))
        await episode.close()
        with pytest.raises(Unavailable, match="nothing listens there"):
            await backend.reset("train", 1, 0)
        assert "nothing listens there" in (backend.stuck_reason() or "") or str(port) in (backend.stuck_reason() or "")
    with running(*server, ready=f"{url}/health"):
        episode = await backend.reset("train", 1, 0)
        assert (await episode.step(assistant("hello"))).messages[0]["content"] == "1: hello"
        assert backend.stuck_reason() is None
        await episode.close()


@pytest.mark.long
async def test_a_server_for_one_session_is_waited_for(openenv: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    backend = backend_of(url, {"action_field": "message", "observation": "text", "max_sessions": 1})
    with running(openenv, ECHO_SERVER, port, 1, ready=f"{url}/health"):
        found = await validate(lambda known: backend)
        assert found.report.passed, found.report
