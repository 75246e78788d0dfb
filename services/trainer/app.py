"""Wires the trainer: queue, files, the training thread, clients, routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from services.trainer import settings as from_run
from services.trainer.backend import Backend, check_vocabulary
from services.trainer.board import Board
from services.trainer.checkpoint import Checkpoints
from services.trainer.loop import Loop
from services.trainer.model.shape import ModelShape
from services.trainer.orbax_arrays import OrbaxArrays
from services.trainer.parts import Parts
from services.trainer.publish import Publisher
from services.trainer.records import Ledger, StepLog
from services.trainer.routes import router
from services.trainer.settings import Tokens, TrainerSettings
from services.trainer.warmup import WarmStart
from shared.archive import Archive
from shared.boot import Service
from shared.chat import ChatTokenizer
from shared.clients.env import EnvClient
from shared.clients.rollout import RolloutClient
from shared.http import create_app, read_token
from shared.hub import model_folder
from shared.queue.client import connect
from shared.queue.queue import TicketQueue
from shared.registry import Registry
from shared.schema import RunConfig


@asynccontextmanager
async def open_service(config: RunConfig) -> AsyncIterator[Service]:
    """Raises ConfigError."""
    settings = from_run.from_config(config)
    token = read_token(settings.token_file)
    model = await asyncio.to_thread(model_folder, config.model.path, weights=True)
    tokenizer = ChatTokenizer(model)
    board = Board(settings.run, config.trainer.max_steps)
    async with AsyncExitStack() as stack:
        redis = connect(settings.redis_url, settings.redis_password_file)
        stack.push_async_callback(redis.aclose)
        environments = await stack.enter_async_context(EnvClient(settings.env_url, token=token))
        thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        stack.callback(thread.shutdown, wait=False, cancel_futures=True)
        backend, tokens = _backend(config, settings, model, tokenizer)
        options, folder = from_run.sft_options(config, tokens), settings.run_folder
        warm = WarmStart(settings.env, settings.n_demonstrations, options, environments, tokenizer, StepLog(folder / "sft.jsonl"))
        publisher = Publisher(_servers(redis, settings), lambda url: RolloutClient(url, token=token), settings.update_mode)
        parts = Parts(
            backend=backend,
            queue=TicketQueue(redis, settings.run),
            ledger=Ledger(folder / "ledger.jsonl"),
            archive=Archive(folder / "archive", settings.run),
            metrics=StepLog(folder / "metrics.jsonl"),
            handovers=StepLog(folder / "handovers.jsonl"),
            executor=thread,
            warm_start=lambda: warm(backend, board, thread),
            publish=publisher.publish,
        )
        app = create_app("trainer", limits=settings.limits, token=token, ready=board.not_ready)
        app.state.board = board
        app.include_router(router)
        yield Service(app, [Loop(from_run.plan(config, tokens), parts, board).run])


def _backend(config: RunConfig, settings: TrainerSettings, folder: Path, tokenizer: ChatTokenizer) -> tuple[Backend, Tokens]:
    """Raises ConfigError."""
    model = from_run.model_options(config, folder)
    shape = ModelShape.read(model.folder)
    check_vocabulary(tokenizer, shape)
    tokens = Tokens(shape.vocab_size, tokenizer.pad_id)
    checkpoints = Checkpoints(settings.run_folder / "checkpoints", settings.run, settings.max_to_keep, OrbaxArrays())
    return Backend(model, shape, from_run.policy_options(config, tokens), checkpoints), tokens


def _servers(redis: Redis, settings: TrainerSettings) -> Callable[[], Awaitable[Sequence[str]]]:
    """Registered servers and the fixed ones, each once."""
    registry = Registry(redis, settings.run)

    async def servers() -> Sequence[str]:
        registered = [server.url.rstrip("/") for server in await registry.servers()]
        return sorted({*registered, *(url.rstrip("/") for url in settings.rollout_urls)})

    return servers
