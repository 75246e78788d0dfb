"""Divide one GPU's memory among the processes of a local run.

Each process fills a fixed share of the memory at its start: JAX reads it from XLA_PYTHON_CLIENT_MEM_FRACTION. A rollout
server gets what its weights, their second copy, a step and its pool need. The trainer gets the rest, because its
activations are the least certain of all estimates, and a fixed division would be wrong for many runs: with all weights
trained, the trainer needs four times a server's memory; with adapters, a server needs more than the trainer.
"""

from __future__ import annotations

import math
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
_PADDED = 1.04
"""Size of a server's part, as a multiple of its need: CUDA has up to 3 % less memory (T4) than nvidia-smi reports."""
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

    A share that the user set in `environ` applies to every process. Raises ConfigError if it is invalid, or if the
    processes do not fit.
    """
    n = n_servers + n_trainers
    free = _FREE if memory is None else max(_FREE, n * _FREE_OF_PROCESS / memory)
    if (given := given_share(environ)) is not None:
        if given * n > 1 - free:
            raise ConfigError(
                f"{n} processes share one GPU, but {variable(environ)}={given:g} gives each of them {given:.0%} of it",
                f"unset it, or set at most {_floor((1 - free) / n):g}",
            )
        return GpuShares(given, given)
    if not n_trainers:
        found = GpuShares(0.0, _floor((1 - free) / n_servers))
    elif memory is None or model is None:
        found = GpuShares(_TRAINER, _floor(_SERVERS / n_servers))
    else:
        server = _of_server(config, model, memory, n_servers)
        found = GpuShares(_floor(1 - free - n_servers * server), server)
    if found.server <= 0 or (n_trainers and found.trainer <= 0):
        size = "one GPU" if memory is None else f"one GPU of {memory / 2**30:.1f} GiB"
        raise ConfigError(
            f"{n} processes do not fit on {size}: CUDA takes {_FREE_OF_PROCESS / 2**20:.0f} MiB for each,"
            " and nothing is left for " + ("the trainer" if n_trainers else "rollout servers"),
            "lower services.rollout_replicas, or use a larger GPU; if the machine has one, name it by its UUID in"
            " CUDA_VISIBLE_DEVICES",
        )
    return found


def _of_server(config: RunConfig, model: ModelConfig, memory: int, n_servers: int) -> float:
    """Return the share of each server when a trainer uses the same GPU."""
    from shared.planning.serving import of_run

    engine, sizes = config.rollout.engine, of_run(config, model, "gpu")
    asked, running = engine.max_total_tokens, engine.max_running_requests
    pool = asked or sizes.default_pool(running, engine.context_length, memory, _POOLS / n_servers)
    needed = _PADDED * sizes.needed(pool) / memory
    return _floor(min(max(needed, 0 if asked else _LEAST / n_servers), _MOST / n_servers))


def variable(environ: Mapping[str, str]) -> str:
    """Name of the variable that sets the share of memory which JAX takes: the one that is set, or the usual one."""
    return _NEWER_FRACTION if environ.get(_NEWER_FRACTION) else FRACTION


def given_share(environ: Mapping[str, str]) -> float | None:
    """Share that the environment sets for JAX, above 1 for more than the GPU has; None if it sets none.

    Raises ConfigError if JAX could not start with what is set.
    """
    name = variable(environ)
    if not (text := environ.get(name, "")):
        return None
    if name != FRACTION and environ.get(FRACTION):
        raise ConfigError(f"{name} and {FRACTION} are both set, which JAX refuses", "unset one of them")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < math.inf:
        raise ConfigError(f"{name}={text} is not a share of a GPU's memory", "unset it, or set a number such as 0.4")
    return share


def _floor(share: float) -> float:
    return math.floor(share * _STEPS) / _STEPS
