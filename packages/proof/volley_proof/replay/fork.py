"""Training of a fork: the train loop of a run, on the archived groups of another run instead of a queue.

`python -m volley_proof.replay.fork RUN_DIR --last STEP [--env-url URL]` reads fork.json and config.yaml in the
fork's folder. It writes a JSON line a step to stdout, then the result, or an error as a problem body. It needs no other
service, except the environment service at URL for the warm start of a fork from step 0. A killed fork resumes like any
run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from services.trainer import settings as from_run
from services.trainer.app import prepared
from services.trainer.backend.inputs import BackendInputs
from services.trainer.loop.collaborators import Collaborators
from services.trainer.loop.ledger import LedgerFile
from services.trainer.loop.refusals import Refusals
from services.trainer.loop.worker import TrainerWorker
from services.trainer.publishing.publications import Arrays, ModelToPublish, PublishedVersion
from services.trainer.publishing.publisher import Delivery
from services.trainer.publishing.run_id import run_id
from services.trainer.settings import TrainerSettings
from services.trainer.status import TrainerStatus
from services.trainer.step_log import StepLog
from shared import config
from shared.clients.env import EnvClient
from shared.errors import ConfigError, VolleyError, first_error, problem
from shared.models.chat import tokenizer_of_run
from shared.process.sinks import Line, LineKind, MetricsFanout
from shared.published.manifest import Chunk, WeightTree
from shared.run.archive import Archive
from shared.run.checkpoint_files import ManifestLeaf
from shared.run.commits import CommitLog
from shared.run.folder import RunFolder
from shared.schema import RunConfig
from shared.services_schema import TokenFiles
from shared.types import WeightVersion
from volley_proof.replay.log_queue import bounds_of, log_of
from volley_python.folder import forks
from volley_python.folder.forks import Fork

_POLL_S = 0.05
_NOWHERE = "http://127.0.0.1:0"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 0 at the end, 1 failed, 2 wrong usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m volley_proof.replay.fork")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--last", type=int, required=True, metavar="STEP")
    parser.add_argument("--env-url", default=_NOWHERE)
    arguments = parser.parse_args(argv)
    try:
        result = asyncio.run(train(RunFolder(arguments.run_dir.absolute()), arguments.last, arguments.env_url))
    except VolleyError as error:
        _print_line(problem(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    _print_line(result)
    return 0


async def train(folder: RunFolder, last: int, env_url: str) -> dict[str, Any]:
    """Train until the fork ends, at most to step `last`; return {ok, step, version, why}.

    Raises VolleyError, also if a step was refused.
    """
    fork = Fork.read(folder)
    if fork is None:
        raise ConfigError(f"{folder.path} is not the folder of a fork", "use `volley fork RUN_DIR`")
    run = config.stored(folder.path).config
    status = TrainerStatus(run.run.name, run.trainer.max_steps)
    async with AsyncExitStack() as stack:
        worker = await _opened(stack, run, folder, replace(fork, last=last), env_url, status)
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(worker.run())
                await _until_the_end(status, work)
                work.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
    if status.refused:
        raise VolleyError(status.refused)
    why = status.log_ended or f"step {status.step} is the last of the run"
    return {"ok": True, "step": status.step, "version": status.version, "why": why}


async def _until_the_end(status: TrainerStatus, work: asyncio.Task[None]) -> None:
    """Wait until the log is exhausted or the parent process has ended; print what the trainer waits for."""
    parent, last_reason = os.getppid(), None
    while status.phase not in ("done", "refused") and not work.done():
        if os.getppid() != parent:
            status.log_ended = "the command that started it was ended"
            return
        if status.waits and (why := status.waiting_for) != last_reason:
            last_reason = why
            _print_line({"waiting": why})
        await asyncio.sleep(_POLL_S)


async def _opened(
    stack: AsyncExitStack, run: RunConfig, folder: RunFolder, fork: Fork, env_url: str, status: TrainerStatus
) -> TrainerWorker:
    """Wire a trainer as `services.trainer.app` does, without queue, servers and routes. Raises VolleyError."""
    from services.trainer.rl_backend import open_backend  # JAX and Tunix

    run, origin, model = await asyncio.to_thread(prepared, run)
    environments = await stack.enter_async_context(EnvClient(env_url))
    sinks = stack.enter_context(MetricsFanout.opened([_Printer()]))
    thread = ThreadPoolExecutor(1, thread_name_prefix="train")
    stack.callback(thread.shutdown, wait=False, cancel_futures=True)
    tokenizer = tokenizer_of_run(model, run.run.date)
    opened = open_backend(
        BackendInputs(run, _settings(run, folder, env_url), model, tokenizer, origin, _Unpublished(), sinks)
    )
    stack.callback(opened.close)
    plan = from_run.plan(run, opened.tokens, origin)
    filters = replace(plan.rules.filters, max_logprob_diff=None)  # no group was sampled by the fork's own weights
    rules = replace(plan.rules, order="arrival", filters=filters)
    plan = replace(plan, rules=rules, forks=fork.points, free=forks.FREE)
    queue = log_of(fork, folder)
    parts = Collaborators(
        backend=opened.backend,
        checkpoints=opened.checkpoints,
        queue=queue,
        ledger=LedgerFile(folder.ledger),
        archive=Archive(folder.archive, run.run.name),
        commits=CommitLog(folder.archive, run.run.name),
        metrics=StepLog(folder.metrics),
        handovers=StepLog(folder.handovers),
        refusals=Refusals(folder.path),
        executor=thread,
        warm_start=lambda: opened.warm_start(environments, status, thread),
        publish=_to_nobody,
        run_id=partial(run_id, folder.published),
        sinks=sinks,
        log=bounds_of(fork, opened.backend, queue),
    )
    return TrainerWorker(plan, parts, status)


def _settings(run: RunConfig, folder: RunFolder, env_url: str) -> TrainerSettings:
    return TrainerSettings(
        run=run.run.name,
        run_folder=folder.path,
        url="",
        max_to_keep=run.trainer.checkpointing_options.max_to_keep,
        redis_url="",
        redis_password_file=None,
        token_files=TokenFiles(),
        ca_file=None,
        env_url=env_url,
        rollout_urls=(),
        update_mode=run.rollout.update_mode,
        limits=run.services.limits,
    )


class _Unpublished:
    """Publications of a trainer without rollout servers: no array is copied or written."""

    def publish(self, version: WeightVersion, model: ModelToPublish) -> PublishedVersion:
        return PublishedVersion(version, Chunk("", 0), "", 0, 0, {})

    def base(self, epoch: int, leaves: Sequence[ManifestLeaf], arrays: Arrays) -> WeightTree:
        return WeightTree(tuple(leaves), ())


async def _to_nobody(published: PublishedVersion) -> Sequence[Delivery]:
    return ()


class _Printer:
    """Prints each line of metrics."""

    name = "stdout"

    def write(self, kind: LineKind, line: Line) -> None:
        _print_line({"kind": kind, **line})

    def close(self) -> None:
        """Do nothing: each line is flushed."""


def _print_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
