"""Memory of training on each device: parts that follow from the shapes of parameters, and the peak of each phase.

`trainer` adds the activations of `activations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.models import adapter
from shared.models.names import is_of_attention
from shared.models.parameters import ParameterShape, Shapes
from shared.planning.serving import ITEM_SIZES

_MOMENTS = 2  # of AdamW
_FLOAT32 = 4
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """Settings of training that determine which arrays exist.

    Args:
        mesh: size of each axis.
        dtype: of the base of adapters.
        published_dtype: of published parameters.
        adapts: trains adapters of a fixed base.
        reference: has a reference model; with adapters it is the base.
        offload_reference: keeps it in host memory between its passes.
        has_critic: trains a critic of the model's size.
        trains_attention: the critic's attention is trained, too.
        n_micro: micro-batches of a step.
        may_branch: an episode may have several sequences.
        on_host: the devices are this host's processors.
        keeps_former: the weights before the newest step are kept, for spot checks of servers.
    """

    mesh: Mapping[str, int]
    dtype: str
    published_dtype: str
    adapts: bool = False
    reference: bool = False
    offload_reference: bool = False
    has_critic: bool = False
    trains_attention: bool = True
    n_micro: int = 1
    may_branch: bool = True
    on_host: bool = False
    keeps_former: bool = False


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on each device.

    `kept` is always in memory, by part; `step` is added in a step; the warm start needs `warm_start` in place of both;
    writing a checkpoint adds `published`. A step with more sequences than episodes adds `branches`: if the episodes
    fit into one micro-batch, the branches need a second one of the same shape, whose gradient is added. Host memory
    holds `host_reference` and `host_former` always, and `host_copies` while a checkpoint is written; if the devices are
    the host (`on_host`), these count too. A supervised run (`saves_between`) writes its checkpoints between steps, from
    the arrays themselves; another run may make no step while one is written (`saves_last`).
    """

    kept: Mapping[str, int]
    step: Mapping[str, int]
    warm_start: Mapping[str, int]
    published: int
    host_copies: int
    on_host: bool = False
    host_reference: int = 0
    host_former: int = 0
    branches: int = 0
    saves_between: bool = False
    saves_last: bool = False

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes of each phase."""
        kept = sum(self.kept.values()) + (self.host_reference + self.host_former if self.on_host else 0)
        copies = self.host_copies if self.on_host and not self.saves_between else 0
        beside = 0 if self.saves_last else copies
        found = {"step": kept + sum(self.step.values()) + beside, "checkpoint": kept + self.published + copies}
        return found | ({"warm start": sum(self.warm_start.values())} if self.warm_start else {})

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_with_branches(self) -> int:
        """Peak bytes if a step has more sequences than episodes."""
        return max(self.peak, self.phases["step"] + self.branches)

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    def to_mib(self) -> dict[str, float]:
        """Convert the parts of the largest phase to MiB, for the log and /status."""
        phase = self.largest_phase
        parts = dict(self.warm_start) if phase == "warm start" else {**self.kept, **self.step}
        parts |= {"reference on the host": self.host_reference, "weights before the step": self.host_former}
        parts |= {"host copies of a checkpoint": self.host_copies}
        parts[f"most ({phase})"] = self.peak
        return {name: round(n / _MIB, 1) for name, n in parts.items() if n}


def estimate(
    shapes: Shapes, setup: TrainingSetup, micro_batch: Mapping[str, int], warm_start_activations: int | None = None
) -> MemoryEstimate:
    """Count the memory of training.

    Args:
        shapes: of all parameters, with adapters if `setup.adapts`.
        micro_batch: bytes that a micro-batch takes on a device beside gradients, by part.
        warm_start_activations: bytes of a micro-batch of the warm start; None if there is none.
    """
    on_device = {name: shape.n_on_device(setup.mesh) for name, shape in shapes.items()}
    trained = {name: n for name, n in on_device.items() if not setup.adapts or adapter.is_adapter(name)}
    n_trained = sum(trained.values())
    fixed = (sum(on_device.values()) - n_trained) * ITEM_SIZES[setup.dtype]
    parameters = _FLOAT32 * n_trained + fixed
    unmoved = 0
    if setup.has_critic and not setup.trains_attention:
        unmoved = sum(n for name, n in trained.items() if is_of_attention(name))
    critic = n_trained if setup.has_critic else 0
    reference = parameters if setup.reference and not setup.adapts else 0
    kept = {
        "parameters": parameters,
        "optimizer": _FLOAT32 * _MOMENTS * n_trained,
        "reference": 0 if setup.offload_reference else reference,  # its pass ends before the gradients
        "critic": _FLOAT32 * ((1 + _MOMENTS) * critic - _MOMENTS * unmoved),
    }
    rounds = setup.published_dtype != "float32" and not setup.adapts
    published = ITEM_SIZES[setup.published_dtype] * n_trained if rounds else 0
    return MemoryEstimate(
        kept=kept,
        step={"gradients": _FLOAT32 * n_trained * min(2, setup.n_micro), **micro_batch},
        warm_start={} if warm_start_activations is None else _warm_start(shapes, setup, warm_start_activations),
        published=published,
        host_copies=_FLOAT32 * n_trained + kept["optimizer"] + kept["critic"] + published,
        on_host=setup.on_host,
        host_reference=reference - kept["reference"],
        host_former=_FLOAT32 * n_trained if setup.keeps_former else 0,
        branches=_FLOAT32 * n_trained if setup.may_branch and setup.n_micro == 1 else 0,
    )


def _warm_start(shapes: Mapping[str, ParameterShape], setup: TrainingSetup, activations: int) -> dict[str, int]:
    """Count the warm start, which trains all parameters and no adapter."""
    n = sum(one.n_on_device(setup.mesh) for name, one in shapes.items() if not adapter.is_adapter(name))
    return {
        "parameters": _FLOAT32 * n,
        "optimizer": _FLOAT32 * _MOMENTS * n,
        "gradients": _FLOAT32 * n,
        "activations": activations,
    }
