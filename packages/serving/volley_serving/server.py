"""A rollout server that belongs to no run, for `volley serve`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from services.rollout.app import open_rollout
from services.rollout.settings import RolloutSettings, from_config
from shared.boot import RunningService
from shared.models import origin
from shared.models.adapter import is_adapter
from shared.models.hub import kept_in
from shared.run import checkpoint_files
from shared.run.checkpoint_files import Manifest
from shared.schema import RunConfig


@asynccontextmanager
async def open_standalone(config: RunConfig) -> AsyncIterator[RunningService]:
    """Open a server that belongs to no run (`standalone`). Raises as `open_service`, or WeightsError."""
    async with open_rollout(standalone(config)) as service:
        yield service


def standalone(config: RunConfig) -> RolloutSettings:
    """Settings of a server that belongs to no run: it serves `model.path`, and loads other weights only by REST.

    Raises ConfigError.
    """
    settings = from_config(config)
    found = origin.find(config.model.path, kept_in(config.run.folder))
    hub_id = not Path(config.model.path).is_dir()
    adapters = {} if found is None else _adapters_of(checkpoint_files.read_manifest(found.checkpoint))
    return replace(
        settings,
        engine=replace(settings.engine, load_weights=found is None, adapters=adapters),
        weights_root=config.rollout.weights_root and config.rollout.weights_root.absolute(),
        run=found.run if found else settings.run,
        redis_url=None,
        pulled=None,
        trainer_url=None,
        bucket=None,
        model_name=f"{found.run}@{found.version}" if found else config.model.path if hub_id else "",
        first=Path(found.checkpoint) if found else None,
        follows=False,
    )


def _adapters_of(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {leaf.key: leaf.shape for leaf in manifest.tree if is_adapter(leaf.key)}
