"""The bridge to verl with the real package: a batch beside Volley's own numbers, and two steps of its trainer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from services.orchestrator.episodes.budget import TokenBudget
from services.orchestrator.episodes.runner import EpisodeRunner
from services.orchestrator.episodes.turn import SamplingSpec, TokenBounds
from services.orchestrator.servers.balancer import VersionBounds
from services.orchestrator.status import RunStatus
from shared.clients.env import EnvClient, Opening
from shared.clients.rollout import Generation
from shared.models.chat import ChatTokenizer
from shared.process.ports import free_port
from shared.types import Trajectory, VersionSpan
from tests.orchestrator.fakes import ScriptedEngine, balancer_of
from tests.support import decoder_reference, models
from tests.support.foreign import environment
from tests.support.templates import published
from tests.support.tokenizer import FOLDER

ROOT = Path(__file__).parents[2]
BRIDGE = ROOT / "bridges" / "verl"
sys.path.insert(0, str(BRIDGE))

from volley_verl import config as bridge  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # the first long test starts verl, two services and Ray
REQUIREMENTS = ("torch==2.13.0", "--editable", str(BRIDGE))
CONTEXT, TURN, TURNS = 900, 12, 3
MODEL = models.tiny_config(head_dim=16, vocab_size=512)
STOPS = "Total available GPUs 0 is less than total desired GPUs 1"


@contextmanager
def running(*command: str, ready: str) -> Iterator[None]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=12), timeout=60, trust_env=False) as client:
                assert client.get(ready).is_success
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def write_weights(file: Path, weights: models.Weights) -> None:
    """Writes float32 weights as safetensors: the format needs no library, and this environment has none."""
    ends = itertools.accumulate(array.nbytes for array in weights.values())
    header = {
        name: {"dtype": "F32", "shape": array.shape, "data_offsets": [end - array.nbytes, end]}
        for (name, array), end in zip(weights.items(), ends, strict=True)
    }
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(array.tobytes() for array in weights.values()))


def write_model(folder: Path) -> Path:
    """A tiny random Qwen3 with the template of Qwen2.5, which knows tools."""
    models.write_hf(folder, MODEL)
    write_weights(folder / "model.safetensors", models.random_weights(MODEL, 0))
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = published()["qwen2_5"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    return folder


@dataclass(frozen=True)
class Smoke:
    """Episodes that verl's environment played, and Volley's record of the same ones."""

    found: Mapping[str, Any]
    model: Path
    env_url: str
    server_url: str
    sent: models.Weights
    turns: Sequence[Sequence[int]]
    overrides: Sequence[str]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smoke]:
    python = environment("verl", REQUIREMENTS)
    folder = tmp_path_factory.mktemp("verl")
    model, env_port, port = write_model(folder / "model"), free_port(), free_port()
    sent, env_url, weights = models.random_weights(MODEL, 1), f"http://127.0.0.1:{env_port}", folder / "weights"
    write_weights(folder / "sent.safetensors", sent)
    weights.mkdir()
    data = {"env": str(Path(__file__).with_name("letters.py")), "mixture": {"frozen_lake": TOOLS}}
    service = {"run": {"name": "letters", "dir": str(folder)}, "services": {"env": {"port": env_port}}}
    (folder / "run.yaml").write_text(yaml.safe_dump({**run_of(model, ""), **service, "data": data}), encoding="utf-8")
    env_service = [sys.executable, "-m", "services.env", "--config", str(folder / "run.yaml")]
    server = [sys.executable, "-m", "volley", "serve", str(model), "--no-token", "--port", str(port)]
    server += ["--context-length", str(CONTEXT), "--weights-root", str(weights)]
    with running(*env_service, ready=f"{env_url}/ready"), running(*server, ready=f"http://127.0.0.1:{port}/ready"):
        rows = httpx.get(f"{env_url}/environments").json()["environments"]
        name = next(row["name"] for row in rows if row["name"].startswith("letters"))
        addresses = {"env_url": env_url, "servers": [f"http://127.0.0.1:{port}"], "weights_dir": str(weights)}
        run, turns = run_of(model, name), scripted_turns(ChatTokenizer(model))
        case = {
            "overrides": bridge.translate(run, **addresses).lines(),
            "legacy": bridge.translate({**run, "grpo_config": SYNCHRONOUS}, **addresses, legacy=True).lines(),
            "weights": str(folder / "sent.safetensors"),
            "tool_task": {"env": "frozen_lake", "split": "train", "index": 0},
            "turns": turns,
        }
        found = in_verl(python, folder, case)
        yield Smoke(found, model, env_url, addresses["servers"][0], sent, turns, case["overrides"])


def scripted_turns(tokenizer: ChatTokenizer) -> Sequence[Sequence[int]]:
    """A call of a tool, a turn without an end, an empty one, and the last that the run allows."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    end = tokenizer.eos_id
    return [*tokenizer.encode(call), end], tokenizer.encode("Right" * 9), [end], [*tokenizer.encode("Down"), end]


def in_verl(python: Path, folder: Path, case: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run verl_smoke.py in verl's environment; Ray listens on the loopback interface alone."""
    (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
    script, result = Path(__file__).with_name("verl_smoke.py"), folder / "result.json"
    run_python(python, folder, str(script), str(folder / "case.json"), str(result))
    return json.loads(result.read_text(encoding="utf-8"))


def run_python(python: Path, folder: Path, *arguments: str, **variables: str) -> None:
    ray = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": "0" * 32}
    ended = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env={**os.environ, **ray, "RAY_memory_monitor_refresh_ms": "0", **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]


TOOLS = {"weight": 0, "env_config": {"tools": ["calculator"]}}
SYNCHRONOUS = {"num_generations": 4, "off_policy_steps": 0, "max_response_length": TURN}


def run_of(model: Path, env: str) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"env": env, "n_eval_tasks": 4},
        "grpo_config": {"num_generations": 4, "off_policy_steps": 1, "max_response_length": TURN},
        "trainer": {"max_steps": 2, "groups_per_step": 4, "length_buckets": [CONTEXT]},
        "rollout": {"engine": {"context_length": CONTEXT}},
        "orchestrator": {"max_turns": 4},
    }


class Replayed(ScriptedEngine):
    """Gives the ids and log-probabilities that verl's agent loop recorded."""

    def __init__(self, turns: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        super().__init__()
        self._turns = list(turns)

    async def generate(self, input_ids: np.ndarray, sampling: Mapping[str, Any], *_: Any, **__: Any) -> Generation:
        ids, logprobs = self._turns.pop(0)
        assert len(ids) <= sampling["max_new_tokens"]
        spans = (VersionSpan(str(self.version), 0, len(ids)),)
        return Generation(np.array(ids, np.int32), np.array(logprobs, np.float32), spans, "stop")


class Seeded(EnvClient):
    """Opens episodes with a given seed."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url)
        self._seed = seed

    async def create(
        self, request_id: str, env: str, split: str, index: int, *, seed: int, snapshot: Any = None
    ) -> Opening:
        return await super().create(request_id, env, split, index, seed=self._seed)


def sampled_turns(episode: Mapping[str, Any]) -> list[tuple[list[int], list[float]]]:
    rows = zip(episode["mask"], episode["response_ids"], episode["logprobs"], strict=True)
    runs = [(own, list(part)) for own, part in itertools.groupby(rows, key=lambda row: row[0])]
    return [([i for _, i, _ in part], [p for _, _, p in part]) for own, part in runs if own]


def played_by_volley(smoke: Smoke, episode: Mapping[str, Any], task: Sequence[str]) -> Trajectory:
    """Volley's own record of the episode: its runner, its tokenizer, a new episode in the same service."""
    env, split, index = task

    async def play() -> Trajectory:
        bounds = TokenBounds(CONTEXT, 100 if env == "frozen_lake" else TURN, 4, 60.0, 1)
        balancer = balancer_of(Replayed(sampled_turns(episode)))
        spec = SamplingSpec(env, split, int(index), 1, 0, 0, {"temperature": 1.0}, VersionBounds())
        async with Seeded(smoke.env_url, episode["seed"]) as client:
            runner = EpisodeRunner(ChatTokenizer(smoke.model), client, balancer, RunStatus(), bounds)
            return await runner.run(spec, TokenBudget(1))

    return asyncio.run(play())


def assert_same(episode: Mapping[str, Any], own: Trajectory) -> None:
    n_prompt = own.prompt_len
    assert own.token_ids.tolist() == episode["prompt_ids"] + episode["response_ids"]
    assert n_prompt == len(episode["prompt_ids"])
    assert own.loss_mask[n_prompt:].tolist() == episode["mask"]
    np.testing.assert_allclose(own.logprobs[n_prompt:], episode["logprobs"], atol=1e-6)
    assert own.reward == pytest.approx(episode["reward"], abs=1e-6)
    assert own.success == episode["success"]


@pytest.mark.long
def test_episodes_are_those_that_volley_records(smoke: Smoke) -> None:
    assert len(smoke.found["episodes"]) == 12
    for episode in smoke.found["episodes"]:
        assert len(episode["turn_scores"]) == TURNS
        assert_same(episode, played_by_volley(smoke, episode, episode["task"].split("/")))


@pytest.mark.long
def test_log_probabilities_are_the_model_s(smoke: Smoke) -> None:
    weights = models.random_weights(MODEL, 0)
    for episode in smoke.found["episodes"][:2]:
        ids = np.array(episode["prompt_ids"] + episode["response_ids"])
        table = decoder_reference.log_softmax(decoder_reference.logits(weights, MODEL, ids))
        exact = table[np.arange(len(ids) - 1), ids[1:]][len(episode["prompt_ids"]) - 1 :]
        own = np.array(episode["mask"], bool)
        np.testing.assert_allclose(np.array(episode["logprobs"])[own], exact[own], atol=1e-4)


@pytest.mark.long
def test_rewards_and_advantages_are_volley_s(smoke: Smoke) -> None:
    episodes = smoke.found["episodes"]
    rewards = np.array([episode["reward"] for episode in episodes])
    assert len({*rewards.round(6)}) > 3
    np.testing.assert_allclose(smoke.found["reward_manager"], rewards, atol=1e-6)
    np.testing.assert_allclose(smoke.found["reward_function"], rewards, atol=1e-6)
    for name, made in smoke.found["advantages"].items():
        for advantages, one in zip(made, group_relative(rewards.reshape(-1, 4), name), strict=True):
            np.testing.assert_allclose(advantages, one, atol=1e-6)


def group_relative(rewards: np.ndarray, estimator: str) -> list[float]:
    """Volley's advantages of groups [N, G], one after another; the trainer's environment computes them."""
    program = (
        "import json, sys, numpy as np\n"
        "from volley_algorithms.estimators import ESTIMATORS\n"
        "from services.trainer.algorithms.terms.advantages import group_relative\n"
        "rewards, name = json.loads(sys.argv[1]), sys.argv[2]\n"
        "print(json.dumps([a for r in rewards for a in group_relative(np.array(r), ESTIMATORS[name]).tolist()]))"
    )
    command = [ROOT / ".venvs" / "trainer" / "bin" / "python", "-c", program, json.dumps(rewards.tolist()), estimator]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout)


@pytest.mark.long
def test_a_tool_s_answer_is_continued_as_volley_does(smoke: Smoke) -> None:
    script = smoke.found["script"]
    assert sampled_turns(script)[0][0] == list(smoke.turns[0])
    assert_same(script, played_by_volley(smoke, script, ("frozen_lake", "train", "0")))
    assert "calculator" in ChatTokenizer(smoke.model).decode(script["prompt_ids"])


@pytest.mark.long
def test_weights_reach_the_server_by_verl_s_hook(smoke: Smoke) -> None:
    found = smoke.found["weights"]
    ids = np.array([1, 2, 3, *found["output_ids"]])
    table = decoder_reference.log_softmax(decoder_reference.logits(smoke.sent, MODEL, ids))
    np.testing.assert_allclose(found["logprobs"], table[np.arange(2, len(ids) - 1), ids[3:]], atol=1e-4)
    assert found["step"] == 7
    assert not [*(smoke.model.parent / "weights").iterdir()]


@pytest.mark.long
def test_both_trainers_start_up_to_their_gpus(smoke: Smoke) -> None:
    found = smoke.found["trainers"]
    assert STOPS in found["legacy"]
    assert STOPS in found["v1"]
    assert found["legacy_roles"] == ["actor_rollout"]
    assert found["v1_roles"] == ["actor"]
    assert found["pool"] == {"global_pool": [1]}
    assert (found["n_train"], found["n_val"], found["steps"]) == (16, 4, 2)


ON_A_CPU = (
    "trainer.device=cpu",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "ray_kwargs.ray_init.num_cpus=16",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.model.use_remove_padding=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "trainer.logger=[console,file]",
    "trainer.save_freq=-1",
    "algorithm.rollout_correction.bypass_mode=false",  # computes the trainer's own log-probabilities, to compare
)
CHANGED = ("trainer.logger", "trainer.save_freq", "algorithm.rollout_correction.bypass_mode")
"""Settings that the training test replaces."""


@pytest.mark.long
def test_verl_trains_on_episodes_of_volley(smoke: Smoke, tmp_path: Path) -> None:
    """Two steps of verl's own trainer on a CPU: the servers sample with its weights, and both agree on the tokens."""
    kept = [line for line in smoke.overrides if not line.startswith(CHANGED)]
    cpu = {
        "VERL_PLATFORM": "tests_cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    log = {"VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"), "VERL_LOGGING_LEVEL": "WARN"}
    python = environment("verl", REQUIREMENTS)
    run_python(python, tmp_path, "-m", "verl.trainer.main_ppo", *kept, *ON_A_CPU, **cpu, **log)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["data"] for line in lines if "actor/grad_norm" in line["data"]]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    assert all(step["actor/grad_norm"] > 0 and step["critic/score/max"] > step["critic/score/min"] for step in steps)
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 5e-3
    assert all(step["training/off_policy/trajectory_spans/max"] <= 2 for step in steps)
    version = httpx.get(f"{smoke.server_url}/model_info").json()["weight_version"]
    assert version.startswith("global_step_2-")
