"""The example of docs/environments.md, run as it is printed."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.env import catalogue
from tests.env.conftest import OpenClient

DOCS = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture
def example() -> Any:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    module = ModuleType("example")
    exec(found[1], module.__dict__)
    return module


async def test_the_documented_environment_plays_its_demonstrations(
    open_client: OpenClient, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {**catalogue.KINDS, "countdown": catalogue.EnvironmentKind(example.CountdownConfig, example.Countdown)}
    monkeypatch.setattr(catalogue, "KINDS", kinds)
    async with open_client(env="countdown") as client:
        for split in ("train", "eval"):
            task = {"split": split, "index": 1}
            shown = (await client.post("/countdown/demonstration", json=task)).json()["messages"]
            episode = (await client.post("/episodes", json={**task, "env": "countdown", "request_id": split})).json()
            answer: dict[str, Any] = {}
            for n, message in enumerate(m for m in shown if m["role"] == "assistant"):
                path = f"/episodes/{episode['episode_id']}/step"
                answer = (await client.post(path, json={"request_id": str(n), "message": message})).json()
            assert answer["terminated"]
            assert answer["info"]["success"]


def test_every_setting_is_documented() -> None:
    text = DOCS.read_text()
    for kind in catalogue.KINDS.values():
        for name in kind.config.model_fields:
            assert f"`{name}" in text or f"{name}:" in text or f".{name}`" in text, name
