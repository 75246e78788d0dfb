"""Environments of `verifiers`, served from a virtual environment of their own: beside the package itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.env.sandbox.packages.dependencies import read_metadata
from shared.process.ports import free_port
from shared.services_schema import Limits
from tests.env.conftest import OpenClient
from tests.env.submitted import decided, opened
from tests.support.foreign import environment
from tests.support.net import wait_http

BRIDGE = Path("services/env/bridges/verifiers_server.py").absolute()
ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


class Higher(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = str(messages[-1]["content"]).strip()
        hint = "higher" if said.isdecimal() and int(said) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": hint}], state

    async def is_completed(self, messages, state, **kwargs):
        found = bool(state["completion"]) and state["completion"][-1].get("content") == state["answer"]
        return found or await super().is_completed(messages, state, **kwargs)


def found(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def quick(completion, state, **kwargs):
    return 1.0 / state["turn"]


def rows(first):
    return Dataset.from_list([{"question": f"Guess {n}", "answer": str(n % 7)} for n in range(first, first + 20)])


def load_environment(max_turns=4):
    rubric = vf.Rubric(funcs=[found, quick], weights=[1.0, 0.5])
    return Higher(dataset=rows(0), eval_dataset=rows(100), rubric=rubric, max_turns=max_turns, system_prompt="Play.")
"""
UPSTREAM = """
import asyncio, json, sys
from types import SimpleNamespace as N
from openai.types.chat import ChatCompletion
from guess_of_tests import load_environment

index, said = json.loads(sys.stdin.read())
replies = iter(said)

async def create(**asked):
    message = {"role": "assistant", "content": next(replies)}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

env = load_environment()
client = N(chat=N(completions=N(create=create)), base_url="http://none")
inputs = {key: [value] for key, value in env.get_dataset()[index].items()}
results = asyncio.run(env.generate(inputs, client, "m"))
print(json.dumps([results.reward[0], results.prompt[0], results.completion[0]]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of a virtual environment with what the bridge declares."""
    return environment("verifiers", read_metadata(BRIDGE.read_text(encoding="utf-8")).dependencies)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of an environment."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "guess_of_tests.py").write_text(ENVIRONMENT, encoding="utf-8")
    return folder


@pytest.fixture
def url(python: Path, folder: Path) -> Iterator[str]:
    port = free_port()
    command = [str(python), str(BRIDGE), "guess_of_tests", "--port", str(port)]
    with subprocess.Popen(command, env=_variables(folder), cwd=folder) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready", 240)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("old", "{}", "old cannot be loaded with verifiers 0.4.0: AttributeError: module 'verifiers' has no attribute"),
        ("other", "{}", "verifiers 0.4.0: the environment of other has no dataset, "),
        ("nowhere", "{}", "No module named 'nowhere'"),
        ("other", "{", "--arguments"),
    ],
)
def test_a_version_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, module: str, arguments: str, told: str
) -> None:
    """A package that has what 0.4 lacks: no class of an environment by the old names."""
    (tmp_path / "verifiers.py").touch()
    (tmp_path / "verifiers-0.4.0.dist-info").mkdir()
    metadata = tmp_path / "verifiers-0.4.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n", encoding="utf-8")
    old = "import verifiers\nclass Old(verifiers.MultiTurnEnv):\n    pass\n"
    (tmp_path / "old.py").write_text(old, encoding="utf-8")
    (tmp_path / "other.py").write_text("def load_environment():\n    return object()\n", encoding="utf-8")
    command = [sys.executable, str(BRIDGE), module, "--arguments", arguments]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, encoding="utf-8", check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert told in ended.stderr
    assert "works with verifiers 0.1.6.post0" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
async def test_rollouts_and_rewards_are_those_of_the_package(
    open_client: OpenClient, url: str, python: Path, folder: Path
) -> None:
    async with open_client(limits=Limits(), deadline_s=30.0) as client:
        config = {"environment": "guess_of_tests", "max_sessions": 8}
        body = {"name": "guess", "url": url, "protocol": "volley", "config": config}
        assert (await client.post("/environments", json=body)).status_code == 202
        row = await decided(client, "guess")
        assert (row["state"], row["splits"]) == ("active", {"train": 20, "eval": 20}), row
        for index, said in ((3, ["3"]), (5, ["1", "2", "5"]), (6, ["x", "", "9", "9"])):
            made = (await client.post("/episodes", json=opened("guess", f"{said}", index))).json()
            heard, rewards = list(made["messages"]), list[float]()
            for number, text in enumerate(said):
                step = {"request_id": str(number), "message": {"role": "assistant", "content": text}}
                answer = (await client.post(f"/episodes/{made['episode_id']}/step", json=step)).json()
                heard += [{"role": "assistant", "content": text}, *answer["messages"]]
                rewards.append(answer["reward"])
            assert answer["terminated"], answer
            reward, prompt, completion = _upstream(python, folder, index, said)
            assert (sum(rewards), heard) == (pytest.approx(reward), [*prompt, *completion])
            assert sum(answer["info"]["reward_components"].values()) == pytest.approx(reward)


def _variables(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(folder), "HOME": str(folder), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}


def _upstream(python: Path, folder: Path, index: int, said: Sequence[str]) -> tuple[float, list[object], list[object]]:
    """What the package's own `generate` makes of these replies: reward, prompt, completion."""
    ended = subprocess.run(
        [str(python), "-c", UPSTREAM],
        input=json.dumps([index, said]),
        env=_variables(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
        timeout=120,
    )
    reward, prompt, completion = json.loads(ended.stdout.splitlines()[-1])
    return reward, prompt, completion
