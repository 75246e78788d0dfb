"""Task folders in the format of Harbor, as its users write them, and archives of them."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
import zipfile
from collections.abc import Mapping
from typing import Any

import httpx

ZIP = {"Content-Type": "application/zip"}
TASK_TOML = """
schema_version = "1.4"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 10.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 600.0
memory_mb = 256
"""
TEST_SH = """#!/bin/bash
# run from the working directory, as Harbor does
if bash /tests/check.sh; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def sum_task(first: int = 1, **changes: str) -> dict[str, str]:
    """A task folder: three numbers are to be added up. `changes` are its files by path."""
    numbers = [first, first + 7, first + 20]
    return {
        "task.toml": TASK_TOML,
        "instruction.md": f"Write the sum of the numbers in data/numbers.txt into total.txt. ({first})\n",
        "environment/Dockerfile": "FROM python:3.13-slim\nENV UNIT=metre\nWORKDIR /app\nCOPY numbers.txt data/\n",
        "environment/numbers.txt": "".join(f"{number}\n" for number in numbers),
        "tests/test.sh": TEST_SH,
        "tests/check.sh": f'[ "$(cat total.txt)" = {sum(numbers)} ]\n',
        "solution/solve.sh": "#!/bin/bash\nset -e\npaste -sd+ data/numbers.txt | xargs expr | cat > /dev/null || true\n"
        "total=0\nwhile read n; do total=$((total + n)); done < data/numbers.txt\necho $total > total.txt\n",
        **changes,
    }


def zipped(*folders: tuple[str, Mapping[str, str]]) -> bytes:
    """Args: folders: (path in the archive, files of a task)."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for folder, files in folders:
            for name, text in files.items():
                archive.writestr(f"{folder}/{name}" if folder else name, text)
    return out.getvalue()


async def submit(client: httpx.AsyncClient, data: bytes, name: str = "adder", **config: Any) -> httpx.Response:
    query = {"name": name, "config": json.dumps(config)}
    return await client.post("/environments", params=query, content=data, headers=ZIP)


def call(command: str) -> str:
    """Message of a model that runs a command."""
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


class Conversation:
    """One episode over HTTP."""

    def __init__(self, client: httpx.AsyncClient, made: Mapping[str, Any]) -> None:
        self.opening, self.tools = made["messages"], made["tools"]
        self._client, self._id, self._steps = client, made["episode_id"], 0

    async def say(self, text: str) -> dict[str, Any]:
        return await self._ask("step", message={"role": "assistant", "content": text})

    async def finish(self) -> dict[str, Any]:
        return await self._ask("finish")

    async def close(self) -> None:
        assert (await self._client.delete(f"/episodes/{self._id}")).status_code == 204

    async def _ask(self, what: str, **body: Any) -> dict[str, Any]:
        self._steps += 1
        asked = {"request_id": str(self._steps), **body}
        answer = await self.ask(what, **asked)
        while answer.status_code == 429:
            await asyncio.sleep(0.02)
            answer = await self.ask(what, **asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, what: str, **body: Any) -> httpx.Response:
        """One request, with whatever is answered."""
        return await self._client.post(f"/episodes/{self._id}/{what}", json=body)

    async def run(self, command: str) -> str:
        """Observation after a command."""
        return (await self.say(call(command)))["messages"][0]["content"]


async def begin(client: httpx.AsyncClient, env: str = "adder", index: int = 0, split: str = "train") -> Conversation:
    body = {"request_id": f"{env} {split} {index} {uuid.uuid4().hex}", "env": env, "split": split, "index": index}
    made = await client.post("/episodes", json=body)
    while made.status_code == 429:
        await asyncio.sleep(0.02)
        made = await client.post("/episodes", json=body)
    assert made.status_code == 201, made.text
    return Conversation(client, made.json())
