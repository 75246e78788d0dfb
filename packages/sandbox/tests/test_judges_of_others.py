"""A judge behind a server of somebody else's: LiteLLM's proxy, from PyPI, which speaks OpenAI's API with keys."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import Unavailable
from shared.process.ports import free_port
from shared.reward_schema import EnvironmentRewards, RewardServer
from tests.env.conftest import OpenClient
from tools.installed import python_with

PACKAGE = "litellm[proxy]==1.106.2"
VARIABLE = "VOLLEY_LITELLM_PYTHON"
KEY = "sk-the-key-of-the-proxy"
CONFIG = f"""
model_list:
  - model_name: grader
    litellm_params: {{model: openai/none, api_key: none, mock_response: "Right and short.\\nScore: 8"}}
general_settings: {{master_key: {KEY}}}
"""

pytestmark = pytest.mark.long


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """Its address. Skips the test where the package cannot be installed."""
    try:
        python = python_with(PACKAGE, VARIABLE)
    except Unavailable as why:
        pytest.skip(why.detail)
    config, port = tmp_path / "proxy.yaml", free_port()
    config.write_text(CONFIG, encoding="utf-8")
    command = [python.parent / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    environment = {"PATH": os.defpath, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with subprocess.Popen([str(part) for part in command], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def test_litellm_judges(
    open_client: OpenClient, gsm8k_files: dict[str, Path], proxy: str, tmp_path: Path
) -> None:
    token = tmp_path / "key"
    token.write_text(KEY, encoding="utf-8")
    token.chmod(0o600)
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(120):
        while True:
            try:
                assert (await client.get(f"{proxy}/health/liveliness")).status_code == 200
                break
            except httpx.TransportError:
                await asyncio.sleep(0.5)
    server = RewardServer.model_validate({"url": f"{proxy}/v1", "token_file": token, "max_tokens": 10_000})
    for model, status, told in (("grader", 200, 1.8), ("nobody", 422, "nobody")):
        component = {"type": "judge", "server": "s", "model": model, "prompt": "{task} {answer} {expected}"}
        rewards = {"gsm8k": EnvironmentRewards.model_validate({"components": {"grade": component}})}
        config: dict[str, Any] = {"rewards": rewards, "reward_servers": {"s": server}}
        async with open_client(env="gsm8k", configs={"gsm8k": gsm8k_files}, **config) as client:
            asked = {"request_id": "r", "env": "gsm8k", "split": "eval", "index": 0}
            episode = (await client.post("/episodes", json=asked)).json()["episode_id"]
            step = {"request_id": "1", "message": {"role": "assistant", "content": "#### -3"}}
            answer = await client.post(f"/episodes/{episode}/step", json=step)
            assert answer.status_code == status, answer.text
            found = answer.json()["reward"] if status == 200 else answer.json()["detail"]
            assert found == pytest.approx(told) if status == 200 else told in found, answer.text
