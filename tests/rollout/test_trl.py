"""TRL's GRPOTrainer with a Volley server: the real package beside the real engine, with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.process.ports import free_port
from tests.support import models
from tests.support.foreign import environment
from tests.support.net import wait_http
from tests.support.tokenizer import FOLDER

pytestmark = pytest.mark.timeout(900)
BRIDGE = Path("bridges/trl").absolute()
TRAIN = """
import json, sys
import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from volley_trl import VolleyClient, use_volley

model, url, weights = sys.argv[1:]


def many(completions, completion_ids, **_):
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


config = GRPOConfig(
    output_dir=weights + "/../output", max_steps=2, per_device_train_batch_size=4, num_generations=4,
    max_completion_length=8, learning_rate=1e-2, beta=0.0, logging_steps=1, save_strategy="no", report_to="none",
    use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, dataloader_pin_memory=False)
rows = Dataset.from_list([{"prompt": text} for text in ("a b", "one two three", "c", "yes")])
trainer = GRPOTrainer(model, reward_funcs=many, args=config, train_dataset=rows)
client = VolleyClient(url, weights)
use_volley(trainer, client)
trainer.train()
trainer.vllm_generation.sync_weights()

prompts = [[5, 6, 7], [8, 9]]
sampled = client.generate(prompts, n=2, max_tokens=6, temperature=0.7, top_p=1.0)
worst = 0.0
for i, ids in enumerate(sampled["completion_ids"]):
    whole = prompts[i // 2] + ids
    logits = trainer.model(torch.tensor([whole])).logits[0].double() / 0.7
    reference = torch.log_softmax(logits, -1)[len(prompts[i // 2]) - 1 : -1]
    for row, token, logprob in zip(reference, ids, sampled["logprobs"][i]):
        worst = float(np.maximum(worst, abs(row[token].item() - logprob[0])))
chat = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=4, n=2)
assert all(len(chat[key]) == 2 for key in ("completion_ids", "logprobs")), chat
print(json.dumps({"worst": worst, "version": client.version, "prompts": sampled["prompt_ids"],
                  "log": trainer.state.log_history}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    project = tomllib.loads((BRIDGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return environment("trl", ["torch==2.13.0", *project["dependencies"]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model, as transformers and the server read it."""
    config = models.tiny_config()
    folder = models.write_hf(tmp_path / "model", config, models.random_weights(config, 0))
    for file in FOLDER.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def url(folder: Path, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "weights").mkdir()
    port = free_port()
    command = [sys.executable, "-m", "volley", "serve", str(folder), "--no-token", "--port", str(port)]
    more = ["--weights-root", str(tmp_path / "weights"), "rollout.engine.max_running_requests=8"]
    with subprocess.Popen([*command, *more], env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        try:
            wait_http(f"http://127.0.0.1:{port}/ready", 240)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.mark.long
def test_the_trainer_learns_from_exact_tokens_and_sends_its_weights(python: Path, folder: Path, url: str) -> None:
    weights = folder.parent / "weights"
    ended = subprocess.run(
        [str(python), "-c", TRAIN, str(folder), url, str(weights)],
        env={**os.environ, "PYTHONPATH": str(BRIDGE), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
        timeout=600,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    steps = [row for row in found["log"] if "loss" in row]
    assert len(steps) == 2
    assert all(float(row["sampling/sampling_logp_difference/max"]) < 1e-4 for row in steps)
    assert found["worst"] < 1e-4, "log-probabilities of the weights that were sent last"
    assert found["prompts"] == [[5, 6, 7], [8, 9]]
    assert httpx.get(f"{url}/weights").json()["current"] == found["version"]
    assert not list(weights.iterdir()), "folders are removed when the server has loaded them"
