"""Environments with tools, over HTTP as the orchestrator plays them."""

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.env.catalogue import Catalogue
from shared.errors import ConfigError, InputError
from tests.env.conftest import OpenClient
from tests.env.test_catalogue import RUNNER
from volley_sandbox.backends.equipment import EquippingToolbox
from volley_sandbox.sandbox.sandboxes import Sandboxes
from volley_sandbox.tools.mcp import McpServers
from volley_sandbox.tools.settings import (
    McpSettings,
    PythonSettings,
    SqlSettings,
    ToolUse,
    WorkspaceSettings,
    split_config,
)
from volley_serving.dialects.calls import write_call

EQUIPMENT = EquippingToolbox(Sandboxes(), RUNNER, McpServers())
CALC = write_call("calculator", {"expression": "48/2"})


async def open_episode(client: httpx.AsyncClient, env: str, **body: Any) -> dict[str, Any]:
    answer = await client.post("/episodes", json={"request_id": env, "env": env, "split": "train", "index": 0} | body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def say(client: httpx.AsyncClient, episode: dict[str, Any], content: str, **message: Any) -> dict[str, Any]:
    body = {"request_id": content or "-", "message": {"role": "assistant", "content": content, **message}}
    answer = await client.post(f"/episodes/{episode['episode_id']}/step", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_problem_is_solved_with_tools(open_client: OpenClient, gsm8k_files: dict[str, Path]) -> None:
    tools = {"tools": ["calculator", {"python": {"cpu_s": 2}}, "workspace"], "tool_use": {"max_turns": 3}}
    async with open_client(env="gsm8k", configs={"gsm8k": {**gsm8k_files, **tools}}, unsandboxed=["python"]) as client:
        episode = await open_episode(client, "gsm8k")
        names = [tool["function"]["name"] for tool in episode["tools"]]
        assert names[:3] == ["calculator", "python", "list_files"]
        assert episode["tools"][0]["function"]["parameters"]["required"] == ["expression"]
        first = await say(client, episode, f"I count.{CALC}{write_call('python', {'code': 'x = 48\nx // 2'})}")
        assert first["messages"] == [{"role": "tool", "content": "24"}] * 2
        assert (first["reward"], first["terminated"], first["info"]["error"]) == (0.0, False, None)
        wrong = await say(client, episode, "<tool_call>{</tool_call>")
        assert wrong["info"]["error"] == "tool"
        assert wrong["messages"][0]["content"].startswith("error: a tool call must be one JSON object")
        end = await say(client, episode, "#### 24")
        assert (end["reward"], end["terminated"]) == (1.0, True)
        assert (end["info"]["tool_calls"], end["info"]["tool_faults"]) == (3, 1)
        again = await open_episode(client, "gsm8k", request_id="2")
        assert [(await say(client, again, f"{n} {CALC}"))["truncated"] for n in range(3)] == [False, False, True]


@pytest.mark.parametrize("form", ["auto", "qwen3_coder"])
async def test_a_demonstration_that_calls_the_calculator_earns_what_it_promises(
    open_client: OpenClient, gsm8k_files: dict[str, Path], form: str
) -> None:
    config = {**gsm8k_files, "tools": ["calculator"], "tool_use": {"max_turns": 3, "format": form}}
    async with open_client(env="gsm8k", configs={"gsm8k": config}) as client:
        for index in (0, 1):
            asked = {"split": "train", "index": index}
            whole = (await client.post("/gsm8k/demonstration", json=asked)).json()
            shown = whole["messages"]
            episode = await open_episode(client, "gsm8k", request_id=str(index), index=index)
            assert whole["tools"] == episode["tools"] != []
            assert [message["role"] for message in shown[:3]] == ["user", "assistant", "tool"]
            assert shown[0] == episode["messages"][0]
            for said, answered in zip(shown[1::2], [*shown[2::2], None], strict=True):
                told = await say(client, episode, said["content"])
                assert told["messages"] == ([answered] if answered else [])
            assert (told["reward"], told["terminated"]) == (1.0, True)


async def test_calls_of_openais_shape_are_taken(open_client: OpenClient, gsm8k_files: dict[str, Path]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2*3"}'}}
    async with open_client(env="gsm8k", configs={"gsm8k": {**gsm8k_files, "tools": ["calculator"]}}) as client:
        episode = await open_episode(client, "gsm8k")
        assert (await say(client, episode, "", tool_calls=[call]))["messages"][0]["content"] == "6"


@pytest.mark.parametrize("n_processes", [0, 1])
async def test_text_to_sql_with_the_database_of_its_task(open_client: OpenClient, n_processes: int) -> None:
    settings = {"configs": {"text_to_sql": {"tools": ["sql"]}}, "n_processes": n_processes}
    async with open_client(env="text_to_sql", **settings) as client:
        episode = await open_episode(client, "text_to_sql")
        asked = write_call("sql", {"query": "SELECT count(*) > 0 AS there FROM sqlite_master"})
        assert (await say(client, episode, asked))["messages"][0]["content"] == "there\n1\n(1 row)"


async def test_a_game_takes_tools_too(open_client: OpenClient) -> None:
    use = {"tools": ["calculator"], "tool_use": {"describe": True, "format": "llama3_json"}}
    async with open_client(configs={"frozen_lake": {**use, "talk": "bare"}}) as client:
        episode = await open_episode(client, "frozen_lake")
        told = episode["messages"][0]
        assert told["role"] == "system"
        assert "- calculator(expression): Evaluates" in told["content"]
        assert '{"name":"NAME","parameters":{"ARGUMENT":"VALUE"}}' in told["content"]
        shown = (await client.post("/frozen_lake/demonstration", json={"split": "train", "index": 0})).json()
        assert shown["messages"][0] == told
        call = write_call("calculator", {"expression": "1+1"}, "llama3_json")
        assert (await say(client, episode, call))["messages"][0]["content"] == "2"
        assert (await say(client, episode, "<answer>Right</answer>"))["messages"][0]["role"] == "user"


async def test_an_environment_with_tools_of_its_own_takes_no_others(
    open_client: OpenClient, gsm8k_files: dict[str, Path]
) -> None:
    both = {**gsm8k_files, "tool": "calculator", "tools": ["calculator"]}
    async with open_client(env="gsm8k", configs={"gsm8k": both}) as client:
        body = {"request_id": "1", "env": "gsm8k", "split": "train", "index": 0}
        answer = await client.post("/episodes", json=body)
        assert answer.status_code == 422
        assert "gsm8k already has tools" in answer.text


async def test_variants_may_have_tools_that_reach_nothing(open_client: OpenClient, tmp_path: Path) -> None:
    async with open_client() as client:
        for name, tools, status in (
            ("a", ["calculator", {"sql": {"script": "CREATE TABLE t(a)", "writable": True}}], 201),
            ("b", [{"sql": {"database": str(tmp_path / "x")}}], 403),
            ("c", [{"mcp": {"command": ["touch", str(tmp_path / "made")]}}], 403),
            ("d", [{"mcp": {"url": "http://127.0.0.1:1/"}}], 403),
            ("e", ["nothing"], 422),
            ("f", [{"sql": {"script": "CREATE TABEL t"}}], 422),
        ):
            body = {"name": name, "base": "frozen_lake", "config": {"tools": tools}}
            answer = await client.post("/environments", json=body)
            assert answer.status_code == status, answer.text
        rows = {row["name"]: row for row in (await client.get("/environments")).json()["environments"]}
        assert rows["a"]["config"]["tools"][0] == {"calculator": {}}
        episode = await open_episode(client, "a")
        asked = write_call("sql", {"query": "INSERT INTO t VALUES (1); SELECT * FROM t"})
        assert (await say(client, episode, asked))["messages"][0]["content"].endswith("a\n1\n(1 row)")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"tools": ["abacus"]}, "unknown setting tools.0.abacus (there are: calculator, python, sql, workspace, mcp)"),
        ({"tools": [{"python": {"cpu": 1}}]}, "unknown setting tools.0.python.cpu (there are: cpu_s, total_cpu_s"),
        ({"tools": [{"python": {"cpu_s": 100}}]}, "tools.0.python.cpu_s: input should be less than or equal to 20"),
        ({"tools": [{"python": {}, "sql": {}}]}, "a tool is one of calculator, python"),
        ({"tools": ["sql", "sql"]}, "tools has sql twice"),
        ({"tools": [{"mcp": {}}]}, "mcp takes a command or a url"),
        ({"tools": [{"sql": {"script": "", "database": "x"}}]}, "sql takes a script or a database, not both"),
        ({"tools": [{"workspace": {"files": {"../x": ""}}}]}, "workspace.files: '../x' is not a path inside"),
        (
            {"tools": [{"workspace": {"files": {"x": "a" * 2000}, "max_kb": 1}}]},
            "workspace.files: the files would have",
        ),
        (
            {"tools": [{"workspace": {"files": {"a": "", "b": ""}, "max_files": 1}}]},
            "workspace.files: there are 1 files",
        ),
        ({"tool_use": {"max_turns": 3}}, "tool_use is set but tools is empty"),
        ({"tools": "python"}, "tools: input should be a valid tuple"),
        ({"tool_use": {"format": "xml"}}, "tool_use.format: input should be 'auto', 'hermes'"),
        ({"tool_use": {"turns": 3}}, "unknown setting tool_use.turns (there are: format, max_turns"),
    ],
)
def test_settings_that_are_wrong_are_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as raised:
        Catalogue(RUNNER, {"sokoban": config}, equipment=EQUIPMENT)
    assert f"sokoban: {told}" in raised.value.detail


async def test_a_database_that_cannot_be_read_ends_the_service_at_its_start(
    open_client: OpenClient, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no database at all, though it has many characters" * 20, encoding="utf-8")
    for name, told in (("missing", "cannot be opened"), ("text", "not a database")):
        tools = {"tools": [{"sql": {"database": tmp_path / name}}]}
        with pytest.raises(ConfigError, match=f"frozen_lake: tools: .*{told}"):
            async with open_client(configs={"frozen_lake": tools}):
                pass


def test_an_environments_own_settings_are_left_alone() -> None:
    own, tools = split_config("sokoban", {"dim_room": [5, 5], "tools": ["calculator"], "tool_use": {"max_turns": 3}})
    assert own == {"dim_room": [5, 5]}
    assert tools.tool_use.max_turns == 3


def test_sqlite_writes_databases_to_memory() -> None:
    """Python may be built without."""
    assert hasattr(sqlite3.Connection, "serialize")


def test_every_setting_of_tools_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "tools.md").read_text(encoding="utf-8")
    for model in (ToolUse, PythonSettings, SqlSettings, WorkspaceSettings, McpSettings):
        for name in model.model_fields:
            assert f"`{name}" in text, f"{model.__name__}.{name}"
