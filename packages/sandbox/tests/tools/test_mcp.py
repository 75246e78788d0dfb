"""Tools of real servers of the Model Context Protocol, which are started here."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.sandbox.tests.tools.conftest import OpenTools, ask
from packages.sandbox.tests.tools.test_environments import open_episode, say
from shared.errors import ConfigError, Unavailable
from shared.process.ports import free_port
from tests.env.conftest import OpenClient
from tests.support.loop_clock import skip
from volley_serving.dialects.calls import ToolCall, write_call

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = str(Path(__file__).parents[4])
SERVER = "packages.sandbox.tests.tools.mcp_server"
STDIO: dict[str, Any] = {"command": [sys.executable, "-m", SERVER], "cwd": ROOT}


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", SERVER, str(port)], cwd=ROOT) as process:
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def wait_for(port: int) -> None:
    import socket

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the MCP server does not listen")


async def test_a_program_over_stdio(open_tools: OpenTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLLEY_TEST_GIVEN", "given")
    monkeypatch.setenv("VOLLEY_TEST_KEPT", "kept")
    mcp = {**STDIO, "prefix": "x_", "env": ["VOLLEY_TEST_GIVEN"]}
    tools = await open_tools({"mcp": mcp}, "calculator", max_output=500, timeout_s=20)
    assert [tool.name for tool in tools.tools][:2] == ["x_add", "x_keep"]
    assert tools.tools[0].parameters["required"] == ["a", "b"]
    assert await ask(tools, "x_add", a=1, b=2) == "3"
    assert "'b' is a required property" in await ask(tools, "x_add", a=1)
    assert "the argument a: 'one' is not of type 'integer'" in await ask(tools, "x_add", a="one", b=1)
    assert "the wine is corked" in await ask(tools, "x_fail")
    assert await ask(tools, "x_picture") == "[image: it cannot be shown as text]"
    assert "[… 999500 of 1000000 characters left out …]" in await ask(tools, "x_flood")
    assert await ask(tools, "x_secret", name="VOLLEY_TEST_GIVEN") == "given"
    assert await ask(tools, "x_secret", name="VOLLEY_TEST_KEPT") == "not there"
    await ask(tools, "x_keep", word="a")
    assert await ask(tools, "x_keep", word="b") == "a b"
    assert "it took longer than 20 s" in await late(ask(tools, "x_wait", seconds=600))
    began = time.monotonic()
    answers = await tools.answer([ToolCall("x_wait", {"seconds": 1.0})] * 4)
    assert [answer.text for answer in answers] == ["waited"] * 4
    assert time.monotonic() - began < 30
    with pytest.raises(Unavailable, match="hangs: it does not answer a ping"):
        await late(ask(tools, "x_hang"))


async def late(call: Coroutine[Any, Any, str]) -> str:
    """The answer to a call that uses up its time at once."""
    calling = asyncio.ensure_future(call)
    for _ in range(100):  # until it waits for the server
        await asyncio.sleep(0)
    skip(20)
    return await calling


HALVES = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    tool = {"name": "cut", "description": "cut \\ud83d", "inputSchema": {"type": "object", "properties": {}}}
    answers = {
        "initialize": info,
        "tools/list": {"tools": [tool]},
        "tools/call": {"content": [{"type": "text", "text": "cut \\ud83d \\ud83d\\ude00"}]},
    }
    if "id" in asked:
        result = answers.get(asked["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_half_a_surrogate_pair_is_replaced(open_tools: OpenTools) -> None:
    """As servers in JavaScript write text that they have cut."""
    tools = await open_tools({"mcp": {"command": [sys.executable, "-c", HALVES]}}, timeout_s=5)
    assert tools.tools[0].description == "cut \ufffd"
    assert await ask(tools, "cut") == "cut \ufffd \U0001f600"


async def test_an_address_over_http(open_tools: OpenTools, http_server: str) -> None:
    one, other = [await open_tools({"mcp": {"url": http_server, "tools": ["add", "keep"]}}) for _ in range(2)]
    assert [tool.name for tool in one.tools] == ["add", "keep"]
    assert await ask(one, "add", a=1, b=2) == "3"
    assert await ask(other, "add", a=3, b=4) == "7"


@pytest.mark.long
async def test_a_server_that_dies_fails_the_episode_and_comes_back(open_tools: OpenTools) -> None:
    for shared in (False, True):
        tools = await open_tools({"mcp": {**STDIO, "shared": shared}})
        with pytest.raises(Unavailable, match=r"the MCP server .* closed the connection"):
            await ask(tools, "die")
        again = await open_tools({"mcp": {**STDIO, "shared": shared}})
        assert await ask(again, "keep", word="new") == "new"
    assert await ask(await open_tools({"mcp": {**STDIO, "shared": True}}), "keep", word="two") == "new two"


@pytest.mark.parametrize(
    ("mcp", "told"),
    [
        ({"command": ["/nothing/here"]}, "No such file"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}, "no licence"),
        ({"command": [sys.executable, "-c", "print('hello'); input(); input()"], "start_s": 1}, "did not answer"),
        ({"command": ["sleep", "60"], "start_s": 1}, "it did not answer within 1 s"),
        ({"url": "http://127.0.0.1:9/mcp", "start_s": 5}, "the MCP server http://127.0.0.1:9/mcp cannot be used"),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(open_tools: OpenTools, mcp: dict[str, Any], told: str) -> None:
    with pytest.raises(Unavailable) as raised:
        await open_tools({"mcp": mcp})
    assert told in raised.value.detail


@pytest.mark.long
async def test_a_tool_that_the_server_lacks_is_a_mistake_of_the_configuration(open_tools: OpenTools) -> None:
    with pytest.raises(ConfigError, match="has no tool 'sing'"):
        await open_tools({"mcp": {**STDIO, "tools": ["sing"]}})


async def test_two_servers_of_the_same_tools_need_prefixes(open_tools: OpenTools, http_server: str) -> None:
    url = {"mcp": {"url": http_server}}
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        await open_tools(url, url)


async def test_an_episode_whose_server_dies_is_no_reward(open_client: OpenClient, gsm8k_files: dict[str, Path]) -> None:
    config = {**gsm8k_files, "tools": [{"mcp": STDIO}]}
    async with open_client(env="gsm8k", configs={"gsm8k": config}) as client:
        episode = await open_episode(client, "gsm8k")
        assert (await say(client, episode, write_call("add", {"a": 40, "b": 2})))["messages"][0]["content"] == "42"
        body = {"request_id": "x", "message": {"role": "assistant", "content": write_call("die", {})}}
        answer = await client.post(f"/episodes/{episode['episode_id']}/step", json=body)
        assert answer.status_code == 503
        assert "closed the connection" in answer.json()["detail"]
        assert (await client.post(f"/episodes/{episode['episode_id']}/step", json=body)).status_code == 409
        listed = (await client.get("/tools?env=gsm8k")).json()
        assert "add" in [tool["name"] for tool in listed["tools"]]


@pytest.mark.long
async def test_no_program_is_left_behind(open_tools: OpenTools) -> None:
    marked = {"command": ["env", "VOLLEY_MARK=left", sys.executable, "-m", SERVER], "cwd": ROOT}
    tools = await open_tools({"mcp": marked})
    assert running()
    await tools.close()
    for _ in range(100):
        if not running():
            return
        await asyncio.sleep(0.1)
    pytest.fail("the server goes on")


def running() -> bool:
    """Whether a child of this process has the mark."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"VOLLEY_MARK=left" in Path("/proc", pid, "environ").read_bytes():
                return True
        except OSError:
            continue
    return False
