"""What a start costs: from the start of a service's process to its first `/ready`, in the stack of the quickstart.

CPU seconds are those of the process and all that it started; they, unlike seconds, hardly depend on what else the
machine does. The reference is a bare Python that imports what a service of that environment is made of; with
`--against`, the same service of another checkout, with its own virtual environments, started in turn with ours. The
first start of each is not counted: it fills the caches of bytecode and of JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.cli.layout import PROJECT, python_of
from shared.errors import VolleyError
from shared.run.folder import RunFolder
from shared.services import SERVICES
from tools.bench.result import BenchResult, emit

N_STARTS = 10
_TIMEOUT_S, _POLL_S = 300.0, 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
_BARE = {
    "base": "import fastapi, numpy, pydantic, uvicorn",
    "rollout": "import fastapi, jax, numpy, pydantic, uvicorn; jax.devices()",
    "trainer": "import fastapi, jax, numpy, pydantic, uvicorn; jax.devices()",
}
_OVERRIDES = ("run.name=startup", "sft.max_steps=0", "trainer.max_steps=1", "data.n_eval_tasks=1")


@dataclass(frozen=True, slots=True)
class StartCost:
    """Of one start of one service, until it was ready."""

    cpu_s: float
    wall_s: float


type StackCosts = Mapping[str, StartCost]
"""By name of the process: env, trainer, rollout-0, orchestrator."""


def main(n_starts: int = N_STARTS, other: Path | None = None) -> None:
    """Raises VolleyError with what a stack said that did not come up."""
    checkouts = [PROJECT] if other is None else [PROJECT, other]
    starts: dict[Path, list[StackCosts]] = {checkout: [] for checkout in checkouts}
    for i in range(1 + n_starts):
        for checkout in checkouts:
            costs = start_stack(checkout)
            said = ", ".join(f"{name} {cost.cpu_s:.2f} ({cost.wall_s:.1f})" for name, cost in costs.items())
            print(f"{checkout.name} {i}: CPU s (s) to /ready: {said}", file=sys.stderr, flush=True)
            starts[checkout] += [costs] if i else []
    ours = starts[PROJECT]
    emit(summarize(ours, references(ours[0]) if other is None else medians(starts[other])))


def summarize(starts: Sequence[StackCosts], reference: StackCosts) -> dict[str, BenchResult]:
    """Medians over the starts."""
    results: dict[str, BenchResult] = {}
    for name, cost in medians(starts).items():
        results[f"startup_{name}_cpu"] = BenchResult(cost.cpu_s, "CPU s", reference[name].cpu_s)
        results[f"startup_{name}_wall"] = BenchResult(cost.wall_s, "s", reference[name].wall_s)
    return results


def medians(starts: Sequence[StackCosts]) -> dict[str, StartCost]:
    return {
        name: StartCost(
            statistics.median(costs[name].cpu_s for costs in starts),
            statistics.median(costs[name].wall_s for costs in starts),
        )
        for name in starts[0]
    }


def references(names: Sequence[str] | StackCosts) -> dict[str, StartCost]:
    """What a bare Python of each service's environment takes for its imports, a median of five."""
    kinds = {SERVICES[name.partition("-")[0]].environment for name in names}
    bare = {kind: medians([{kind: bare_start(kind)} for _ in range(5)])[kind] for kind in kinds}
    return {name: bare[SERVICES[name.partition("-")[0]].environment] for name in names}


def bare_start(environment: str) -> StartCost:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([python_of(environment), "-c", _BARE[environment]], check=True)
    wall_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return StartCost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s)


def start_stack(checkout: Path) -> StackCosts:
    """One `volley up` of the quickstart in `checkout`, ended once all its services are ready. Raises VolleyError."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "startup")
        with _supervised(checkout, Path(temporary)) as supervisor:
            deadline = time.monotonic() + _TIMEOUT_S
            costs: dict[str, StartCost] = {}
            urls = _urls(folder)
            while not urls or costs.keys() < urls.keys():
                if supervisor.poll() is not None or time.monotonic() > deadline:
                    missing = ", ".join(sorted(urls.keys() - costs.keys())) or "any service"
                    raise VolleyError(f"{checkout}: {missing} did not become ready", _tail(Path(temporary)))
                time.sleep(_POLL_S)
                urls = urls or _urls(folder)
                found = leaders(folder)
                for name, url in urls.items():
                    if name not in costs and name in found and is_ready(url):
                        costs[name] = cost_so_far(found[name])
            return costs


@contextmanager
def _supervised(checkout: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(checkout / ".venvs/base/bin/volley"), "up", "--config", "configs/quickstart.yaml"]
    variables = {name: value for name, value in os.environ.items() if name != "VOLLEY_VENVS"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, f"run.dir={folder}", *_OVERRIDES], cwd=checkout, env=variables, stdout=said, stderr=said
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _tail(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace", encoding="utf-8").strip()[-500:]


def _urls(folder: RunFolder) -> dict[str, str]:
    with contextlib.suppress(OSError, orjson.JSONDecodeError):
        return orjson.loads(folder.processes.read_bytes())["urls"]
    return {}


def leaders(folder: RunFolder) -> dict[str, int]:
    """By name, the process that each service's log belongs to: it leads a session, in which are all that it starts."""
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_stat(process)[3]) == int(process.name):
                log = Path(os.readlink(process / "fd/2"))
                if log.parent == folder.logs:
                    found[log.stem] = int(process.name)
    return found


def cost_so_far(leader: int) -> StartCost:
    """So far, of all processes in the session of `leader`, those that have ended included."""
    ticks, own = 0, _stat(Path(f"/proc/{leader}"))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = _stat(process)
            ticks += sum(map(int, stat[11:15])) if int(stat[3]) == leader else 0
    since_boot = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return StartCost(ticks / _TICKS, since_boot - int(own[19]) / _TICKS)


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, group, session, …; proc(5) counts from 1."""
    return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:  # noqa: S310 - an address of our own
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.bench.startup", description=__doc__)
    parser.add_argument("--starts", type=int, default=N_STARTS, help="of the whole stack")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, installed")
    arguments = parser.parse_args()
    main(arguments.starts, arguments.against and arguments.against.resolve())
