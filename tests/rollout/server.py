"""A rollout server as a process, and a small blocking client for it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from shared import codec
from shared.process.ports import free_port
from tests.support import decoder_reference, models

CONTEXT = 256
MAX_RUNNING = 16
MAX_PREFILL = 64
POOL = 1024  # a quarter of what full requests would need: long ones are retracted and resumed


@dataclass
class RolloutProcess:
    """`weights` are the float32 arrays of every version this server was given, by version; `epoch` that of new ones."""

    url: str
    root: Path
    config: dict[str, Any]
    process: subprocess.Popen[bytes]
    weights: dict[str, models.Weights] = field(default_factory=dict[str, models.Weights])
    epoch: int = 1
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.url, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        answer = self.http.post(path, content=codec.pack(body), headers={"Content-Type": codec.MEDIA_TYPE})
        assert answer.status_code == status, answer.text[:500]
        if answer.headers["content-type"].startswith(codec.MEDIA_TYPE):
            return codec.unpack(answer.content)
        return answer.json()

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def generate(
        self, ids: Sequence[int], n: int = 16, rid: str | None = None, status: int = 200, **sampling: Any
    ) -> Any:
        """Greedy and without stopping at the end token, unless `sampling` says otherwise."""
        params = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True} | sampling
        body = {"input_ids": np.array(ids, np.int32), "sampling_params": params} | ({"rid": rid} if rid else {})
        return self.post("/generate", body, status)

    def start(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.pool.submit(self.generate, *args, **kwargs)

    def status(self) -> dict[str, Any]:
        return self.get("/get_server_info")["internal_state"]

    def new_version(self) -> str:
        """Newer than all before: a server never goes back."""
        return f"e{self.epoch:06d}-s{next(self.steps):06d}"

    def publish(self, version: str, seed: int, folder: str = "pushed") -> Path:
        """Writes a checkpoint of random weights; in "." the server finds it by itself. Returns its folder."""
        weights = models.random_weights(self.config, seed)
        self.weights[version] = weights
        return models.write_checkpoint(self.root / folder, version, self.config, weights)

    def error(self, prompt: Sequence[int], answer: Any) -> float:
        """Largest |log p - reference| over the answer's tokens, each under the version that claims it."""
        ids, logprobs = answer["output_ids"].tolist(), answer["meta_info"]["output_token_logprobs"]
        found = []
        for span in answer["meta_info"]["weight_versions"]:
            start, end = span["start"], span["end"]
            weights = self.weights[span["version"]]
            expected = decoder_reference.score(weights, self.config, [*prompt, *ids[:start]], ids[start:end])
            found.append(np.abs(expected - logprobs[start:end]).max())
        return max(found)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


@contextmanager
def running_server(folder: Path, config: dict[str, Any], *overrides: str) -> Iterator[RolloutProcess]:
    """A server whose first version e000001-s000000 (seed 0) is on disk before it starts; killed at the end if still
    there.
    """
    port = free_port()
    model = models.write_hf(folder / "model", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((Path(__file__).parents[2] / "configs" / "models" / "tiny" / name).read_bytes())
    sizes = {
        "context_length": CONTEXT,
        "max_running_requests": MAX_RUNNING,
        "max_prefill_tokens": MAX_PREFILL,
        "max_total_tokens": POOL,
    }
    engine = json.dumps(sizes | {"precompile_token_paddings": [16, 64], "precompile_bs_paddings": [8, 16]})
    path = folder / "run.yaml"
    path.write_text(
        f"run: {{name: test, dir: {folder}}}\nmodel: {{path: {model}}}\ndata: {{env: none}}\n"
        f"rollout: {{engine: {engine}}}\nservices: {{rollout: {{port: {port}}}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "services.rollout", "--config", str(path), *overrides]
    with subprocess.Popen(command) as process:
        server = RolloutProcess(f"http://127.0.0.1:{port}", folder / "test" / "checkpoints", config, process)
        try:
            server.publish("e000001-s000000", 0, ".")
            wait_until(lambda: process.poll() is not None or _ready(server), 280)
            assert process.poll() is None, "the server ended before it was ready"
            yield server
        finally:
            process.kill()
            server.pool.shutdown(wait=False, cancel_futures=True)
            server.http.close()


def _ready(server: RolloutProcess) -> bool:
    try:
        return server.http.get("/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
