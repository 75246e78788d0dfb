"""Plain values of the service, read once from the run's configuration."""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from services.rollout.engines.base import EngineServer, EngineSpec
from services.rollout.engines.staged import CommitMode
from shared.engines import DeclaredEngine
from shared.errors import ConfigError
from shared.models.adapter import is_adapter
from shared.models.config import ModelConfig
from shared.models.content import with_content
from shared.models.hub import model_folder
from shared.models.parameters import parameters
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.services_schema import Limits, TokenFiles


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Args:
    engine: how to start the engine; `engine.model_path` also holds the tokenizer.
    weights_root: folder of the run's checkpoints, watched while no trainer answers; paths outside it are refused.
    pulled: folder of this process alone for chunks of published versions; None refuses published versions.
    trainer_url: address of the trainer, which names the newest version.
    bucket: address of the run's bucket, from which versions may be loaded.
    date: date of the run, for chat templates that write one.
    run, server_id, url: how the server registers in Redis, if `redis_url` is given.
    kind: which engine, one of `shared.engine_kinds.names()`.
    model_name: name of the model in answers; empty for the name of its folder.
    first: checkpoint to serve from the start.
    follows: the server belongs to a run: it loads the newest version by itself, and needs a chat template.
    """

    engine: EngineSpec
    weights_root: Path | None
    update_mode: CommitMode
    run: str
    server_id: str
    url: str
    redis_url: str | None
    redis_password_file: Path | None
    token_files: TokenFiles
    ca_file: Path | None
    limits: Limits
    pulled: Path | None = None
    trainer_url: str | None = None
    bucket: str | None = None
    date: datetime.date | None = None
    kind: str = "sglang_jax"
    model_name: str = ""
    first: Path | None = None
    follows: bool = True


def from_config(config: RunConfig) -> RolloutSettings:
    """Settings of a server of the run. It starts without weights, and loads the run's newest before it reports ready.

    Raises ConfigError, also for a setting that needs a capability the engine does not have.
    """
    services, engine = config.services, config.rollout.engine
    model = model_folder(config.model.path, config.run.folder)
    with_content(config, model)
    DeclaredEngine.of_kind(engine.kind).check(config, ModelConfig.read(model).routing is not None)
    spec = EngineSpec(
        model_path=str(model),
        load_weights=False,
        dtype=config.model.dtype,
        device=engine.device,
        tp_size=engine.tp_size,
        context_length=engine.context_length,
        max_running_requests=engine.max_running_requests,
        max_total_tokens=engine.max_total_tokens,
        max_prefill_tokens=engine.max_prefill_tokens,
        token_paddings=engine.precompile_token_paddings,
        bs_paddings=engine.precompile_bs_paddings,
        server=_engine_server(config),
        adapters=_adapters(config, ModelConfig.read(model)),
    )
    return RolloutSettings(
        engine=spec,
        weights_root=(config.rollout.weights_root or RunFolder(config.run.folder).checkpoints).absolute(),
        update_mode=config.rollout.update_mode,
        run=config.run.name,
        server_id=f"{socket.gethostname()}-{services.rollout.port}-{os.getpid()}",
        url=services.base_url("rollout"),
        redis_url=services.redis_url,
        redis_password_file=services.redis_password_file,
        token_files=services.token_files,
        ca_file=services.tls.ca_file,
        limits=services.limits,
        pulled=RunFolder(config.run.folder).pulled(f"{socket.gethostname()}-{services.rollout.port}").absolute(),
        trainer_url=services.base_url("trainer"),
        bucket=config.run.bucket,
        date=config.run.date,
        kind=engine.kind,
    )


def _adapters(config: RunConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters that the run trains, by name."""
    lora = config.trainer.lora
    found = {} if lora is None else parameters(model, lora.rank, lora.target_modules)
    return {name: one.shape for name, one in found.items() if is_adapter(name)}


def _engine_server(config: RunConfig) -> EngineServer | None:
    """Return the external server that this process forwards to, if any. Raises ConfigError."""
    engine, services = config.rollout.engine, config.services
    if not engine.is_external:
        return None
    if len(engine.urls) != 1:
        raise ConfigError(
            f"rollout.engine.url names {len(engine.urls)} servers, but a rollout server can forward to only one",
            "give this process its own: rollout.engine.url=…",
        )
    name = f"{socket.gethostname()}-{services.rollout.port}"
    pulled = RunFolder(config.run.folder).pulled(name)
    folder = pulled.with_name(f"{pulled.name}.engine") if engine.weights_dir is None else engine.weights_dir / name
    return EngineServer(
        engine.urls[0].rstrip("/"),
        str(folder.absolute()),
        str(engine.api_key_file) if engine.api_key_file else None,
        str(services.tls.ca_file) if services.tls.ca_file else None,
    )
