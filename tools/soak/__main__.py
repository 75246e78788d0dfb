"""`make soak`: run the whole stack for some minutes, and check that nothing grows.

make soak ARGS="--minutes 10 run.dir=/tmp/runs"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from redis.asyncio import Redis

from shared import config
from shared.config import LoadedConfig
from shared.errors import ConfigError, VolleyError
from shared.queue.client import command, connect
from shared.queue.scripts import Keys
from shared.run.folder import RunFolder
from tools.arguments import minutes
from tools.soak.judgement import SoakSample, judged
from tools.soak.samples import queue_usage, usage, usage_alone
from volley.commands import train
from volley.layout import PROJECT
from volley.local.preflight import check_inputs
from volley.local.signals import Stopped
from volley.local.stack import LocalStack
from volley.printing import complain, join_lines, print_result, use_json
from volley.program import run_program
from volley.reporting.progress import PlainLines, RecordTails
from volley.runs.record import claimed
from volley.runs.run_file import write_json

CONFIG = "configs/soak.yaml"
_SAMPLE_EVERY_S = 3.0
_NEWS_EVERY_S = 60.0
_SHORTEST_MINUTES = 1.0
_ENOUGH = 12


def main(argv: Sequence[str] | None = None) -> None:
    """Print the result and write it to the run's `soak.json`. Exit code 0 if nothing grows, else 1."""
    run_program(lambda: _run(_parser().parse_intermixed_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=minutes, default=30.0, metavar="M", help="length (default: 30)")
    parser.add_argument("--config", action="append", metavar="FILE.yaml", help=f"configuration (default: {CONFIG})")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the files")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Raises VolleyError."""
    length_min: float = arguments.minutes
    if length_min < _SHORTEST_MINUTES:
        raise ConfigError(
            f"--minutes {length_min:g} is too short to see anything grow", f"give {_SHORTEST_MINUTES:g} or more"
        )
    if not arguments.config:
        os.chdir(PROJECT)
    loaded = _new_run(arguments.config or [CONFIG], arguments.overrides)
    samples: list[SoakSample] = []
    check_inputs(loaded)
    with claimed(loaded, _tell) as claim:
        try:
            train.supervise(
                loaded,
                claim,
                lambda running: _soak(running, claim.folder, loaded, length_min * 60, samples),
                _tell,
                seen=PlainLines(0, _tell).service,
            )
        except Stopped as stopped:
            return stopped.exit_code
        if len(samples) < _ENOUGH:
            raise VolleyError(f"only {len(samples)} samples were taken", "soak for longer")
        result = judged(samples, loaded.config)
        write_json(claim.folder.soak, result)
    use_json(arguments.json)
    print_result(result, lambda: format_result(result))
    return 0 if result["ok"] else 1


def format_result(result: Mapping[str, Any]) -> str:
    """Result as text: one line per process, one on Redis, one per problem."""
    head = ["process", "MB start", "end", "max", "MB/hour", "99 % interval", "allowed", "fds", "threads"]
    rows = [head, *([name, *_cells(one)] for name, one in result["services"].items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    measured = (
        f"{result['steps_measured']} steps in {result['measured_minutes']:g} minutes after the warm-up,"
        f" {result['samples']} samples"
    )
    problems = [f"PROBLEM {problem}" for problem in result["problems"]]
    verdict = "nothing grows" if result["ok"] else "NOT OK"
    return join_lines(
        [lines[0], "─" * len(lines[0]), *lines[1:], _of_redis(result["redis"]), measured, *problems, verdict]
    )


def _cells(service: Mapping[str, Any]) -> list[str]:
    memory, slope = [f"{service[key]:,.0f}" for key in ("mb_start", "mb_end", "mb_max")], service["mb_per_hour"]
    fds = f"{service['fds_min']}–{service['fds_max']} {'flat' if service['fds_flat'] else 'GROW'}"
    interval, allowed = f"{slope['low']:+.1f} … {slope['high']:+.1f}", f"{service['mb_per_hour_allowed']:.0f}"
    return [*memory, f"{slope['slope']:+.1f}", interval, allowed, fds, str(service["threads_max"])]


def _of_redis(redis: Mapping[str, Any]) -> str:
    kb = {key: f"{redis[key] / 1000:,.1f} kB" for key in ("data_max", "bound", "empty", "entry")}
    bound = f"bound {kb['bound']} = {kb['empty']} + {redis['entries_bound']} groups × {kb['entry']}"
    return (
        f"redis data: {kb['data_max']} at most, {bound}; {redis['entries_max']} groups and {redis['keys_max']} keys at"
        " most"
    )


def _new_run(paths: Sequence[str], overrides: Sequence[str]) -> LoadedConfig:
    """Configuration with an unused run.name: the records of an earlier run would be measured too."""
    run = config.load(paths, overrides).config.run
    names = (run.name, *(f"{run.name}-{n}" for n in range(2, 1000)))
    unused = next(name for name in names if not (run.dir / name).exists())
    return config.load(paths, [*overrides, f"run.name={unused}"])


async def _soak(
    running: LocalStack, folder: RunFolder, loaded: LoadedConfig, length_s: float, samples: list[SoakSample]
) -> None:
    """Sample until the time is up or the run ends. Raises if the run fails."""
    quiet = PlainLines(loaded.config.trainer.max_steps, lambda _line: None)
    services = config.load([folder.config, folder.services]).config.services
    assert services.redis_url is not None
    async with (
        connect(services.redis_url, services.redis_password_file, services.tls.ca_file) as redis,
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(train.follow(running, folder, quiet, RecordTails(folder))),
            group.create_task(_sampling(running, redis, folder, length_s, samples)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _sampling(
    running: LocalStack, redis: Redis, folder: RunFolder, length_s: float, samples: list[SoakSample]
) -> None:
    """Sample from the first trained step on; write each sample to soak.jsonl."""
    keys, log = Keys(folder.name), folder.path / "soak.jsonl"
    while await _step(redis, keys) < 1:  # noqa: ASYNC110 - another process trains it; there is no event to wait for
        await asyncio.sleep(_SAMPLE_EVERY_S)
    began = reported_at = time.monotonic()
    while (now := time.monotonic()) < began + length_s:
        samples.append(await _sample(running, redis, keys, now - began))
        with log.open("ab") as file:
            file.write(orjson.dumps(asdict(samples[-1]), option=orjson.OPT_APPEND_NEWLINE))
        if now - reported_at >= _NEWS_EVERY_S:
            reported_at = now
            _tell(_news(samples[-1]))
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _sample(running: LocalStack, redis: Redis, keys: Keys, at_s: float) -> SoakSample:
    pids = {kept.name: kept.child.pid for kept in running.kept if kept.child is not None}
    services = await asyncio.to_thread(usage, pids)
    services["supervisor"] = await asyncio.to_thread(usage_alone, os.getpid())
    queue = await queue_usage(redis, keys)
    return SoakSample(at_s, await _step(redis, keys), services, queue)


async def _step(redis: Redis, keys: Keys) -> int:
    """Newest durable step. Raises QueueUnavailable."""
    return int(await command(redis, "HGET", keys.state, "version") or 0)


def _news(sample: SoakSample) -> str:
    memory = ", ".join(f"{name} {one.memory / 1e6:,.0f}" for name, one in sample.services.items())
    return f"after {sample.time / 60:.0f} minutes: step {sample.step}; MB: {memory}"


def _tell(line: str) -> None:
    complain(line)


if __name__ == "__main__":
    main()
