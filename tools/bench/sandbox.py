"""Cold start of a sandbox, and latency of its calls.

The cold start is compared with a bare interpreter's, calls on an idle machine with calls next to looping sandboxes. A
start is measured from the fork to the first answer. The aim is 20 ms (median) at this machine's tier. The environment
answers one addition per turn.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time

from tools.bench.result import BenchResult, emit, seconds_per_call
from volley_sandbox.sandbox.limits import EnvironmentProgram, ScriptProgram
from volley_sandbox.sandbox.sandbox import Sandbox
from volley_sandbox.sandbox.sandboxes import Sandboxes

N_STARTS, N_CALLS, N_LOOPS = 100, 1000, 8
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
        beside = await _beside_loops(sandboxes, sandbox)
        await sandbox.close()
    p50_s, p90_s = statistics.median(starts), statistics.quantiles(starts, n=10)[-1]
    emit(
        {
            f"sandbox_start_p50_tier_{tier.level}": BenchResult(1e3 * p50_s, "ms", 1e3 * bare_s),
            f"sandbox_start_p90_tier_{tier.level}": BenchResult(1e3 * p90_s, "ms", 1e3 * bare_s),
            "sandbox_call_p50": BenchResult(1e3 * statistics.median(calls), "ms"),
            f"sandbox_call_p99_beside_{N_LOOPS}_loops": BenchResult(_p99_ms(beside), "ms", _p99_ms(calls)),
        }
    )


async def _beside_loops(sandboxes: Sandboxes, sandbox: Sandbox) -> list[float]:
    """Seconds of calls while other sandboxes loop."""
    loops = [await sandboxes.start(ScriptProgram()) for _ in range(N_LOOPS)]
    endless = {"source": "while True: pass", "stdin": "", "max_output": 1}
    running = [asyncio.ensure_future(loop.call("run", endless, 60)) for loop in loops]
    calls = [await _call_s(sandbox) for _ in range(N_CALLS)]
    for call, loop in zip(running, loops, strict=True):
        call.cancel()
        await loop.close()
    await asyncio.gather(*running, return_exceptions=True)
    return calls


def _p99_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.quantiles(seconds, n=100)[-1]


async def _start_s(sandboxes: Sandboxes) -> float:
    started = time.perf_counter()
    sandbox = await sandboxes.start(EnvironmentProgram(SOURCE))
    await sandbox.call("reset", RESET, 30)
    took_s = time.perf_counter() - started
    await sandbox.close()
    return took_s


async def _call_s(sandbox: Sandbox) -> float:
    """Seconds of one call, followed by a turn's pause: a model takes longer than an environment."""
    started = time.perf_counter()
    await sandbox.call("reset", RESET, 30)
    took_s = time.perf_counter() - started
    await asyncio.sleep(0.002)
    return took_s


if __name__ == "__main__":
    main()
