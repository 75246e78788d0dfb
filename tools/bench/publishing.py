"""Time to publish weights to real servers, full and as deltas.

It spans from the optimizer step until the last server serves the weights. The reference is a plain write and read of
the same bytes on the same disk.

    python -m tools.bench.publishing --layers 28 --hidden 1024 --servers 1 2    # Qwen3-0.6B's shape, in bfloat16

    python -m tools.bench.publishing --layers 12 --hidden 512 --servers 1 2 4 8 --megabits 200

    python -m tools.bench.publishing --model FOLDER --servers 1 --megabits 200 --join 5    # of its config.json

The trainer's part (chunks, uplink, offers) runs here on random weights; the servers are processes with the real engine.
In a full version every weight changes; for deltas, a hundredth of the weights moves to the next bfloat16. The fastest
of several rounds counts, also of the plain write and read. `take` is not measured: the arrays are in host memory. With
`--megabits` each server is a simulated host with links of that rate (`tools.bench.links`), and the reference is sending
the bytes once over such a link. With `--join S` a further server joins at the end, while a version of the delta kind is
published every S seconds, until it serves the newest. In float32 every version is full. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import uvloop
import yaml

from services.trainer.publishing import routes
from services.trainer.publishing.publications import ModelToPublish, Publications, PublishedVersion
from services.trainer.publishing.routes import PublishingState
from shared.clients.rollout import RolloutClient
from shared.errors import VolleyError
from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.process.ports import free_port
from shared.published.manifest import WeightOffer
from shared.published.serving import Uplink
from shared.run.checkpoint_files import ManifestLeaf, Probe
from shared.services_schema import Limits, ServicesSection
from shared.types import WeightVersion
from shared.web.http import create_app
from shared.web.serving import make_server
from tools.bench import links
from tools.bench.result import BenchResult, emit
from volley.layout import PROJECT, python_of, variables_of

_LOOPBACK = "127.0.0.1"
_READY_S = 600.0
_MOVED = 0.01
_N_ROUNDS = 5
_RUN = "publishing"
_PULLED = "volley_rollout_pulled_bytes_total"
_PROBE = Probe(tuple(range(1, 65)), (-10.0,) * 63, (1e3,) * 63)
"""Probe with as many tokens as a trainer's. Its result is not checked; only its time counts."""


def config_of(layers: int, hidden: int) -> dict[str, Any]:
    """Configuration of a Qwen3 with the proportions of Qwen3-0.6B."""
    heads = max(1, hidden // 64)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936 * hidden // 1024,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }


def random_weights(config: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Bits of random weights (uint16 for bfloat16, else uint32), by the trainer's names."""
    shapes = {name: one.shape for name, one in parameters(ModelConfig.parse(config)).items()}
    rng = np.random.default_rng(0)
    bits = {name: (0.02 * rng.standard_normal(shape, np.float32)).view(np.uint32) for name, shape in shapes.items()}
    return bits if dtype == "float32" else {name: (value >> 16).astype(np.uint16) for name, value in bits.items()}


class Bench:
    """A trainer's publications, and servers that pull from them."""

    def __init__(self, folder: Path, weights: dict[str, np.ndarray], dtype: str, url: str) -> None:
        self.publications, self._weights, self.url = Publications(folder / "published", _RUN), weights, url
        self.kinds = ("delta", "full") if dtype == "bfloat16" else ("full",)  # a step moves every float32 weight
        self._leaves = [ManifestLeaf(name, value.shape, dtype) for name, value in weights.items()]
        self._step, self._n_sent = 0, 0

    def read(self, digest: str) -> bytes:
        """Bytes of a chunk, as sent to a server."""
        data = self.publications.read(digest)
        self._n_sent += len(data)
        return data

    def publish(self, config: Mapping[str, Any]) -> PublishedVersion:
        self._step += 1
        arrays = {name: partial(np.asarray, value) for name, value in self._weights.items()}
        model = ModelToPublish(self._leaves, arrays, config, _PROBE)
        return self.publications.publish(WeightVersion(1, self._step), model)

    def move(self, *, all_of_them: bool) -> None:
        """Change the weights as a step does."""
        rng = np.random.default_rng(self._step)
        for name, value in self._weights.items():
            if all_of_them:
                value ^= 1
            else:
                at = rng.integers(0, value.size, max(1, int(_MOVED * value.size)))
                self._weights[name].reshape(-1)[at] ^= 1

    async def hand_over(self, config: Mapping[str, Any], servers: Sequence[str]) -> dict[str, float]:
        """Hand over a version: seconds per part of the slowest server, bytes pulled in total and from the trainer."""
        started, sent = time.perf_counter(), self._n_sent
        version = await asyncio.to_thread(self.publish, config)
        chunk_s = time.perf_counter() - started
        self.publications.announce(version)

        async def tell(url: str) -> Mapping[str, float]:
            offer = WeightOffer(str(version.version), version.manifest, (self.url, *(s for s in servers if s != url)))
            async with RolloutClient(url) as client:
                return (await client.update_weights(offer, "retract"))["timings"]

        answers = await asyncio.gather(*map(tell, servers))
        parts = {key: max(one.get(key, 0.0) for one in answers) for one in answers for key in one if key.endswith("_s")}
        pulled = sum(one["pulled_bytes"] for one in answers)
        moved = {"pulled_bytes": pulled, "trainer_sent_bytes": self._n_sent - sent}
        return {"chunk_s": chunk_s, **parts, "total_s": time.perf_counter() - started, **moved}


async def measured(folder: Path, config: Mapping[str, Any], given: argparse.Namespace) -> dict[str, BenchResult]:
    dtype, megabits, n_rounds = given.dtype, given.megabits, given.rounds
    weights = random_weights(config, dtype)
    n_bytes = sum(value.nbytes for value in weights.values())
    raw_s = _raw_s(folder / "raw", weights) if megabits is None else n_bytes * 8 / (megabits * 1e6)
    raw = "raw_write_and_read" if megabits is None else "raw_link"
    results = {"published_bytes": BenchResult(n_bytes, "B"), raw: BenchResult(raw_s, "s")}
    with socket.create_server((_LOOPBACK if megabits is None else links.OWN, 0)) as listener:
        host, port = listener.getsockname()
        bench = Bench(folder, weights, dtype, f"http://{host}:{port}")
        async with _serving(bench, listener), _Servers(folder, config, dtype, bench.url, megabits) as servers:
            for n in sorted(given.servers):
                urls = await servers.at_least(n)
                await bench.hand_over(config, urls)  # compiles everything before measuring
                rounds = {kind: list[dict[str, float]]() for kind in bench.kinds}
                for _ in range(n_rounds):
                    for kind, found in rounds.items():
                        bench.move(all_of_them=kind == "full")
                        found.append(await bench.hand_over(config, urls))
                for kind, found in rounds.items():
                    for name, value in min(found, key=lambda parts: parts["total_s"]).items():
                        unit = "B" if name.endswith("_bytes") else "s"
                        reference = n * n_bytes if unit == "B" else raw_s if name == "total_s" else None
                        results[f"{kind}_{n}_{name.removesuffix('_s')}"] = BenchResult(value, unit, reference)
            if given.join is not None:
                results |= await _joined(bench, config, servers, given.join, raw_s)
            results["server_peak"] = BenchResult(servers.peak_bytes(), "B", n_bytes)
    return results


async def _joined(
    bench: Bench, config: Mapping[str, Any], servers: _Servers, every_s: float, raw_s: float
) -> dict[str, BenchResult]:
    """Let a server join while versions follow each other; measure until it serves the newest."""
    made = list[PublishedVersion]()

    async def publish() -> None:
        while True:
            bench.move(all_of_them="delta" not in bench.kinds)
            made.append(await asyncio.to_thread(bench.publish, config))
            bench.publications.announce(made[-1])
            await asyncio.sleep(every_s)

    publishing = asyncio.create_task(publish())
    try:
        url = await servers.next()
        started, n_before = time.perf_counter(), len(made)
        async with RolloutClient(url) as client:
            while True:
                if (await client.weights()).digest == made[-1].digest:  # of all chunks, each of which it has checked
                    break
                await asyncio.sleep(0.1)
            seconds, n_meanwhile = time.perf_counter() - started, len(made) - n_before
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    pulled = await asyncio.to_thread(_pulled, url)
    return {
        "join_total": BenchResult(seconds, "s", raw_s),
        "join_pulled_bytes": BenchResult(pulled, "B", made[-1].n_bytes),
        "join_versions_meanwhile": BenchResult(n_meanwhile, "", seconds / every_s),
    }


@contextlib.asynccontextmanager
async def _serving(bench: Bench, listener: socket.socket) -> AsyncIterator[None]:
    """Serve the trainer's routes and announce the first version."""
    app = create_app("trainer", limits=Limits(), tokens=None, ready=lambda: None, roles=routes.ROLES)

    async def sources() -> Sequence[str]:
        return (bench.url,)

    app.state.publishing = PublishingState(bench.publications, Uplink(bench.read), sources)
    app.include_router(routes.router)
    server = make_server(app, ServicesSection())
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True


class _Servers:
    """Servers without weights, started one at a time to limit memory and CPU use."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], dtype: str, trainer: str, megabits: float | None
    ) -> None:
        self._folder, self._dtype, self._trainer, self._megabits = folder, dtype, trainer, megabits
        self._urls, self._processes = list[str](), list[subprocess.Popen[bytes]]()
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_bytes(orjson.dumps(config))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    async def at_least(self, n: int) -> Sequence[str]:
        """Start servers until there are `n`; returns all addresses."""
        while len(self._urls) < n:
            await self.next()
        return self._urls

    async def next(self) -> str:
        """Start one more server; return its address."""
        i = len(self._urls)
        host, inside = (_LOOPBACK, ()) if self._megabits is None else links.add_host(i, self._megabits)
        port = free_port()
        path = self._folder / f"{i}.yaml"
        path.write_text(yaml.safe_dump(self._run(host, port)), encoding="utf-8")
        command = [*inside, str(python_of("rollout")), "-m", "services.rollout", "--config", str(path)]
        self._processes.append(await asyncio.to_thread(_started, command))
        self._urls.append(f"http://{host}:{port}")
        await _up(self._urls[-1])
        return self._urls[-1]

    def _run(self, host: str, port: int) -> Mapping[str, Any]:
        folder = self._folder
        engine = {"context_length": 64, "max_running_requests": 4, "max_prefill_tokens": 64}
        engine |= {"precompile_token_paddings": [64], "precompile_bs_paddings": [4], "max_total_tokens": 512}
        run = {"run": {"name": _RUN, "dir": str(folder / f"host-{port}")}, "data": {"env": "none"}}
        run |= {"model": {"path": str(folder / "model"), "dtype": self._dtype}, "rollout": {"engine": engine}}
        return run | {"services": {"rollout": {"host": host, "port": port}, "trainer": {"url": self._trainer}}}

    def peak_bytes(self) -> int:
        return max(_peak_bytes(process.pid) for process in self._processes)


def _pulled(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310 - an address of our own
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(_PULLED))


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=PROJECT, env=variables_of("rollout", cpu=True), stderr=subprocess.DEVNULL)


async def _up(url: str) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(VolleyError):
            async with RolloutClient(url) as client:
                await client.weights()
                return
        if time.monotonic() > deadline:
            raise VolleyError(f"{url} did not come up within {_READY_S:g} s")
        await asyncio.sleep(0.5)


def _peak_bytes(pid: int) -> int:
    """Peak memory of the service plus its engine, in bytes."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split())]
    status = [Path(f"/proc/{one}/status").read_text(encoding="utf-8") for one in pids]
    return sum(1024 * int(text.partition("VmHWM:")[2].split()[0]) for text in status)


def _raw_s(path: Path, weights: Mapping[str, np.ndarray]) -> float:
    """Seconds to write the same bytes to a file and read them: the fastest of several tries."""
    found = list[float]()
    for _ in range(_N_ROUNDS):
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for value in weights.values():
                file.write(memoryview(value).cast("B"))
        path.read_bytes()
        found.append(time.perf_counter() - started)
    path.unlink()
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="published weights into real servers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--model", type=Path, help="folder whose config.json has the shape, instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--megabits", type=float, help="link rate of simulated hosts, one per server; needs root")
    parser.add_argument("--rounds", type=int, default=_N_ROUNDS)
    parser.add_argument("--join", type=float, metavar="S", help="one more joins while versions come every S seconds")
    given = parser.parse_args(sys.argv[1:])
    config = config_of(given.layers, given.hidden)
    if given.model is not None:
        config = orjson.loads((given.model / "config.json").read_bytes())
    if given.megabits is not None:
        links.isolate(given.megabits)
    with tempfile.TemporaryDirectory() as folder:
        work = measured(Path(folder), config, given)
        # uvloop, as in every service: with asyncio's own loop a small answer waits for an acknowledgement.
        emit(asyncio.run(work, loop_factory=uvloop.new_event_loop))


if __name__ == "__main__":
    main()
