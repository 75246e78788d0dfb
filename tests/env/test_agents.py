"""Agents: programs that are started for each episode, reach only the model, and are judged afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from services.env.sandbox.sandboxes import Sandboxes
from shared.errors import Forbidden
from shared.services_schema import Limits
from tests.env.agents import ASKS, RUNS, Recorder, adds, begin, ended, finish, start
from tests.env.conftest import OpenClient
from tests.env.submitted import decided, submit


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def why_not() -> str:
    """Why sandboxes cannot start programs here; empty if they can."""
    async with Sandboxes() as sandboxes:
        try:
            await sandboxes.probe_shell("agent")
        except Forbidden as error:
            return error.detail
    return ""


@pytest_asyncio.fixture
async def client(open_client: OpenClient, why_not: str) -> AsyncIterator[httpx.AsyncClient]:
    if why_not:
        pytest.skip(why_not)
    async with open_client(limits=Limits()) as opened:
        yield opened


async def taken(client: httpx.AsyncClient, source: str) -> None:
    answer = await submit(client, source, name="adder")
    assert answer.status_code == 202, answer.text
    row = await decided(client, "adder")
    assert row["state"] == "active", (row["why"], row["report"])


async def test_a_program_reaches_the_model_and_is_judged(client: httpx.AsyncClient) -> None:
    await taken(client, ASKS)
    recorder = Recorder(adds)
    async with recorder.serve() as base_url:
        made = await begin(client)
        assert made["messages"] == [{"role": "user", "content": "6+7="}]
        assert (made["info"]["agent"], made["info"]["timeout_s"], made["info"]["judged"]) == ("program", 20.0, True)
        one = made["episode_id"]
        assert (await client.get(f"/episodes/{one}/run")).status_code == 409
        for _ in range(2):
            began = await start(client, one, base_url)
            assert (began.status_code, began.json()["state"]) == (202, "running")
        assert (await start(client, one, base_url.replace("127.0.0.1", "127.0.0.2"))).status_code == 409
        state = await ended(client, one)
        assert (state["state"], state["exit_code"]) == ("exited", 0), state
        last = (await finish(client, one)).json()
    assert (last["reward"], last["terminated"], last["truncated"]) == (1.0, True, False)
    assert (last["info"]["success"], last["info"]["files"]) == (True, ["numbers.txt"])
    ((path, headers, body),) = [row for row in recorder.requests if row[0] == "chat/completions"]
    assert (path, headers["authorization"]) == ("chat/completions", "Bearer sess-1")
    assert headers["idempotency-key"]
    assert body["messages"][-1]["content"] == "6+7="


@pytest.mark.parametrize(
    ("run", "state", "code", "told"),
    [
        ("raise KeyError('lost')", "failed", 1, "KeyError: 'lost'"),
        ("sys.exit(3)", "failed", 3, "exit code 3"),
        ("os.kill(os.getpid(), 9)", "failed", 137, "exit code 137"),
        ("return bytearray(10**9) and 'x'", "failed", None, ""),
        ("time.sleep(60)", "exited", None, "timeout_s = 2"),
        ("subprocess.Popen(['sleep', '60']); return '13'", "exited", 0, ""),
    ],
)
async def test_ends_of_programs(client: httpx.AsyncClient, run: str, state: str, code: int | None, told: str) -> None:
    await taken(client, (RUNS % run).replace("timeout_s = 20", "timeout_s = 2"))
    one = (await begin(client))["episode_id"]
    await start(client, one, "http://127.0.0.1:9/v1")
    row = await ended(client, one)
    assert row["state"] == state, row
    assert told in row["detail"] + row["output"]
    if code is not None:
        assert row["exit_code"] == code
    if state == "exited":
        assert (await finish(client, one)).json()["reward"] == float("13" in run)
