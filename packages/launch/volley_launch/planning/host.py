"""Memory of all processes of a run on a machine whose processors are its devices.

Beside its arrays, a process holds Python with its libraries, and the programs that XLA compiles for it, which grow with
the model's layers. The sizes were measured on Linux, with models of 0.1 to 494 million parameters (docs/memory.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shared.engine_schema import EngineSection
from shared.models.config import ModelConfig
from volley_launch.planning.server import ServerEstimate
from volley_launch.training.memory import MemoryEstimate

_MIB = 2**20
_TRAINER, _ENGINE, _SERVICE = 250 * _MIB, 370 * _MIB, 130 * _MIB
"""Python and the libraries of the trainer (JAX, Tunix), of an engine (JAX, sglang-jax) and of any other process."""
_COMPILER, _ENGINE_LAYER = 260 * _MIB, int(2.4 * _MIB)
"""Memory of the compiler of an engine, and of one layer of a program."""
_SHAPES = 14
"""Programs of an engine: a prefill or a decode of each size, with each number of cached tokens, that is used."""
_SPREAD = 0.08
"""Share by which the largest peaks of the trainer and of an engine exceed the usual ones.

A peak depends on which arrays meet, on when threads return freed memory, and on the code that XLA makes for a
processor. With equal arrays an engine's differed by 7 % between runs on one AMD EPYC, and by 11 % between machines.
"""
_TRAINER_COMPILER, _TRAINER_LAYER = 460 * _MIB, 30 * _MIB
"""Memory of the compiler of the trainer, and of a layer of all its programs: gradients, optimizer, scores, sums."""
_TOKEN = 1500
"""Bytes of a token of the vocabulary in a process that has the tokenizer, as measured with 151,936 tokens."""
_N_TOKENIZERS = 2  # the supervisor and the orchestrator
_REST = 64 * _MIB  # Redis, and the processes in which environments run
_SYSTEM_SHARE, _LEAST_SYSTEM = 0.04, 512 * _MIB
"""Memory left to the operating system, and to the files that it keeps in memory."""


@dataclass(frozen=True, slots=True)
class HostEstimate:
    """Bytes of the processes of a run on one machine.

    Attributes:
        trainer: its process, with its arrays at their peak.
        server: the processes of one rollout server, likewise.
        n_servers: rollout servers on the machine.
        services: all other processes of the run.
        system: left to the operating system.
        memory: of the machine.
    """

    trainer: int
    server: int
    n_servers: int
    services: int
    system: int
    memory: int

    @property
    def total(self) -> int:
        return self.trainer + self.server * self.n_servers + self.services + self.system

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def estimate(
    model: ModelConfig,
    engine: EngineSection,
    memory: int,
    training: MemoryEstimate,
    serving: ServerEstimate | None,
    n_servers: int,
) -> HostEstimate:
    """Estimate the memory of a run whose trainer, and whose rollout servers if it has some, are on one machine."""
    n_layers = model.num_hidden_layers
    programs = _COMPILER + _n_programs(engine) * n_layers * _ENGINE_LAYER
    worker = 0 if serving is None else int((1 + _SPREAD) * (_ENGINE + programs + serving.total))
    return HostEstimate(
        trainer=int((1 + _SPREAD) * (_TRAINER + _TRAINER_COMPILER + n_layers * _TRAINER_LAYER + training.peak)),
        server=0 if serving is None else worker + service_bytes(model),
        n_servers=0 if serving is None else n_servers,
        services=_N_TOKENIZERS * service_bytes(model) + _SERVICE + _REST,
        system=max(_LEAST_SYSTEM, int(memory * _SYSTEM_SHARE)),
        memory=memory,
    )


def service_bytes(model: ModelConfig) -> int:
    """Return the memory of a process of the run that has the tokenizer, and neither a trainer nor an engine."""
    return _SERVICE + _TOKEN * model.vocab_size


def _n_programs(engine: EngineSection) -> int:
    """Return the number of programs of an engine; one of them scores the probe."""
    prefills, decodes = engine.precompile_token_paddings, engine.precompile_bs_paddings
    return _SHAPES if prefills is None or decodes is None else len(prefills) + len(decodes) + 1
