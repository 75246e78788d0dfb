"""Removes entries of a run's folder and of its Redis, while the run goes on and before it is continued.

The engine and the trainer's model are simulated. After a removal the run must go on, or end or wait and name what is
missing; no service may crash, and `verify` must prove the rest or name what is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shared import config
from shared.config import LoadedConfig
from shared.errors import VolleyError, first_error
from shared.run.folder import RunFolder
from tools.chaos import logs
from tools.chaos.arena import Arena, RecoveryTimeout, open_arena
from volley.layout import PROJECT
from volley.local.supervisor import RestartPolicy
from volley.runs.record import claimed, stored
from volley_proof.verify.command import verify

NAME = "small"
_STEPS = 3
_DEADLINE_S = 180.0
"""Long: on a loaded machine a trainer takes a minute to start."""
_PATIENCE = RestartPolicy(restarts=10, window_s=5.0, pause_s=0.1, longest_pause_s=0.1, hung_s=120.0)
"""Losses follow each other fast, and each ends the trainer; ten ends in 5 s of service are a loop of crashes."""
_NUMBERS = re.compile(r"[0-9a-f]{8,}|\d+")
_EVIDENCE = ("archive", "checkpoints", "ledger.jsonl", "metrics.jsonl", "run.json", "config.yaml")
"""What `verify` may miss afterwards."""
OVERRIDES = (
    f"run.name={NAME}",
    "trainer.checkpointing_options.save_interval_steps=2",
    "services.rollout_replicas=1",
    "services.limits.grace_s=3",
)


@dataclass
class Outcomes:
    """`went_on`: how often the run went on; `ended`: its last words by what was removed; `wrong`: what must not be."""

    went_on: list[str] = field(default_factory=list[str])
    ended: dict[str, str] = field(default_factory=dict[str, str])
    wrong: list[str] = field(default_factory=list[str])


def make(folder: Path) -> RunFolder:
    """A run of some steps, stopped in order."""

    async def steps(arena: Arena) -> None:
        await arena.until_step(7, "the run made no steps")

    _session(
        config.rooted(config.load([PROJECT / "configs/chaos.yaml"], [*OVERRIDES, f"run.dir={folder}"]), PROJECT), steps
    )
    return RunFolder(folder / NAME)


def before_up(pristine: RunFolder, lane: Path, names: list[str] | None = None) -> Outcomes:
    """Each entry is removed from a copy of the run, which is then continued."""
    found = Outcomes()
    for name in names or [name for _, name in entries(pristine.path)]:
        run = _copy(pristine, lane)
        remove(run.path / name)
        _attempt(found, run, name, further)
        _judge(found, run, [name])
    return found


def while_it_runs(pristine: RunFolder, lane: Path) -> Outcomes:
    """Each entry is removed from a run that goes on; then every service is killed. A run that ends is replaced."""
    found, done = Outcomes(), set[tuple[str, int]]()
    while True:
        run, removed, n_done = _copy(pristine, lane), list[str](), len(done)

        async def each(arena: Arena, run: RunFolder = run, removed: list[str] = removed) -> None:
            await further(arena)
            while (new := next((one for one in entries(run.path) if _kind(one) not in done), None)) is not None:
                done.add(_kind(new))
                removed.append(new[1])
                remove(run.path / new[1])
                await further(arena)
                kill_all(arena)
                await back(arena)
                found.went_on.append(new[1])

        _attempt(found, run, removed, each)
        _judge(found, run, removed)
        if len(done) == n_done:
            return found


def _kind(entry: tuple[int, str]) -> tuple[str, int]:
    return _NUMBERS.sub("#", entry[1]), entry[0]


def entries(folder: Path) -> Iterator[tuple[int, str]]:
    """Files and folders below `folder`, relative to it; of those that differ in numbers only the first (0) and the
    last (1).
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not name.endswith(".tmp"):
            found.setdefault(_NUMBERS.sub("#", name), []).append(name)
    for kind in sorted(found):
        yield from enumerate(dict.fromkeys((found[kind][0], found[kind][-1])))


def remove(path: Path) -> None:
    """At once: a service that writes meanwhile finds all of it or nothing."""
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=_outside(path)) as away:
        path.rename(Path(away) / "removed")


def _outside(path: Path) -> Path:
    """A folder of the same file system that is not the run's."""
    return next(parent.parent for parent in path.parents if parent.name == NAME)


async def further(arena: Arena) -> None:
    """Until some more steps are durable. Raises RecoveryTimeout with what the trainer and the run wait for."""
    seen = max(1, len(arena.durable))
    try:
        await arena.until(lambda: len(arena.durable) >= seen + _STEPS, "no further step")
    except RecoveryTimeout as error:
        raise RecoveryTimeout(f"{error.detail}: {await arena.run_state()}, {await arena.trainer_waits()}") from None


async def back(arena: Arena) -> None:
    for name in arena.services:
        await arena.until_ready(name)
    await further(arena)


def kill_all(arena: Arena, but: Sequence[str] = ()) -> None:
    """SIGKILL to every service, but those named."""
    for name in arena.services:
        if name not in but and arena.child(name).exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(arena.child(name).pid, signal.SIGKILL)


@asynccontextmanager
async def running(loaded: LoadedConfig) -> AsyncIterator[Arena]:
    with claimed(loaded, say=lambda _: None) as claim:
        async with open_arena(
            loaded,
            claim.folder,
            simulated=True,
            linked=False,
            deadline_s=_DEADLINE_S,
            say=lambda _: None,
            patience=_PATIENCE,
        ) as arena:
            yield arena


def _session(loaded: LoadedConfig, work: Callable[[Arena], Awaitable[None]]) -> None:
    async def session() -> None:
        async with running(loaded) as arena:
            await work(arena)

    try:
        asyncio.run(session())
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def _attempt(
    found: Outcomes, run: RunFolder, removed: str | list[str], work: Callable[[Arena], Awaitable[None]]
) -> None:
    try:
        _session(stored(run.path)[0], work)
    except VolleyError as error:
        last = removed if isinstance(removed, str) else removed[-1]
        if not _names(str(error), last):
            found.wrong.append(f"{last}: {type(error).__name__}: {error}")
        found.ended[last] = str(error)
    else:
        found.went_on += [removed] if isinstance(removed, str) else []


def _names(text: str, removed: str) -> bool:
    """Whether an error tells what is missing: its path, or of a checkpoint that there is none."""
    return removed in text or (removed.startswith("checkpoints") and "checkpoint" in text)


def _judge(found: Outcomes, run: RunFolder, removed: list[str]) -> None:
    """No service has crashed, and the folder is proven, as far as its evidence is there."""
    found.wrong += [f"{removed[-1:]}: {line}" for line in logs.crashes(run.logs)]
    with contextlib.suppress(VolleyError):  # it names what it cannot read
        proof = verify(run)
        if not proof["ok"] and not any(name.startswith(_EVIDENCE) for name in removed):
            found.wrong.append(f"{removed[-1:]}: {proof['violations']}")


def _copy(pristine: RunFolder, lane: Path) -> RunFolder:
    """Without the ports of the first session, which somebody else may have by now."""
    shutil.rmtree(lane, ignore_errors=True)
    run = RunFolder(lane / NAME)
    shutil.copytree(pristine.path, run.path, symlinks=True)
    for path in (run.processes, run.redis / "redis.conf"):
        path.unlink(missing_ok=True)
    return run
