"""verl's weights to Volley's rollout servers: a Hugging Face folder, then `POST /update_weights_from_disk`.

The folder lies below `weights_dir`, which the trainer's first process writes and every server reads under the same
path: on one machine, or on a shared file system. A server checks names, shapes and digests before it serves them; if
one refuses, the update fails and the step with it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from volley_verl.service import Service
from volley_verl.settings import BACKEND, SettingsError

PREFIX = "global_step_"
_INDEX = "model.safetensors.index.json"


def step_of(version: str) -> int | None:
    """Return verl's step of a weight version, None for weights that did not come from verl."""
    number = version.removeprefix(PREFIX).partition("-")[0]
    return int(number) if version.startswith(PREFIX) and number.isdecimal() else None


async def publish(
    weights: Any, step: int | None, *, model: Path, folder: Path, servers: Sequence[str], shard_bytes: int, mode: str
) -> str:
    """Write all weights below `folder` and let every server load them; return the version.

    Args:
        weights: pairs of a Hugging Face name and a tensor; a generator, also an asynchronous one.
        model: the model's folder, for config.json.
        mode: what the update does to running requests: retract, abort or in_place.

    Raises:
        ServiceError: a server could not load them.
    """
    version = f"{PREFIX}{step or 0}-{uuid.uuid4().hex[:8]}"
    made = folder / version
    made.mkdir(parents=True)
    try:
        await _write(made, weights, shard_bytes)
        shutil.copy(model / "config.json", made)
        body = {"model_path": str(made), "weight_version": version, "mode": mode}
        await asyncio.gather(*(_load(url, body) for url in servers))
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return version


async def drain(weights: Any) -> None:
    """Run a generator of weights to its end: every process takes part in gathering each tensor."""
    async for _ in ensure_async_iterator(weights):
        pass


async def _write(folder: Path, weights: Any, shard_bytes: int) -> None:
    shard: dict[str, torch.Tensor] = {}
    n_bytes, n_shards, files = 0, 0, dict[str, str]()

    def flush() -> None:
        nonlocal shard, n_bytes, n_shards
        if shard:
            n_shards += 1
            name = f"model-{n_shards:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            files.update(dict.fromkeys(shard, name))
            shard, n_bytes = {}, 0

    async for name, tensor in ensure_async_iterator(weights):
        held = tensor.detach().to("cpu", copy=True).contiguous()
        if n_bytes + held.nbytes > shard_bytes:
            flush()
        shard[name], n_bytes = held, n_bytes + held.nbytes
    flush()
    index = {"metadata": {}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


async def _load(url: str, body: dict[str, str]) -> None:
    async with Service(url, "admin") as service:
        await service.post("/update_weights_from_disk", body)


@CheckpointEngineRegistry.register(BACKEND)
class VolleyCheckpointEngine(CheckpointEngine):
    """verl's hook for weights from a trainer to rollout servers on other machines.

    The trainer's first process writes and publishes; the side of the rollout only tells its server's address.

    Args:
        bucket_size: bytes of a file of weights.
        weights_dir, model, mode: see `publish`.
        server: on the side of the rollout, the replica's server.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        weights_dir: str | None = None,
        model: str | None = None,
        mode: str = "retract",
    ) -> None:
        if weights_dir is None or model is None:
            raise SettingsError(
                "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.volley needs weights_dir and model"
            )
        self.bucket_size, self.is_master, self.mode = bucket_size, is_master, mode
        self.folder, self.model = Path(weights_dir), Path(model)
        self.server: str | None = None
        self.servers: Sequence[str] = ()

    def prepare(self) -> Any:
        return self.server

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        servers = [one for one in metadata if one is not None]
        return {"servers": [servers] * actor_wg_world_size}, {"servers": [servers] * rollout_world_size}

    def init_process_group(self, servers: Sequence[str]) -> None:
        self.servers = servers

    def finalize(self) -> None:
        self.servers = ()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        if not self.is_master:
            return await drain(weights)
        await publish(
            weights,
            global_steps,
            model=self.model,
            folder=self.folder,
            servers=self.servers,
            shard_bytes=self.bucket_size,
            mode=self.mode,
        )
        return None

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield nothing: the servers load the weights themselves."""
        return
        yield
