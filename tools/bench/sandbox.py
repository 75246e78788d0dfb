"""Cold start of a sandbox, from the fork to the answer to its first request, against a bare interpreter's; and a call.

The aim is 20 ms (median) at the tier this machine has. The environment answers one addition a turn.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

from services.env.sandbox.limits import EnvironmentProgram
from services.env.sandbox.sandbox import Sandbox
from services.env.sandbox.sandboxes import Sandboxes
from tools.bench.result import BenchResult, emit, seconds_per_call

N_STARTS, N_CALLS = 100, 1000
SOURCE = """
import random

class Adder:
    splits = {"train": 1000, "eval": 50}

    def reset(self, split, index, seed):
        rng = random.Random(f"{split}/{index}")
        self.a, self.b = rng.randrange(100), rng.randrange(100)
        return f"{self.a} + {self.b} = ?"

    def step(self, text):
        return "", float(text.strip() == str(self.a + self.b)), True, False, {}
"""
RESET = {"split": "train", "index": 0, "seed": 0}


def main() -> None:
    asyncio.run(_measured())


async def _measured() -> None:
    bare_s = seconds_per_call(lambda: subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True))
    async with Sandboxes() as sandboxes:
        tier = await sandboxes.probe()
        starts = [await _start_s(sandboxes) for _ in range(N_STARTS)]
        sandbox = await sandboxes.start(EnvironmentProgram(SOURCE))
        calls = [await _call_s(sandbox) for _ in range(N_CALLS)]
        await sandbox.close()
    p50_s, p90_s = statistics.median(starts), statistics.quantiles(starts, n=10)[-1]
    emit(
        {
            f"sandbox_start_p50_tier_{tier.level}": BenchResult(1e3 * p50_s, "ms", 1e3 * bare_s),
            f"sandbox_start_p90_tier_{tier.level}": BenchResult(1e3 * p90_s, "ms", 1e3 * bare_s),
            "sandbox_call_p50": BenchResult(1e3 * statistics.median(calls), "ms"),
        }
    )


async def _start_s(sandboxes: Sandboxes) -> float:
    started = time.perf_counter()
    sandbox = await sandboxes.start(EnvironmentProgram(SOURCE))
    await sandbox.call("reset", RESET, 30)
    took_s = time.perf_counter() - started
    await sandbox.close()
    return took_s


async def _call_s(sandbox: Sandbox) -> float:
    started = time.perf_counter()
    await sandbox.call("reset", RESET, 30)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
