"""`volley train` and `volley up`: start every service, show progress and print a report.

Every process started here is ended when the run finishes, when a service fails, and after Ctrl-C, SIGTERM, a second
Ctrl-C or kill -9.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from shared import config, packages
from shared.config import LoadedConfig
from shared.errors import ConfigError, VolleyError, first_error
from shared.findings import findings
from shared.run import commits
from shared.run.folder import RunFolder
from shared.run.pinned import MAX_STEPS
from shared.visible import quoted
from volley import choices, own_data
from volley.local import stack
from volley.local.preflight import check_ports, notes_on_model, prepared
from volley.local.processes import Reaper
from volley.local.sidecars import sidecars
from volley.local.signals import Stopped, stopping_on_signal
from volley.local.supervisor import RestartPolicy, Say, Seen, ServiceFailed, ServiceState, unseen
from volley.printing import keep_lost_in
from volley.printing import print_lines as say
from volley.proof import prove as prove_folder
from volley.reporting.display import shown
from volley.reporting.progress import Activity, ProgressDisplay, RecordTails, print_text
from volley.reporting.supervised import supervised_runs
from volley.reports import reports
from volley.runs.answers import fetch_status
from volley.runs.elapsed import counting
from volley.runs.record import RunClaim, claimed, mark_finished, stored
from volley.runs.run_file import RunRecord, read_record

_POLL_S = 0.3
_GOING = ("running", "evaluating", "finished")
_SAVED = ("done", "refused")
"""Phases of a trainer that has written its last checkpoint."""


type Work = Callable[[stack.LocalStack], Awaitable[None]]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="configuration of a run to start or continue; repeatable, later files win",
    )
    parser.add_argument(
        "rest",
        nargs="*",
        metavar="MODEL | RUN_DIR | key.path=value",
        help="model to train (with --data or --env), or folder of a run to continue; settings that override the files",
    )
    own_data.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError if neither a run's folder nor a configuration is given, and as `main`."""
    if (loaded := own_data.configured(arguments, arguments.rest)) is not None:
        return start_or_continue(config.rooted(loaded, Path.cwd()), stack.REAL)
    if arguments.config:
        return main(arguments.config, arguments.rest)
    if not arguments.rest or "=" in Path(arguments.rest[0]).name:
        raise ConfigError(
            "neither a run's folder nor --config is given",
            "run `volley train MODEL --data FILE --reward FILE.py`, `volley train MODEL --env FILE`,"
            " `volley train --config FILE.yaml`, or `volley up RUN_DIR`",
        )
    return resume(Path(arguments.rest[0]), arguments.rest[1:])


def main(
    paths: Sequence[str], overrides: Sequence[str], seams: stack.StackSeams = stack.REAL, *, prove: bool = False
) -> int:
    """Start or continue the run of a configuration. Raises VolleyError; otherwise returns the exit code.

    Paths relative to the working directory are stored absolute. With `prove` the finished run is verified, which reads
    all its checkpoints.
    """
    return start_or_continue(config.rooted(config.load(paths, overrides), Path.cwd()), seams, prove=prove)


def resume(run_dir: Path, overrides: Sequence[str], seams: stack.StackSeams = stack.REAL) -> int:
    """Continue the run in this folder, or report it if it is finished. Raises as `main`."""
    loaded, record = stored(run_dir, overrides)
    if record.finished and not overrides:
        config = loaded.config
        if config.is_supervised:
            say(f"run {config.run.name} is finished")
            return supervised_runs().report(RunFolder(run_dir.absolute()))
        more = f"`volley up {quoted(run_dir)} {MAX_STEPS}=N`, N above {config.trainer.max_steps}, continues it"
        say(f"run {config.run.name} is finished; {more}")
        return reports().main(run_dir)
    return start_or_continue(loaded, seams)


def start_or_continue(loaded: LoadedConfig, seams: stack.StackSeams, *, prove: bool = False) -> int:
    """Start or continue the run of this configuration, of any mode. Raises as `main`.

    If standard output closes meanwhile, the run goes on, and logs/volley.log gets its lines.
    """
    loaded, model = prepared(loaded)
    if seams.place is None:
        check_ports(loaded)
    supervised = loaded.config.is_supervised
    watch = supervised_runs().follow if supervised else follow
    with claimed(loaded, may_clear=seams.place is None) as claim:
        choices.record(loaded, claim.folder)
        keep_lost_in(claim.folder.logs / "volley.log")
        folder, max_steps = claim.folder, 0 if supervised else loaded.config.trainer.max_steps
        tails, started = RecordTails(folder), dict[str, ServiceState]()
        again = "Starting it again on all hosts" if seams.place else f"`volley up {quoted(folder.path)}`"
        try:
            with sidecars(folder, loaded.config), shown(max_steps) as display:

                def seen(name: str, state: ServiceState) -> None:
                    started[name] = state
                    display.service(name, state)

                for line in choices.lines(loaded):
                    display.say(f"chosen: {line}")
                for finding in [*loaded.notes, *findings(loaded.config), *notes_on_model(loaded, model)]:
                    display.say(f"note: {finding}")

                async def work(running: stack.LocalStack) -> None:
                    await watch(running, folder, display, tails)
                    if seams.place:
                        await asyncio.sleep(seams.place.linger_s)

                record = supervise(loaded, claim, work, display.say, seams, seen)
        except Stopped as stopped:
            print_text(_interrupted(f"stopped by {stopped}", folder, max_steps, started, again))
            return stopped.exit_code
        except VolleyError:
            if commits.newest(folder) is not None:  # else there is nothing to continue from
                print_text(_interrupted("ended early", folder, max_steps, started, again))
            raise
        if supervised:
            mark_finished(folder, record)
            return supervised_runs().report(folder)
        return finish(folder, record, prove=prove)


def _interrupted(how: str, folder: RunFolder, max_steps: int, started: Mapping[str, ServiceState], again: str) -> str:
    """Sentence for a run that ended early: its services, its last step, and the command that continues it."""
    head = commits.newest(folder)
    names = [name for name, state in started.items() if state != "pending"]
    ended = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} ended" if names else "nothing had been started"
    last = f" of {max_steps}" if max_steps else ""
    where = f"from step {head.step}{last}" if head else "from its start"
    return f"{how}; {ended}. {again} continues run {folder.name} {where}."


def supervise(
    loaded: LoadedConfig,
    claim: RunClaim,
    work: Work,
    say: Say,
    seams: stack.StackSeams = stack.REAL,
    seen: Seen = unseen,
) -> RunRecord:
    """Run all services for as long as `work` takes. Returns the record with the elapsed time added.

    The time is recorded even if this process is killed. Raises Stopped after a signal, or VolleyError; every process
    it started has ended by then.
    """
    with counting(claim.folder, claim.record) as worked:
        try:
            asyncio.run(_supervised(loaded, claim, work, say, seams, seen))
        except BaseExceptionGroup as group:
            error = first_error(group)
            worked.failed = error.detail if isinstance(error, VolleyError) else None
            raise error from None
        except VolleyError as error:
            worked.failed = error.detail
            raise
    return worked.record()


def fresh_name(paths: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Add a run.name that no finished run has, unless the user gave a name."""
    if any(override.startswith("run.name=") for override in overrides):
        return list(overrides)
    return [*overrides, f"run.name={freshly_named(config.load(paths, overrides)).config.run.name}"]


def freshly_named(loaded: LoadedConfig) -> LoadedConfig:
    """Set a run.name that no finished run has: its own, or one with a number."""
    run = loaded.config.run
    names = [run.name, *(f"{run.name}-{n}" for n in range(2, 1000))]
    unfinished = (name for name in names if not is_finished(RunFolder(run.dir / name)))
    return config.changed(loaded, {"run.name": next(unfinished)})


def is_finished(folder: RunFolder) -> bool:
    """Return True if the folder holds a finished run."""
    record = read_record(folder)
    return record is not None and record.finished


def finish(folder: RunFolder, record: RunRecord, *, prove: bool = False) -> int:
    """Report a finished run. Returns the exit code: 1 if `prove` is set and verification fails."""
    mark_finished(folder, record)
    summary = reports().make(folder)
    proof = prove_folder(folder.path) if prove else None
    reports().conclude(folder, summary, proof)
    if proof is not None and not proof.result["ok"]:
        return 1
    head = commits.newest(folder)
    say(f"DONE: steps={head.step if head else 0} elapsed_sec={record.elapsed_s:.1f}")
    return 0


async def _supervised(
    loaded: LoadedConfig, claim: RunClaim, work: Work, say: Say, seams: stack.StackSeams, seen: Seen
) -> None:
    """Raises Stopped, VolleyError, or a group of them."""
    folder = claim.folder
    say(f"run {folder.name} in {folder.path}: starting services (logs in {folder.logs})")
    with Reaper.running(holds=[claim.lock]) as reaper:
        async with (
            stopping_on_signal(
                lambda name: say(f"{name}: stopping all services (once more: without waiting)"), reaper.kill_all
            ),
            stack.running(loaded, folder, reaper, say, RestartPolicy(), seams, seen) as running,
        ):
            await work(running)


async def follow(running: stack.LocalStack, folder: RunFolder, display: ProgressDisplay, tails: RecordTails) -> None:
    """Show progress until the run is finished and its last checkpoint written.

    Raises ServiceFailed if the orchestrator reports a failure.
    """
    news, plan = time.monotonic(), ""
    async with running.client("orchestrator") as orchestrator, running.client("trainer") as trainer:
        while True:
            run = await fetch_status(orchestrator, f"/runs/{folder.name}")
            if display.detailed or not plan:
                trainer_status = await fetch_status(trainer, "/status")
                display.activity(Activity(run, trainer_status))
                if not plan and (plan := str(trainer_status.get("plan") or "")):
                    display.say(f"plan: {plan}")
            state, reason = str(run.get("state", "unknown")), str(run.get("reason") or "")
            for kind, record in tails.new():
                display.record(kind, record)
                news = time.monotonic()
            if state == "finished" and (await fetch_status(trainer, "/status")).get("phase") in _SAVED:
                return
            if state not in _GOING and (refused := await _refused(running)):
                raise ServiceFailed(f"run {folder.name} has stopped: {refused}")
            if state == "failed" and not run.get(
                "refused"
            ):  # else the trainer has refused a step, or is to begin again
                raise ServiceFailed(f"run {folder.name} failed: {reason}", f"logs: {folder.logs}")
            if time.monotonic() - news > display.quiet_s:
                display.quiet(await _waiting(running, state))
                news = time.monotonic()
            await asyncio.sleep(_POLL_S)


async def _refused(running: stack.LocalStack) -> str:
    """Reason why the trainer stopped training; empty if it is training or does not answer."""
    async with running.client("trainer") as trainer:
        try:
            return str((await trainer.get("/status", attempts=1)).get("refused") or "")
        except VolleyError:
            return ""


async def _waiting(running: stack.LocalStack, state: str) -> str:
    """State of the run, and what waits for what, if a package finds that out."""
    waits = packages.part("diagnosis.waits", required=False)
    if waits is None:
        return f"the run is {state}"
    return await waits({name: running.client(name) for name in running.urls}, state)
