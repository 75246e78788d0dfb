"""Compare tokens per second through HTTP `/generate` with the engine called directly.

Both get the same prompts and concurrency. Two engines with the quickstart's model take turns, one behind the service in
its own process, one driven from here. The median of several rounds counts. `python -m tools.bench.rollout` prints one
JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
from services.rollout.engines.sglang_jax.client import open_engine
from shared.clients.base import HttpClient
from shared.errors import VolleyError
from shared.process.ports import free_port

N_REQUESTS, N_RUNNING, N_NEW, N_ROUNDS = 1024, 64, 64, 5
_CONTEXT = 256
_START_S = 300.0
_MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny" / "config.json"

type Prompts = Sequence[np.ndarray]
type Send = Callable[[str, np.ndarray], Awaitable[int]]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        served, direct = asyncio.run(_measure(Path(temporary)))
    result = {"value": served, "unit": "tokens/s", "reference": direct, "ratio": served / direct}
    sys.stdout.write(json.dumps({"rollout_http_vs_engine": result}) + "\n")


async def _measure(root: Path) -> tuple[float, float]:
    """(HTTP, engine) in tokens/s."""
    model = write_model(
        root / "bench" / "checkpoints" / "base",
        json.loads(_MODEL.read_text(encoding="utf-8")),
        np.random.default_rng(0),
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 500, int(n)).astype(np.int32) for n in rng.integers(16, 96, N_REQUESTS)]
    async with _through_http(root, model) as http, _through_engine(model) as engine:
        rates: dict[int, list[float]] = {0: [], 1: []}
        for n in range(N_ROUNDS + 1):
            for i, send in enumerate((http, engine)):
                rates[i].append(await _tokens_per_s(send, prompts, f"{n}-{i}"))
    return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])


async def _tokens_per_s(send: Send, prompts: Prompts, label: str) -> float:
    running = asyncio.Semaphore(N_RUNNING)

    async def one(i: int, prompt: np.ndarray) -> int:
        async with running:
            return await send(f"{label}-{i:06d}", prompt)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    return sum(task.result() for task in tasks) / (time.perf_counter() - started)


@contextlib.asynccontextmanager
async def _through_engine(model: Path) -> AsyncIterator[Send]:
    sampling = SamplingParams(max_new_tokens=N_NEW, ignore_eos=True)

    spec = EngineSpec(str(model), context_length=_CONTEXT, max_running_requests=N_RUNNING)
    async with open_engine(spec) as engine:

        async def send(rid: str, prompt: np.ndarray) -> int:
            return len((await engine.generate(GenerateRequest(rid, prompt, sampling))).output_ids)

        yield send


@contextlib.asynccontextmanager
async def _through_http(root: Path, model: Path) -> AsyncIterator[Send]:
    port = free_port()
    config = root / "config.yaml"
    config.write_text(json.dumps(_config(root, model, port)), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.rollout", "--config", str(config))
    body = {"sampling_params": {"max_new_tokens": N_NEW, "ignore_eos": True}}
    try:
        async with HttpClient(f"http://127.0.0.1:{port}", timeout_s=_START_S) as client:
            await _until_healthy(client)
            await client.post("/update_weights_from_disk", {"model_path": str(model)})

            async def send(rid: str, prompt: np.ndarray) -> int:
                return len((await client.post("/generate", {**body, "rid": rid, "input_ids": prompt}))["output_ids"])

            yield send
    finally:
        process.terminate()
        await process.wait()


async def _until_healthy(client: HttpClient) -> None:
    async with asyncio.timeout(_START_S):
        while True:
            with contextlib.suppress(VolleyError):
                await client.get("/health", attempts=1)
                return
            await asyncio.sleep(0.2)


def _config(root: Path, model: Path, port: int) -> dict[str, Any]:
    engine = {"context_length": _CONTEXT, "max_running_requests": N_RUNNING}
    return {
        "run": {"name": "bench", "dir": str(root)},
        "model": {"path": str(model)},
        "data": {"env": "bench"},
        "rollout": {"engine": engine},
        "services": {"rollout": {"port": port}, "limits": {"grace_s": 2}},
    }


def write_model(
    folder: Path, config: Mapping[str, Any], rng: np.random.Generator, dtype: Any = np.float32, n_drawn: int = 1 << 24
) -> Path:
    """Write a Hugging Face folder of the Qwen3 family with random weights; a larger matrix repeats `n_drawn` values."""
    from safetensors.numpy import save_file

    dim, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (q, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q),
    }
    matrices |= {"mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn)}
    gains = {
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
        "input_layernorm": dim,
        "post_attention_layernorm": dim,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], dim)}
    weights: dict[str, np.ndarray] = {"model.norm.weight": np.ones(dim, dtype)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in matrices.items()}
        weights |= {f"model.layers.{layer}.{name}.weight": np.ones(size, dtype) for name, size in gains.items()}
    for name, shape in shapes.items():
        drawn = rng.normal(0, 0.05, min(math.prod(shape), n_drawn)).astype(dtype)
        weights[f"{name}.weight"] = np.resize(drawn, shape)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    main()
