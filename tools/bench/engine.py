"""Compare tokens per second of the engine with stock sglang-jax, at several numbers of requests at once.

Each side is a process that holds one engine: Volley's, or sglang-jax's own `Engine` on the same model with the same
limits. They take turns, so both see the same machine, and the median of the rounds counts. `python -m
tools.bench.engine [MODEL] [--dtype bfloat16] [--context 256]` prints one JSON object; without MODEL the quickstart's
shape is measured, and for a config.json a model of that shape with random weights.

On accelerators only Volley's side runs, on a model of a config.json's shape with random weights:

    python -m tools.bench.engine config.json --device gpu --dtype bfloat16 --context 2048 --new 512 --requests 1 64 256
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONCURRENCY, N_NEW, PROMPT, N_ROUNDS = (1, 8, 32, 64), 64, 64, 3
_MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny" / "config.json"

_SPARE = 4

type Generate = Callable[[list[int], int], Awaitable[int]]
type Compilations = Callable[[], Awaitable[int]]


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.side is not None:
        asyncio.run(_serve(arguments))
        return
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        model = _folder(arguments, Path(temporary))
        names = _SIDES if arguments.device == "cpu" else ("volley",)
        sides = {name: stack.enter_context(_side(name, model, arguments)) for name in names}
        rates = measure(sides, arguments.rounds, arguments.new, arguments.requests)
    results = {f"engine_{n}_requests": _result(rates, n) for n in arguments.requests}
    sys.stdout.write(json.dumps(results) + "\n")


def _result(rates: dict[str, dict[int, float]], n: int) -> dict[str, float | str]:
    value = rates["volley"][n]
    found: dict[str, float | str] = {"value": value, "unit": "tokens/s"}
    if "stock" in rates:
        found |= {"reference": rates["stock"][n], "ratio": value / rates["stock"][n]}
    return found


def measure(
    sides: dict[str, subprocess.Popen[str]], rounds: int, n_new: int, concurrency: Sequence[int] = CONCURRENCY
) -> dict[str, dict[int, float]]:
    """Return the median tokens/s of each side at each number of requests.

    A first round compiles and does not count, and neither do up to `_SPARE` others in which Volley's engine compiled a
    shape, because requests do not gather in the same batches every time.
    """
    rates: dict[str, dict[int, float]] = {name: {} for name in sides}
    for n in concurrency:
        found: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(turns := 1 + rounds + _SPARE):
            for name, process in sides.items():
                lacking = rounds - len(found[name])
                if lacking:
                    rate, compiled = _ask(process, n, n_new, seed=100 * n + turn)
                    found[name] += [rate] if turn and (not compiled or turns - turn <= lacking) else []
        for name, values in found.items():
            rates[name][n] = statistics.median(values)
            print(f"{name}: {n} requests: {' '.join(f'{value:.0f}' for value in values)}", file=sys.stderr, flush=True)
    return rates


def _ask(process: subprocess.Popen[str], n: int, n_new: int, seed: int) -> tuple[float, int]:
    """Return the rate, and the number of shapes compiled meanwhile."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([n, n_new, seed]) + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("rate "):
            _, rate, compiled = line.split()
            return float(rate), int(compiled)
    raise SystemExit(f"a side ended with code {process.wait()}")


@contextlib.contextmanager
def _side(name: str, model: str, arguments: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tools.bench.engine", model, "--side", name]
    command += ["--dtype", arguments.dtype, "--context", str(arguments.context), "--device", arguments.device]
    command += ["--prompt", str(arguments.prompt), "--requests", *map(str, arguments.requests)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(30)


# --- a side -------------------------------------------------------------------------------------------------------


async def _serve(arguments: argparse.Namespace) -> None:
    """Answer lines [requests, new tokens, seed] with the rate and what was compiled, until standard input ends."""
    async with _SIDES[arguments.side](arguments.model, arguments) as (generate, compilations):
        while line := await asyncio.to_thread(sys.stdin.readline):
            n, n_new, seed = json.loads(line)
            rng = np.random.default_rng(seed)
            prompts = [rng.integers(3, 500, arguments.prompt).tolist() for _ in range(n)]
            before, start = await compilations(), time.perf_counter()
            counts = await asyncio.gather(*(generate(prompt, n_new) for prompt in prompts))
            rate = sum(counts) / (time.perf_counter() - start)
            print("rate", rate, await compilations() - before, flush=True)


@contextlib.asynccontextmanager
async def _volley(model: str, arguments: argparse.Namespace) -> AsyncIterator[tuple[Generate, Compilations]]:
    from services.rollout.engines.base import EngineSpec, GenerateRequest, SamplingParams
    from services.rollout.engines.sglang_jax.client import open_engine

    spec = EngineSpec(
        model,
        dtype=arguments.dtype,
        device=arguments.device,
        context_length=arguments.context,
        max_running_requests=max(arguments.requests),
        max_prefill_tokens=2048 if arguments.device == "cpu" else 8192,
    )
    async with open_engine(spec) as engine:

        async def generate(prompt: list[int], n_new: int) -> int:
            sampling = SamplingParams(max_new_tokens=n_new, ignore_eos=True)
            ids = np.array(prompt, np.int32)
            return len((await engine.generate(GenerateRequest(os.urandom(8).hex(), ids, sampling))).output_ids)

        async def compilations() -> int:
            return (await engine.status()).compilations

        yield generate, compilations


@contextlib.asynccontextmanager
async def _stock(model: str, arguments: argparse.Namespace) -> AsyncIterator[tuple[Generate, Compilations]]:
    """sglang-jax's own engine. Its overlapped schedule and pages above one token give wrong tokens on CPUs."""
    from sgl_jax.srt.entrypoints.engine import Engine

    most = max(arguments.requests)
    engine = Engine(
        model_path=model,
        device="cpu",
        dtype=arguments.dtype,
        attention_backend="native",
        context_length=arguments.context,
        max_running_requests=most,
        max_total_tokens=most * arguments.context,
        max_prefill_tokens=2048,
        chunked_prefill_size=2048,
        page_size=1,
        disable_precompile=True,
        disable_overlap_schedule=True,
        skip_server_warmup=True,
        skip_tokenizer_init=True,
        random_seed=0,
    )

    async def generate(prompt: list[int], n_new: int) -> int:
        sampling = {"max_new_tokens": n_new, "temperature": 1.0, "ignore_eos": True}
        answer: Any = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=len(prompt) - 1
        )
        return int(answer["meta_info"]["completion_tokens"])

    async def compilations() -> int:
        return 0

    try:
        yield generate, compilations
    finally:
        engine.shutdown()


_SIDES = {"volley": _volley, "stock": _stock}


def _folder(arguments: argparse.Namespace, temporary: Path) -> str:
    """Folder of the given model, or of a new one with the shape of the given config.json."""
    from tools.bench.rollout import write_model

    given = Path(arguments.model or _MODEL).absolute()
    if given.is_dir():
        return str(given)
    dtype = ml_dtypes.bfloat16 if arguments.dtype == "bfloat16" else np.float32
    config = json.loads(given.read_text(encoding="utf-8"))
    return str(write_model(temporary / "model", config, np.random.default_rng(0), dtype))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="Hugging Face folder, or a config.json")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "tpu", "gpu"), default="cpu")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--requests", type=int, nargs="+", default=CONCURRENCY, help="numbers of requests at once")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=N_NEW, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--side", choices=sorted(_SIDES), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
