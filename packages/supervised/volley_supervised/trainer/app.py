"""Wiring of a supervised trainer: training thread, data, routes.

It has no queue and no rollout server, and needs the environment service only for demonstrations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from services.trainer.metrics import prometheus
from services.trainer.routes import ROLES, router
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from services.trainer.waiter import Waiter
from shared.boot import RunningService
from shared.clients.env import EnvClient
from shared.models.chat import ChatTokenizer, tokenizer_of_run
from shared.models.content import with_content
from shared.models.hub import keep, model_folder
from shared.models.origin import Origin
from shared.process.imports import uncollected
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.run import pinned
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.run_config import section_of
from shared.schema import RunConfig
from shared.web.access import Role, read_tokens
from shared.web.http import create_app
from volley_supervised.conversations.data import RunData, data_settings, load
from volley_supervised.sections import SftSection
from volley_supervised.trainer.loop import SupervisedPlan
from volley_supervised.trainer.worker import OpenedBackend, SupervisedParts, SupervisedWorker


@asynccontextmanager
async def open_supervised(config: RunConfig) -> AsyncIterator[RunningService]:
    """Raises ConfigError."""
    origin = await asyncio.to_thread(keep, config)
    if origin is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": origin.path})})
    sft, services, folder = section_of(config, SftSection), config.services, RunFolder(config.run.folder.absolute())
    callers = read_tokens(services.token_files)
    model = await asyncio.to_thread(model_folder, config.model.path, config.run.folder, weights=True)
    config = await asyncio.to_thread(with_content, config, model)
    tokenizer, status = tokenizer_of_run(model, config.run.date), TrainerStatus(config.run.name, sft.max_steps)
    async with AsyncExitStack() as stack:
        client = None
        if config.needs_environment and not folder.demonstrations.exists():
            token = callers.of(Role.SERVICE) if callers else None
            client = EnvClient(services.base_url("env"), token=token, ca_file=services.tls.ca_file)
            await stack.enter_async_context(client)
        thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        stack.callback(thread.shutdown, wait=False, cancel_futures=True)

        async def data(waiter: Waiter) -> RunData:
            return await load(data_settings(config), tokenizer, client, waiter, folder.demonstrations)

        parts = SupervisedParts(
            open_backend=partial(_opened, config, model, tokenizer, origin),
            archive=Archive(folder.archive, config.run.name),
            log=StepLog(folder.sft),
            executor=thread,
            data=data,
            sinks=stack.enter_context(MetricsFanout.opened([PrometheusSink(prometheus.show)], config.run.folder)),
        )
        app = create_app("trainer", limits=services.limits, tokens=callers, ready=status.not_ready, roles=ROLES)
        app.state.status = status
        app.include_router(router)
        yield RunningService(app, [SupervisedWorker(supervised_plan(config, origin), parts, status).run])


def supervised_plan(config: RunConfig, origin: Origin | None) -> SupervisedPlan:
    sft = section_of(config, SftSection)
    return SupervisedPlan(
        seed=config.run.seed,
        batch_size=sft.batch_size,
        save_interval_steps=sft.save_interval_steps,
        eval_every_n_steps=sft.eval_every_n_steps,
        grace_s=config.services.limits.grace_s,
        keep_reference=config.mode == "dpo",
        settings=pinned.relevant(config),
        origin=None if origin is None else asdict(origin),
    )


def _opened(config: RunConfig, model: Path, tokenizer: ChatTokenizer, origin: Origin | None) -> OpenedBackend:
    """Import JAX and Tunix, after the data are checked, which is faster. Raises ConfigError."""
    with uncollected():
        from volley_supervised.trainer.opening import open_backend
    return open_backend(config, model, tokenizer, origin)
