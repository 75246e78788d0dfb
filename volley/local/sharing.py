"""Divide one GPU's memory among the processes of a local run.

Each process fills a fixed share of the memory at its start: JAX reads it from XLA_PYTHON_CLIENT_MEM_FRACTION. A rollout
server gets what its weights, their second copy, a step and its pool need. The trainer gets the rest, because its
activations are the least certain of all estimates, and a fixed division would be wrong for many runs: with all weights
trained, the trainer needs four times a server's memory; with adapters, a server needs more than the trainer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import ConfigError
from shared.schema import RunConfig

if TYPE_CHECKING:
    from shared.models.config import ModelConfig

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEWER_FRACTION = "XLA_CLIENT_MEM_FRACTION"  # JAX refuses both together
_FREE = 0.08
_FREE_OF_PROCESS = 768 * 2**20
"""Memory outside JAX's pools, of the GPU and of each process at least: CUDA's context, kernels, handles of cuDNN."""
_POOLS = 0.15
"""Share of the GPU that the default pools of all servers take at most together."""
_LEAST, _MOST = 0.2, 0.75
"""Shares of the GPU that servers with default pools take at least, and that all servers take at most, together."""
_PADDED = 1.02
"""Size of a server's part, as a multiple of its need: CUDA reports up to 1 % less memory than nvidia-smi."""
_TRAINER, _SERVERS = 0.6, 0.3
"""Shares of the trainer and of all servers together, if the GPU's memory or the model is not known."""
_STEPS = 10_000  # to which shares are rounded down


@dataclass(frozen=True, slots=True)
class GpuShares:
    """Shares of the GPU's memory: the trainer's and each server's."""

    trainer: float
    server: float


def is_shared(config: RunConfig, n_gpus: int, n_servers: int, n_trainers: int) -> bool:
    """Return whether the processes share a GPU: there is one GPU, and each of several processes needs one."""
    has_mesh = n_trainers > 0 and config.trainer.mesh.n_devices > 1
    one_each = config.rollout.engine.tp_size == 1 and n_trainers <= 1 and not has_mesh
    return n_gpus == 1 and one_each and n_servers > 0 and n_servers + n_trainers > 1


def divide(
    config: RunConfig,
    model: ModelConfig | None,
    memory: int | None,
    n_servers: int,
    n_trainers: int,
    environ: Mapping[str, str],
) -> GpuShares:
    """Choose the shares of a GPU with `memory` bytes.

    A share that the user set in `environ` is that of every process. Raises ConfigError if so many do not fit.
    """
    n = n_servers + n_trainers
    free = _FREE if memory is None else max(_FREE, n * _FREE_OF_PROCESS / memory)
    if (given := given_share(environ)) is not None:
        if given * n > 1 - free:
            raise ConfigError(
                f"{n} processes share one GPU, and {variable(environ)}={given:g} gives each of them {given:.0%} of it",
                f"unset it, or set at most {_floor((1 - free) / n):g}",
            )
        return GpuShares(given, given)
    if memory is None or model is None:
        return GpuShares(_TRAINER, _floor((_SERVERS if n_trainers else 1 - free) / max(1, n_servers)))
    if not n_trainers:
        return GpuShares(0.0, _floor((1 - free) / n_servers))
    from shared.planning.serving import of_run

    engine, sizes = config.rollout.engine, of_run(config, model, "gpu")
    asked, running = engine.max_total_tokens, engine.max_running_requests
    pool = asked or sizes.default_pool(running, engine.context_length, memory, _POOLS / n_servers)
    needed = _PADDED * sizes.needed(pool) / memory
    server = _floor(min(max(needed, 0 if asked else _LEAST / n_servers), _MOST / n_servers))
    return GpuShares(_floor(1 - free - n_servers * server), server)


def variable(environ: Mapping[str, str]) -> str:
    """Name of the variable that sets the share of memory which JAX takes: the one that is set, or the usual one."""
    return _NEWER_FRACTION if environ.get(_NEWER_FRACTION) else FRACTION


def given_share(environ: Mapping[str, str]) -> float | None:
    """Share that the environment sets for JAX, above 1 for more than the GPU has; None if it sets no valid one."""
    text = environ.get(variable(environ), "").strip()
    return float(text) or None if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else None


def _floor(share: float) -> float:
    return math.floor(share * _STEPS) / _STEPS
