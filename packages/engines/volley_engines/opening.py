"""Opening of the engine in front of a server: waits for the server, and checks that it can serve the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from services.rollout.engines.base import BASE_VERSION, EngineInfo, EngineSpec
from services.rollout.engines.staged import StagedWeights
from shared.clients.base import HttpClient
from shared.clients.keys import read_key
from shared.errors import ConfigError, EngineDied, InputError, Unavailable
from shared.models.config import ModelConfig
from shared.process.telemetry import Log
from volley_engines.engine import PERIOD_S, HttpEngine, remove
from volley_engines.sglang import SglangServer
from volley_engines.vllm import VllmServer
from volley_engines.wire import ANSWER_S, ForeignServer, ServerFacts, ServerHttp

START_S = 1800.0
_KIND = "is it a server of rollout.engine.kind, started as docs/engines.md says?"
_log = Log("engine")


def open_sglang(spec: EngineSpec) -> AbstractAsyncContextManager[HttpEngine]:
    """Stand in front of a server of SGLang. Raises as `open_engine`."""
    return open_engine(spec, SglangServer)


def open_vllm(spec: EngineSpec) -> AbstractAsyncContextManager[HttpEngine]:
    """Stand in front of a server of vLLM. Raises as `open_engine`."""
    return open_engine(spec, VllmServer)


@contextlib.asynccontextmanager
async def open_engine(
    spec: EngineSpec, make: Callable[[ServerHttp, Sequence[int]], ForeignServer]
) -> AsyncIterator[HttpEngine]:
    """Wait for the server of `spec.server`, and stand in front of it.

    Raises ConfigError if it cannot serve the run's requests, EngineDied if it does not answer within `START_S`.
    """
    where, begun = spec.server, time.monotonic()
    if where is None:
        raise ConfigError("rollout.engine.url is missing", "name the address of the inference server")
    model, folder = ModelConfig.read(Path(spec.model_path)), Path(where.folder)
    initial = os.path.abspath(spec.model_path)  # noqa: ASYNC240 - it reads no disk
    key = read_key(Path(where.api_key_file) if where.api_key_file else None, "rollout.engine.api_key_file")
    ca_file = Path(where.ca_file) if where.ca_file else None
    async with HttpClient(where.url, token=key, as_json=True, timeout_s=ANSWER_S, ca_file=ca_file) as client:
        server = make(ServerHttp(client), model.eos_token_ids)
        facts = await _facts(server, where.url, begun)
        await asyncio.to_thread(_empty, folder)
        info = _info(facts, spec, model, time.monotonic() - begun)
        _log.info("engine's server found", url=where.url, server=facts.name)
        engine = HttpEngine(server, info, Path(spec.model_path), folder, where.url)
        try:
            if spec.load_weights:
                await engine.stage(StagedWeights(initial, BASE_VERSION, kind="hf"))
                await engine.commit(BASE_VERSION, "abort")
            yield engine
        finally:
            await engine.close()
            await asyncio.to_thread(remove, folder)


async def _facts(server: ForeignServer, url: str, begun: float) -> ServerFacts:
    """Ask the server what it is, until it answers. Raises ConfigError, EngineDied."""
    is_told = False
    while True:
        try:
            return await server.facts()
        except Unavailable as error:
            if not is_told:
                _log.info("waiting for the engine's server", url=url, detail=str(error))
            is_told = True
            if time.monotonic() - begun > START_S:
                raise EngineDied(
                    f"rollout.engine.url: the server did not answer within {START_S:g} s: {error.detail}", error.hint
                ) from error
        except InputError as error:
            raise ConfigError(f"rollout.engine.url: {error.detail}", error.hint or _KIND) from error
        await asyncio.sleep(PERIOD_S)


def _info(facts: ServerFacts, spec: EngineSpec, model: ModelConfig, boot_s: float) -> EngineInfo:
    """Make the engine's sizes. Raises ConfigError if the server takes shorter texts than the run needs."""
    if facts.context_length is not None and facts.context_length < spec.context_length - 1:
        raise ConfigError(
            f"rollout.engine.context_length={spec.context_length}, but the server takes {facts.context_length} tokens",
            "lower it, or start the server with a longer context",
        )
    n_running = min(spec.max_running_requests, facts.max_running_requests or spec.max_running_requests)
    n_tokens = facts.max_total_tokens or n_running * spec.context_length
    eos = tuple(model.eos_token_ids)
    return EngineInfo(model.vocab_size, spec.context_length, n_tokens, n_running, eos, boot_s, 0)


def _empty(folder: Path) -> None:
    remove(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"rollout.engine.weights_dir: {folder} cannot be written: {error.strerror}") from error
