"""Memory of loss and gradient at a vocabulary of 32,768 and 1,024 positions: ours against Tunix's own GRPO loss, on the
same model and as many rows: as it is, and with its blocks rematerialized (`model.remat=block`).

Each runs in a process of its own. `compiled` is what XLA plans beside the parameters: temporaries and the gradient;
`measured` is how far the process's resident memory rises while it runs.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orjson

from services.trainer.learner.scoring import objective, params_of
from services.trainer.models.family import Model
from tools.bench import trainer
from tools.bench.result import BenchResult, emit

N_ROWS, LENGTH, VOCABULARY = 4, 1024, 32_768
_MODEL = dataclasses.replace(trainer.MODEL, vocab_size=VOCABULARY)
_MB = 1e6


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        whose, remat = sys.argv[2:]
        model = trainer.make_model(_MODEL, remat)  # type: ignore[arg-type]
        sys.stdout.write(orjson.dumps(_measured(*_MADE[whose](model))).decode() + "\n")
        return
    found: dict[str, BenchResult] = {}
    for remat in ("none", "block"):
        ours, theirs = (_of_process(whose, remat) for whose in ("ours", "tunix"))
        for what in ("compiled", "measured"):
            found[f"loss_memory_{what}_remat_{remat}"] = BenchResult(ours[what] / _MB, "MB", theirs[what] / _MB)
    emit(found)


def _of_process(whose: str, remat: str) -> dict[str, float]:
    """Large blocks go back to the system when they are freed, so that what was used before is not mistaken for free."""
    command = [sys.executable, "-m", "tools.bench.memory", "measure", whose, remat]
    made = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    done = subprocess.run(command, env=made, check=True, stdout=subprocess.PIPE)
    return orjson.loads(done.stdout.splitlines()[-1])


def _ours(model: Model) -> tuple[Callable[..., Any], Any, Any]:
    batch = trainer.make_batch(np.random.default_rng(0), N_ROWS, LENGTH)
    return jax.value_and_grad(objective(model, trainer.LOSS, 1.0), has_aux=True), params_of(model), batch


def _tunix(model: Model) -> tuple[Callable[..., Any], Any, Any]:
    from tools.bench.tunix_learner import Lengths, loss_and_gradient

    lengths = Lengths(LENGTH // 4, LENGTH - LENGTH // 4)
    return loss_and_gradient(model, N_ROWS, lengths, trainer.MODEL.vocab_size)


_MADE = {"ours": _ours, "tunix": _tunix}


def _measured(step: Callable[..., Any], params: Any, batch: Any) -> dict[str, float]:
    """Bytes."""
    compiled = jax.jit(step).lower(params, batch).compile()
    plan = compiled.memory_analysis()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    jax.block_until_ready(compiled(params, batch))
    return {
        "compiled": plan.temp_size_in_bytes + plan.output_size_in_bytes,
        "measured": _memory("VmHWM") - before,
    }


def _memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
