"""Remote environments as submissions: an OpenEnv server as a process of its own, which is also killed."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import ConfigError, InputError
from shared.process.ports import free_port
from tests.env.conftest import OpenClient
from tests.support.submitted import decided, play, reached, timed_out
from volley_sandbox.backends.remote import address
from volley_sandbox.backends.remote.site import open_access
from volley_sandbox.submissions.canary import MIN_EPISODES

SETTINGS = {"observation": "text", "action_field": "message", "num_tasks": {"train": 100, "eval": 20}}


@contextmanager
def serving(port: int, mode: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "packages.sandbox.tests.openenv_server", str(port), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def openenv() -> Iterator[Callable[..., str]]:
    """Starts a server; its address."""
    with ExitStack() as stack:

        def start(mode: str = "") -> str:
            port = free_port()
            stack.enter_context(serving(port, mode))
            return f"http://127.0.0.1:{port}"

        yield start


async def submit(client: httpx.AsyncClient, url: str, weight: float = 0.0, **config: Any) -> httpx.Response:
    body = {"name": "far", "url": url, "protocol": "openenv", "config": {**SETTINGS, **config}, "weight": weight}
    return await client.post("/environments", json=body)


async def answer(client: httpx.AsyncClient, request_id: str, index: int = 0, says: str | None = None) -> httpx.Response:
    """One episode of one step, which by default is right."""
    body = {"request_id": request_id, "env": "far", "split": "train", "index": index}
    made = await client.post("/episodes", json=body)
    assert made.status_code == 201, made.text
    text = says or made.json()["messages"][-1]["content"].removeprefix("Say ").removesuffix(".")
    step = {"request_id": "1", "message": {"role": "assistant", "content": text}}
    return await client.post(f"/episodes/{made.json()['episode_id']}/step", json=step)


async def test_a_server_is_validated_tried_and_played(open_client: OpenClient, openenv: Callable[..., str]) -> None:
    async with open_client() as client:
        url = openenv()
        taken = await submit(client, url + "/", weight=1.0, instruction="Repeat the number.")
        assert (taken.status_code, taken.json()["state"], taken.json()["url"]) == (202, "submitted", url)
        row = await decided(client, "far")
        assert row["state"] == "canary", row
        assert [check["name"] for check in row["report"]["checks"] if not check["ok"]] == []
        assert {"reachable", "determinism", "disjoint splits"} <= {check["name"] for check in row["report"]["checks"]}
        assert row["splits"] == {"train": 100, "eval": 20}
        for i in range(MIN_EPISODES):
            stepped = await answer(client, str(i), index=i)
            assert stepped.json()["reward"] == 1.0
            assert stepped.json()["terminated"] is stepped.json()["info"]["success"] is True
            assert stepped.json()["info"]["metadata"] == {"steps": 1}
        assert (await reached(client, "far", "active"))["protocol"] == "openenv"
        body = {"request_id": "new", "env": "far@1", "split": "eval", "index": 3}
        opened = (await client.post("/episodes", json=body)).json()
        assert [message["role"] for message in opened["messages"]] == ["system", "user"]
        assert opened["task"].startswith("eval/3@")
    async with open_client() as client:
        assert (await answer(client, "again")).json()["reward"] == 1.0


async def test_a_killed_server_costs_its_episodes_and_comes_back_by_itself(open_client: OpenClient) -> None:
    port = free_port()
    async with open_client() as client:
        with serving(port) as process:
            await submit(client, f"ws://127.0.0.1:{port}")
            assert (await decided(client, "far"))["state"] == "active"
            body = {"request_id": "1", "env": "far", "split": "train", "index": 0}
            running = (await client.post("/episodes", json=body)).json()["episode_id"]
            process.kill()
            process.wait()
            message = {"role": "assistant", "content": "7"}
            lost = await client.post(f"/episodes/{running}/step", json={"request_id": "1", "message": message})
            assert (lost.status_code, f"127.0.0.1:{port}" in lost.json()["detail"]) == (503, True), lost.text
        refused = await client.post("/episodes", json={**body, "request_id": "2"})
        assert (refused.status_code, "nothing listens there" in refused.json()["detail"]) == (503, True)
        row = (await client.get("/environments")).json()["environments"][-1]
        assert (row["name"], row["state"]) == ("far@1", "active")
        assert f"127.0.0.1:{port}" in row["trouble"]
        assert "nothing listens there" in (await client.get("/environments/far/logs")).json()["log"]
        with serving(port):
            assert (await answer(client, "3")).json()["reward"] == 1.0
            assert (await client.get("/environments")).json()["environments"][-1]["trouble"] is None


async def test_half_a_surrogate_pair_in_an_observation_is_replaced(
    open_client: OpenClient, openenv: Callable[..., str]
) -> None:
    async with open_client() as client:
        await submit(client, openenv("cut"))
        row = await decided(client, "far")
        assert row["state"] == "active", row
        made = await client.post("/episodes", json={"request_id": "1", "env": "far", "split": "train", "index": 0})
        assert made.json()["messages"][-1]["content"].endswith(" \ufffd."), made.text


async def test_a_server_that_ignores_seeds_is_taken_with_a_warning(
    open_client: OpenClient, openenv: Callable[..., str]
) -> None:
    async with open_client() as client:
        await submit(client, openenv("stubborn"))
        row = await decided(client, "far")
        assert row["state"] == "active"
        assert any("is not reproducible" in warning for warning in row["report"]["warnings"])


async def test_what_the_model_got_wrong_is_told_to_it(open_client: OpenClient, openenv: Callable[..., str]) -> None:
    async with open_client() as client:
        await submit(client, openenv(), action_field=None)
        assert (await decided(client, "far"))["state"] == "active"
        none = (await answer(client, "1", says="no action here")).json()
        assert (none["info"]["error"], none["terminated"], none["reward"]) == ("format", False, 0.0)
        wrong = (await answer(client, "2", says='<answer>{"word": 7}</answer>')).json()
        assert wrong["info"]["error"] == "invalid_action"
        assert wrong["messages"][0]["content"] == "message: field required"
        failed = await answer(client, "3", says='<answer>{"message": "crash"}</answer>')
        assert (failed.status_code, "it broke" in failed.json()["detail"]) == (500, True)
        assert (await play(client, "far", "4", '<answer>{"message": "7"}</answer>')).json()["info"]["error"] is None


@pytest.mark.parametrize(
    ("mode", "config", "check", "detail"),
    [
        ("full", {}, "reachable", "config.max_sessions"),
        ("odd", {}, "reachable", "not an OpenEnv frame"),
        ("", {"observation": "board.ascii"}, "reachable", "correct the path in config.observation"),
    ],
)
async def test_a_server_that_cannot_be_played_is_rejected(
    open_client: OpenClient, openenv: Callable[..., str], mode: str, config: dict[str, Any], check: str, detail: str
) -> None:
    async with open_client() as client:
        await submit(client, openenv(mode), **config)
        row = await decided(client, "far")
        failed = [one for one in row["report"]["checks"] if not one["ok"]]
        assert (row["state"], [one["name"] for one in failed]) == ("rejected", [check])
        assert detail in failed[0]["detail"] + failed[0]["hint"]


async def test_a_server_that_never_answers_a_step_is_rejected(open_client: OpenClient) -> None:
    port = free_port()
    async with open_client(deadline_s=60.0) as client:
        with serving(port, "slow") as process:
            await submit(client, f"http://127.0.0.1:{port}")
            row = await timed_out(client, "far", process, "step", 60.0)
    failed = [one for one in row["report"]["checks"] if not one["ok"]]
    assert (row["state"], [one["name"] for one in failed]) == ("rejected", ["episodes"])
    assert "step took longer than 60 s" in failed[0]["detail"]


async def test_a_server_that_is_not_there_is_rejected_by_name(open_client: OpenClient) -> None:
    port = free_port()
    async with open_client() as client:
        await submit(client, f"http://127.0.0.1:{port}/some/path")
        row = await decided(client, "far")
        assert row["state"] == "rejected"
        assert row["why"] == f"reachable: http://127.0.0.1:{port}/some/path: nothing listens there"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"url": "ftp://host"}, "scheme must be http"),
        ({"url": "http://user:secret@host"}, "credentials"),
        ({"url": "http://host/?token=secret"}, "a query or a fragment"),
        ({"url": "http://169.254.169.254/latest"}, "does not connect to"),
        ({"url": "http://[::ffff:169.254.169.254]"}, "does not connect to"),
        ({"url": "http://host:99999"}, "not an address"),
        ({"url": "http://host\u00e9"}, "ASCII"),
        ({"protocol": "carrier-pigeon"}, "'carrier-pigeon' is unknown"),
        ({"config": {"obs": "text"}}, "unknown field obs"),
        ({"config": {"num_tasks": {"train": 0}}}, "num_tasks.train"),
        ({"name": "frozen_lake"}, "the name of another environment"),
        ({"source": "class A: ..."}, "unknown field source"),
    ],
)
async def test_what_cannot_be_a_remote_environment_is_refused(
    open_client: OpenClient, change: dict[str, Any], detail: str
) -> None:
    async with open_client() as client:
        body = {"name": "far", "url": "http://127.0.0.1:1", "protocol": "openenv", "config": {}, **change}
        refused = await client.post("/environments", json=body)
        assert refused.status_code in (409, 422)
        assert detail in refused.json()["detail"]
        assert "secret" not in refused.text
        assert (await client.get("/environments/far")).status_code == 404


METADATA = [
    "169.254.169.254",
    "169.254.169.254.",
    "2852039166",
    "0xa9fea9fe",
    "0xA9.0376.43518",
    "0251.0376.0251.0376",
    "169.16689662",
    "::ffff:a9fe:a9fe",
    "::ffff:169.254.169.254%1",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::a9fe:a9fe",
    "64:ff9b:1:a9fe:a9:fe00::",
    "64:ff9b:1:a9:fe:a9fe::",
    "64:ff9b:1:0:a9:fea9:fe00::",
    "2002:a9fe:a9fe::1",
    "2001:0:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:5601:5601",
    "fe80::5efe:a9fe:a9fe",
    "2001:db8::200:5efe:169.254.169.254",
    "fe80::a9fe:a9fe%eth0",
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "0.0.0.0",
    "::",
    "ff02::1",
]


@pytest.mark.parametrize("host", METADATA)
def test_every_spelling_of_a_metadata_address_is_refused(host: str) -> None:
    assert address.why_refused(host) is not None
    with pytest.raises(InputError, match="does not connect to"):
        address.read_address(f"http://[{host}]:80" if ":" in host else f"http://{host}:80")
    with pytest.raises(PermissionError):
        address.checked_socket((socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, 80)))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "::1", "10.0.0.1", "192.168.1.2", "8.8.8.8", "2001:db8::1", "64:ff9b:1::10.0.0.1", "fd00::1"]
    + ["2002:0a00:0001::1", "2a00:1450::8a", "host", "1.example", "0x.example", "2852039166.example"],
)
def test_addresses_of_the_own_machine_and_of_private_networks_are_allowed(host: str) -> None:
    assert address.why_refused(host) is None


async def test_a_name_is_judged_by_the_address_that_the_connection_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that answers something else each time is asked once: its answer is judged, then connected to."""
    answers = iter([["64:ff9b::a9fe:a9fe", "169.254.169.254"], ["127.0.0.1"]])

    async def resolved(host: str, port: int, **_: Any) -> list[Any]:
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in ip], socket.SOCK_STREAM, 6, "", (ip, port)) for ip in next(answers)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    with pytest.raises(PermissionError):
        await address.connect(address.read_address("http://harmless.example"), 5.0)
    assert next(answers) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["169.254.169.254", "2852039166", "0xa9fea9fe", "::ffff:a9fe:a9fe"])
async def test_no_spelling_leads_to_a_link_local_address(host: str) -> None:
    with pytest.raises((PermissionError, InputError), match="does not connect to"):
        await address.connect(address.RemoteAddress(False, host, 80, ""), 5.0)


def test_tokens_are_kept_by_address(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(
        "https://one.example 0123456789abcdef\nws://two.example:8000/x fedcba9876543210\n", encoding="utf-8"
    )
    file.chmod(0o600)
    access = open_access(file, None, 1.0)
    assert access.tokens == {
        "https://one.example:443": "0123456789abcdef",
        "http://two.example:8000": "fedcba9876543210",
    }
    assert "0123" not in repr(access)
    file.write_text("one.example 0123456789abcdef\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1") as refused:
        open_access(file, None, 1.0)
    assert "0123" not in str(refused.value)
