"""Run a whole stack under faults, and check the result.

A simulated run is compared with a run without faults, a real one with its replay.

Invariant: however a run ends, no process started here is left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError, DecodeError, VolleyError, WeightsError, first_error
from shared.run import commits
from shared.run.folder import RunFolder
from tools.chaos import lineage, logs
from tools.chaos import plan as plans
from tools.chaos.arena import Arena, RecoveryTimeout, open_arena
from tools.chaos.plan import Amounts, Round
from tools.chaos.proxy import Proxy
from tools.chaos.siege import SiegeLog, inject_rounds
from tools.chaos.verdict import Evidence, judge, spread
from volley.layout import PROJECT
from volley.local.supervisor import Supervision
from volley.runs.record import claimed
from volley_proof.commands import replay
from volley_proof.verify.command import verify

_SIMULATED, _REAL = PROJECT / "configs/chaos.yaml", PROJECT / "configs/chaos_real.yaml"
_DEADLINE_S, _REAL_DEADLINE_S = 180.0, 300.0
_POLL_S = 0.3
type Say = Callable[[str], None]
type Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CampaignSpec:
    """Settings of the command line.

    `minutes`: length of faults on the real stack. `folder`: parent of the runs. `save_interval_steps`: steps between
    checkpoints.
    """

    seed: int
    amounts: Amounts
    minutes: float
    folder: Path
    save_interval_steps: int = 1


@dataclass
class CampaignResult:
    """Outcome of one run; see `Evidence`."""

    folder: RunFolder
    log: SiegeLog = field(default_factory=SiegeLog)
    proof: dict[str, Any] = field(default_factory=dict[str, Any])
    links: dict[str, Proxy] = field(default_factory=dict[str, Proxy])
    supervised: Sequence[Supervision] = ()
    stuck: str | None = None
    unfinished: str | None = None

    @property
    def trouble(self) -> str | None:
        return self.stuck or self.unfinished or ("; ".join(v["detail"] for v in self.proof["violations"]) or None)


def simulated(wanted: CampaignSpec, say: Say) -> Result:
    """Make a run with the planned faults, then one without to the same step, and compare them bit by bit.

    Raises VolleyError if neither can be started.
    """
    started, rounds, name = time.monotonic(), plans.plan(wanted.seed, wanted.amounts), _name(wanted)
    planned = sum(map(len, rounds))
    say(f"{planned} faults in {len(rounds)} rounds; run {name} in {wanted.folder}")
    besieged = _run(_load(_SIMULATED, wanted, name), iter(rounds), say, simulated=True)
    unlike = _unlike_calm(wanted, besieged.folder, name, say)
    return _result(wanted, besieged, unlike, planned, time.monotonic() - started)


def _unlike_calm(wanted: CampaignSpec, besieged: RunFolder, name: str, say: Say) -> str | None:
    """Make the same steps without faults; returns the difference of the weights, or None."""
    try:
        steps = lineage.head(besieged).step
    except WeightsError as error:
        return str(error)
    say(f"the same {steps} steps without faults")
    calm = _run(_load(_SIMULATED, wanted, f"{name}-calm", f"trainer.max_steps={steps}"), None, say, simulated=True)
    return f"the run without faults: {calm.trouble}" if calm.trouble else lineage.difference(besieged, calm.folder)


def real(wanted: CampaignSpec, say: Say) -> Result:
    """Run the real stack under faults for some minutes, stop it gracefully, then replay its retained steps.

    Raises as `simulated`, or ConfigError.
    """
    if wanted.minutes <= 0:
        raise ConfigError(f"--minutes {wanted.minutes:g} leaves no time for faults", "give more than 0")
    started, name = time.monotonic(), _name(wanted)
    loaded = _load(_REAL, wanted, name)
    say(f"run {name} in {wanted.folder}, {wanted.minutes:g} minutes of faults")
    besieged = _run(loaded, _on_the_clock(wanted), say, simulated=False)
    say("replaying its last steps")
    return _result(wanted, besieged, _replayed(besieged.folder), len(besieged.log.injected), time.monotonic() - started)


def _run(loaded: LoadedConfig, rounds: Iterator[Round] | None, say: Say, *, simulated: bool) -> CampaignResult:
    """Make one run: through all rounds of faults, then stopped gracefully; without rounds, to its last step.

    Records an early end; raises only if the services cannot be started.
    """
    with claimed(loaded) as claim:
        outcome = CampaignResult(claim.folder)
        try:
            asyncio.run(_besiege(loaded, outcome, rounds, say, simulated=simulated))
        except BaseExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, VolleyError) or not outcome.log.durable:
                raise error from None
            outcome.unfinished = str(error)
        offline = verify(outcome.folder)
        live = outcome.proof
        outcome.proof = (offline if live.get("ok", True) else live) | {"redis": live.get("redis", "was not asked")}
    return outcome


async def _besiege(
    loaded: LoadedConfig, outcome: CampaignResult, rounds: Iterator[Round] | None, say: Say, *, simulated: bool
) -> None:
    deadline_s = _DEADLINE_S if simulated else _REAL_DEADLINE_S
    linked = rounds is not None
    async with open_arena(
        loaded, outcome.folder, simulated=simulated, linked=linked, deadline_s=deadline_s, say=_unheard
    ) as arena:
        outcome.log.durable, outcome.log.zombies, outcome.links = arena.durable, arena.zombies, arena.links
        outcome.supervised = arena.supervised
        try:
            if rounds is None:
                outcome.unfinished = await _finished(arena)
            else:
                await inject_rounds(arena, rounds, outcome.log, say)
        except RecoveryTimeout as error:
            outcome.stuck = error.detail
        outcome.proof = await asyncio.to_thread(verify, outcome.folder)
    disorder = {name: code for name in arena.services if (code := arena.child(name).exit_code)}
    outcome.unfinished = outcome.unfinished or (
        f"after a graceful stop, some exit codes are not 0: {disorder}" if disorder else None
    )


def _unheard(line: str) -> None:
    """Ignore the supervisor's messages; its record of ends is checked after the run."""


async def _finished(arena: Arena) -> str | None:
    """Wait for the end of the run while it makes progress. Returns the reason why it did not finish, or None."""
    seen, since = arena.newest, time.monotonic()
    while time.monotonic() - since < arena.deadline_s:
        state, reason = await arena.run_state()
        if state == "finished":
            return None
        if state == "failed":
            return reason
        if arena.newest != seen:
            seen, since = arena.newest, time.monotonic()
        await asyncio.sleep(_POLL_S)
    return f"no progress beyond {seen} in {arena.deadline_s:g} s"


def _on_the_clock(wanted: CampaignSpec) -> Iterator[Round]:
    """Yield rounds until `minutes` have passed since the first."""
    end: list[float] = []

    def in_time(_: Round) -> bool:
        end[:] = end or [time.monotonic() + 60 * wanted.minutes]
        return time.monotonic() < end[0]

    return itertools.takewhile(in_time, plans.endless(wanted.seed))


def _replayed(folder: RunFolder) -> str | None:
    """Difference when the archived steps after the oldest retained checkpoint are trained again, or None."""
    try:
        result = replay.replayed(folder, ["--from-step", str(min(lineage.retained_steps(folder)))], None, show=False)
    except VolleyError as error:  # also if the newest checkpoint is damaged
        return f"the replay failed: {error}"
    return None if result["ok"] else replay.format_result(result)


def _load(path: Path, wanted: CampaignSpec, name: str, *more: str) -> LoadedConfig:
    """Load the project's configuration. Only `--dir` counts from the working directory."""
    interval = f"trainer.checkpointing_options.save_interval_steps={wanted.save_interval_steps}"
    loaded = config.load([path], [f"run.name={name}", f"run.seed={wanted.seed}", interval, *more])
    return config.rooted(config.changed(loaded, {"run.dir": str(wanted.folder.absolute())}), PROJECT)


def _name(wanted: CampaignSpec) -> str:
    return f"chaos-{wanted.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _result(wanted: CampaignSpec, run: CampaignResult, unlike: str | None, planned: int, elapsed_s: float) -> Result:
    log = run.log
    skipped = 0 if run.stuck or run.unfinished else planned - log.recovered
    crashed = [*logs.crashes(run.folder.logs), *logs.deaths(end for one in run.supervised for end in one.ends)]
    idle = [name for name, link in run.links.items() if not link.n_bytes]
    broken = judge(
        Evidence(run.unfinished, run.stuck, skipped, len(log.injected), crashed, idle, run.proof, log.zombies, unlike)
    )
    return {
        "ok": not broken,
        "seed": wanted.seed,
        "steps": max((version.step for version in commits.committed(run.folder)), default=0),
        "elapsed_sec": round(elapsed_s, 1),
        "faults": dict(sorted(plans.counts(log.faults).items())),
        "kills": dict(sorted(plans.kills(log.faults).items())),
        "recovered": log.recovered,
        "retried_episodes": _retried(run.folder),
        "links": {name: {"connections": link.n_connections, "bytes": link.n_bytes} for name, link in run.links.items()},
        "lost": run.proof["lost"],
        "doubly_trained": run.proof["doubly_trained"],
        "bit_identical": unlike is None,
        "recovery_sec": spread(log.recoveries()),
        "violations": [asdict(one) for one in broken],
        "machine": _machine(),
        "run": str(run.folder.path),
    }


def _retried(folder: RunFolder) -> int:
    """Number of retried episodes; 0 for a damaged folder, which the proof reports."""
    try:
        return lineage.retried_episodes(folder)
    except (WeightsError, DecodeError):
        return 0


def _machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {platform.system()} {platform.release()}"
