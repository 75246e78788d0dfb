"""Tools for people: listed, and tried."""

from pathlib import Path

from tests.env.conftest import OpenClient


async def test_tools_are_listed_and_tried(open_client: OpenClient) -> None:
    async with open_client(unsandboxed=["python"]) as client:
        listed = (await client.get("/tools")).json()
        names = [tool["name"] for tool in listed["tools"]]
        assert names[:3] == ["calculator", "python", "sql"]
        assert listed["tool_use"]["max_calls_per_turn"] == 8
        for name, arguments, text, ok in (
            ("calculator", {"expression": "48/2"}, "24", True),
            ("calculator", {"expression": "x"}, "error: only numbers", False),
            ("calculator", {}, "error: the argument expression is missing", False),
            ("python", {"code": "import random; random.seed(1); 1 + 1"}, "2", True),
            ("python", {"code": "1/0"}, "error: ZeroDivisionError", False),
            ("sql", {"query": "SELECT 1"}, "1\n1\n(1 row)", True),
            ("write_file", {"path": "a", "content": "x"}, "wrote 1 bytes to a", True),
        ):
            answer = await client.post(f"/tools/{name}/call", json={"arguments": arguments})
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"].startswith(text)
            assert answer.json()["ok"] is ok


async def test_the_tools_of_an_environment(open_client: OpenClient, gsm8k_files: dict[str, Path]) -> None:
    config = {**gsm8k_files, "tools": [{"workspace": {"files": {"a.txt": "x"}}}], "tool_use": {"max_calls": 3}}
    async with open_client(env="gsm8k", configs={"gsm8k": config}) as client:
        listed = (await client.get("/tools?env=gsm8k")).json()
        assert [tool["name"] for tool in listed["tools"]][:2] == ["list_files", "read_file"]
        assert listed["tool_use"]["max_calls"] == 3
        answer = await client.post("/tools/list_files/call", json={"arguments": {}, "env": "gsm8k"})
        assert answer.json() == {"text": "a.txt (1 bytes)", "ok": True}


async def test_bad_requests_are_told_apart(open_client: OpenClient) -> None:
    async with open_client() as client:
        for path, body, status, told in (
            ("/tools/nothing/call", {"arguments": {}}, 404, "there are: calculator"),
            ("/tools/calculator/call", {}, 422, "arguments"),
            ("/tools/calculator/call", {"arguments": {}, "env": "nothing"}, 404, "there is no environment 'nothing'"),
            ("/tools/calculator/call", {"arguments": {}, "env": "frozen_lake"}, 404, "has no tools"),
            ("/tools/calculator/call", {"arguments": {}, "seed": -1}, 422, "seed"),
            ("/tools/calculator/call", {"arguments": []}, 422, "arguments"),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, told in answer.text) == (status, True), answer.text
        assert (await client.get("/tools?env=nothing")).status_code == 404
        assert (await client.get("/tools?x=1")).status_code == 422
