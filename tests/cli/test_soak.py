"""What a soak measures, and when it says that something grows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from redis.asyncio import Redis

from shared.config import load
from shared.queue.scripts import Keys
from shared.schema import RunConfig
from tests.support.redis import redis, redis_server  # noqa: F401
from tools.soak.__main__ import format_result
from tools.soak.judgement import SoakSample, judged
from tools.soak.samples import ProcessUsage, QueueUsage, queue_usage, usage
from tools.soak.trend import trend

CONFIG: RunConfig = load(["configs/soak.yaml"]).config
QUIET = QueueUsage(used=2_050_000, clients=10_000, stream=40_000, n_entries=4, n_keys=7)


def samples(
    service: Callable[[float], ProcessUsage], queue: Callable[[float], QueueUsage] = lambda _: QUIET
) -> list[SoakSample]:
    """Half an hour, every three seconds, a step every two; what a service and the queue hold by the time in hours."""
    return [SoakSample(3.0 * i, i * 3 // 2, {"env": service(i / 1200)}, queue(i / 1200)) for i in range(600)]


def steady(hour: float) -> ProcessUsage:
    return ProcessUsage(pid=1, memory=int(100e6 + 5e6 * np.sin(hour * 2000)), fds=20 + int(hour * 1000) % 3, threads=4)


def problems(service: Callable[[float], ProcessUsage], queue: Callable[[float], QueueUsage] = lambda _: QUIET) -> str:
    result = judged(samples(service, queue), CONFIG)
    assert result["ok"] == (not result["problems"])
    assert all(problem in format_result(result) for problem in result["problems"])
    return "; ".join(result["problems"])


def test_a_steady_run_has_no_problem() -> None:
    assert problems(steady) == ""
    result = judged(samples(steady), CONFIG)
    assert (result["minutes"], result["measured_minutes"]) == (29.95, 19.95)
    assert "nothing grows" in format_result(result)


def test_what_grows_during_the_warm_up_only_is_no_problem() -> None:
    assert problems(lambda hour: ProcessUsage(1, int(min(hour, 0.1) * 3e9), int(min(hour, 0.1) * 1000), 4)) == ""


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (
            lambda hour: ProcessUsage(1, int(steady(hour).memory + 40e6 * hour), 20, 4),
            "env: memory grows by 40 MB an hour",
        ),
        (
            lambda hour: ProcessUsage(1, steady(hour).memory, steady(hour).fds + int(30 * hour), 4),
            "env: file descriptors grow by",
        ),
        (lambda hour: ProcessUsage(1 + (hour > 0.3), steady(hour).memory, 20, 4), "env: restarted 1 times"),
    ],
)
def test_what_grows_or_falls_over_is_named(leak: Callable[[float], ProcessUsage], named: str) -> None:
    assert named in problems(leak)


@pytest.mark.parametrize(
    ("queue", "named"),
    [
        (lambda hour: QueueUsage(2_050_000 + int(1e6 * hour), 10_000, 40_000, 4, 7), "redis: 2.5"),
        (lambda hour: QueueUsage(2_140_000, 10_000, 130_000, 13, 7), "the stream held 13 groups, more than 12"),
    ],
)
def test_a_queue_above_its_bound_is_named(queue: Callable[[float], QueueUsage], named: str) -> None:
    assert named in problems(steady, queue)


def test_a_queue_that_is_full_is_within_its_bound() -> None:
    assert (
        problems(
            steady,
            lambda hour: QueueUsage(2_010_000 + 10_000 * 12, 10_000, 10_000 * 12, 12, 7) if hour > 0.3 else QUIET,
        )
        == ""
    )


def test_a_run_without_steps_is_a_problem() -> None:
    still = [SoakSample(one.time, 5, one.services, one.queue) for one in samples(steady)]
    assert judged(still, CONFIG)["problems"] == ["no step was trained after the warm-up"]


def test_what_tensorstore_keeps_of_checkpoints_is_allowed_where_they_are_written() -> None:
    """Half an hour of 899 steps: 0.08 MB a step are 144 MB an hour."""

    def kept(hour: float) -> ProcessUsage:
        return ProcessUsage(1, int(steady(hour).memory + 144e6 * hour), 20, 4)

    named = [
        SoakSample(one.time, one.step, {"trainer": one.services["env"], "env": one.services["env"]}, one.queue)
        for one in samples(kept)
    ]
    assert judged(named, CONFIG)["problems"] == ["env: memory grows by 144 MB an hour, 20 are allowed"]


def test_the_slope_does_not_see_outliers() -> None:
    times = np.arange(40.0)
    values = 3 * times + 7
    values[::7] += 500
    assert trend(times.tolist(), values.tolist()).slope == pytest.approx(3, abs=0.5)


def test_the_interval_holds_the_slope_in_99_of_100_cases() -> None:
    rng, times = np.random.default_rng(0), np.arange(20.0)
    found = [trend(times.tolist(), (0.5 * times + rng.normal(0, 1, 20)).tolist()) for _ in range(500)]
    assert sum(one.low <= 0.5 <= one.high for one in found) >= 485
    assert np.mean([one.high - one.low for one in found]) < 0.4


HOLDS = """
import subprocess, sys, time
held = [open(__file__ if "__file__" in globals() else sys.executable) for _ in range(25)]
memory = bytearray(60_000_000)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, "-c", sys.stdin.read(), "leaf"])
print(flush=True)
time.sleep(100)
"""


@pytest.fixture
def family() -> Iterator[int]:
    """A process with a child; each holds 25 files and 60 MB."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HOLDS)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.readline()
        yield process.pid
        subprocess.run(["pkill", "-P", str(process.pid)], check=False)
        process.kill()


def test_a_process_is_measured_with_its_children(family: int) -> None:
    found = usage({"one": family, "gone": 2**22 - 1})
    assert found.keys() == {"one"}
    assert 120e6 < found["one"].memory < 200e6
    assert found["one"].fds >= 50
    assert found["one"].threads == 2


async def test_the_queue_is_measured(redis: Redis) -> None:  # noqa: F811
    keys = Keys("r")
    empty = await queue_usage(redis, keys)
    for _ in range(10):
        await redis.xadd(keys.stream, {"d": b"x" * 50_000})
    full = await queue_usage(redis, keys)
    assert (empty.n_entries, empty.stream, empty.n_keys) == (0, 0, 0)
    assert (full.n_entries, full.n_keys) == (10, 1)
    assert 500_000 < full.stream < 700_000
    assert full.used - full.clients - full.stream == pytest.approx(empty.used - empty.clients, abs=300_000)
