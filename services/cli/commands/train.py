"""`volley train`, or `volley up`: the local supervisor. Starts every service, shows progress, ends with a report.

Whatever happens – the run finishes, a service fails, Ctrl-C, SIGTERM, a second Ctrl-C, kill -9 – nothing started here
is left.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.cli.local import external, stack
from services.cli.local.processes import Reaper
from services.cli.local.supervisor import RestartPolicy, Say, ServiceFailed
from services.cli.reporting import closing, report
from services.cli.reporting.progress import ProgressDisplay
from services.cli.runs.elapsed import counting
from services.cli.runs.record import RunClaim, RunRecord, claimed, finished, read_record, stored
from services.cli.verify import command
from shared import config
from shared.clients.base import HttpClient
from shared.config import LoadedConfig
from shared.errors import ConfigError, VolleyError, first_error
from shared.files.reading import open_file
from shared.models.hub import model_folder
from shared.run.folder import RunFolder

_POLL_S = 0.3
_GOING = ("running", "evaluating")
_QUIET_S = 30.0
"""After so long without news the line of progress says what the run waits for, in seconds."""


type Work = Callable[[stack.LocalStack], Awaitable[None]]


class Stopped(Exception):
    """A signal asked us to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(
    paths: Sequence[str], overrides: Sequence[str], seams: stack.StackSeams = stack.REAL, *, prove: bool = False
) -> int:
    """A new run, or one with this configuration that goes on. Raises VolleyError; otherwise returns the exit code.

    Relative paths count from the present directory, and are stored absolute. With `prove` a finished run is verified,
    which reads all its checkpoints.
    """
    return _train(config.rooted(config.load(paths, overrides), Path.cwd()), seams, prove=prove)


def resume(run_dir: Path, overrides: Sequence[str], seams: stack.StackSeams = stack.REAL) -> int:
    """Goes on with the run in this folder; one that is finished is only reported. Raises as `main`."""
    loaded, record = stored(run_dir, overrides)
    if record.finished and not overrides:
        say(f"run {loaded.config.run.name} is finished")
        return report.main(run_dir)
    return _train(loaded, seams)


def _train(loaded: LoadedConfig, seams: stack.StackSeams, *, prove: bool = False) -> int:
    check_inputs(loaded)
    with claimed(loaded) as claim:
        folder = claim.folder
        progress = ProgressDisplay(folder, loaded.config.trainer.max_steps, say)
        try:
            record = supervise(loaded, claim, lambda running: follow(running, folder, progress), say, seams)
        except Stopped as stopped:
            say(
                f"stopped by {stopped}; everything it started has ended. `volley up "
                f"{folder.path}` continues run {folder.name}."
            )
            return stopped.exit_code
        return finish(folder, record, prove=prove)


def supervise(
    loaded: LoadedConfig, claim: RunClaim, work: Work, say: Say, seams: stack.StackSeams = stack.REAL
) -> RunRecord:
    """Runs all services for as long as `work` takes. Returns the record, with the time it took; it counts also if this
    is killed.

    Raises Stopped when a signal ends it, or VolleyError; whatever it started has ended then.
    """
    with counting(claim.folder, claim.record) as worked:
        try:
            asyncio.run(_supervised(loaded, claim, work, say, seams))
        except BaseExceptionGroup as group:
            raise first_error(group) from None
    return worked.record()


def check_inputs(loaded: LoadedConfig) -> None:
    """Finds what is wrong with the inputs, files and services of others, before anything is started. Raises
    VolleyError.
    """
    for key in ("train", "eval"):
        path: Path | None = getattr(loaded.config.data, key)
        if path is not None and loaded.config.services.env.url is None:  # else it lies on that service's host
            try:
                open_file(path).close()
            except OSError as error:
                raise ConfigError(
                    f"data.{key}={path}: {error.strerror}", f"give an existing file with data.{key}=…"
                ) from error
    model_folder(loaded.config.model.path, loaded.config.run.folder)
    asyncio.run(external.check(loaded.config))


def fresh_name(paths: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The overrides with a run.name that is not that of a finished run, unless the user gave a name."""
    if any(override.startswith("run.name=") for override in overrides):
        return list(overrides)
    run = config.load(paths, overrides).config.run
    names = [run.name, *(f"{run.name}-{n}" for n in range(2, 1000))]
    unfinished = (name for name in names if not _is_finished(RunFolder(run.dir / name)))
    return [*overrides, f"run.name={next(unfinished)}"]


def say(line: str) -> None:
    print(line, flush=True)


def _is_finished(folder: RunFolder) -> bool:
    record = read_record(folder)
    return record is not None and record.finished


def finish(folder: RunFolder, record: RunRecord, *, prove: bool = False) -> int:
    finished(folder, record)
    summary = report.make(folder)
    proof = command.verify(folder) if prove else None
    say(report.told(summary, folder))
    say(closing.sentence(folder.name, summary, proof))
    say(f"DONE: steps={summary['steps']} elapsed_sec={summary['elapsed_sec']:.1f}")
    return 0


async def _supervised(loaded: LoadedConfig, claim: RunClaim, work: Work, say: Say, seams: stack.StackSeams) -> None:
    """Raises Stopped, VolleyError, or a group of them."""
    started, folder = time.monotonic(), claim.folder
    say(f"run {folder.name} in {folder.path}: starting services (logs in {folder.logs})")
    with Reaper.running(holds=[claim.lock]) as reaper:
        async with (
            _stopping_on_signal(reaper.kill_all, say),
            stack.running(loaded, folder, reaper, say, RestartPolicy(), seams) as running,
        ):
            say(f"all services answer after {time.monotonic() - started:.1f} s")
            await work(running)


async def follow(running: stack.LocalStack, folder: RunFolder, progress: ProgressDisplay) -> None:
    """Shows progress until the orchestrator says that the run is finished. Raises ServiceFailed if it says that it
    failed.
    """
    news = time.monotonic()
    async with running.client("orchestrator") as orchestrator:
        while True:
            state, reason, refusal = await _run_state(orchestrator, folder.name)
            if progress.show():
                news = time.monotonic()
            if state == "finished":
                return
            if state not in _GOING and (refused := await _refused(running)):
                raise ServiceFailed(f"run {folder.name} has stopped: {refused}")
            if state == "failed" and not refusal:
                raise ServiceFailed(f"run {folder.name} failed: {reason}", f"logs: {folder.logs}")
            if time.monotonic() - news > _QUIET_S:
                progress.say(
                    f"no news for {_QUIET_S:g} s; the run is "
                    f"{': '.join(filter(None, (state, reason)))}; {await _waiting_for(running)}"
                )
                news = time.monotonic()
            await asyncio.sleep(_POLL_S)


async def _run_state(orchestrator: HttpClient, run: str) -> tuple[str, str, bool]:
    """The state of the run, its reason, and whether that is a step that the trainer has refused, or had before it began
    again.

    While the orchestrator does not answer (it may be restarting), that.
    """
    try:
        answer = await orchestrator.get(f"/runs/{run}", attempts=1)
    except VolleyError as error:
        return "unknown", str(error), False
    return str(answer.get("state")), str(answer.get("reason") or ""), bool(answer.get("refused"))


async def _refused(running: stack.LocalStack) -> str:
    """Why the trainer trains no more; empty if it goes on, or does not answer."""
    async with running.client("trainer") as trainer:
        try:
            return str((await trainer.get("/status", attempts=1)).get("refused") or "")
        except VolleyError:
            return ""


async def _waiting_for(running: stack.LocalStack) -> str:
    reasons = []
    for name in running.urls:
        async with running.client(name) as client:
            try:
                await client.get("/ready", attempts=1)
            except VolleyError as error:
                reasons.append(f"{name} is not ready: {error.detail}")
    return "; ".join(reasons) or "all services are ready"


@asynccontextmanager
async def _stopping_on_signal(kill_all: Callable[[], None], say: Say) -> AsyncIterator[None]:
    """Inside, the first signal cancels the body, which then stops its services; a second one kills them without grace.

    Raises Stopped.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            say(f"{signal.Signals(number).name}: stopping all services (once more: without waiting)")
            task.cancel()
        else:
            kill_all()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        task.uncancel()
        raise Stopped(received[0]) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
