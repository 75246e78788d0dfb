"""Assign this machine's accelerators to the processes of a run.

The trainer gets as many as its mesh has devices (each of its processes a part), each rollout server as many as its
model is split over (`tp_size`). No two processes share one, except the only GPU of a machine (`volley_launch.sharing`):
a TPU chip can be opened only once. On CPUs nothing is assigned: an engine makes as many CPU devices as it needs.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shared.errors import ConfigError, VolleyError
from shared.schema import RunConfig
from shared.services import SERVICES
from volley.layout import installing, python_of
from volley_launch.sharing import divide, given_share, is_shared, variable

if TYPE_CHECKING:
    from shared.models.config import ModelConfig

type Kind = Literal["tpu", "gpu"]

_VISIBLE: Mapping[Kind, str] = {"tpu": "TPU_VISIBLE_CHIPS", "gpu": "CUDA_VISIBLE_DEVICES"}
_NAMES: Mapping[Kind, str] = {"tpu": r"\d+", "gpu": r"\d+|(GPU|MIG)-[\w/-]+"}
_DEVICE = "rollout.engine.device"
_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which a program sees no GPU."""
_GOOGLE = "0x1ae0"
_TPU_CHIPS: Mapping[str, str | None] = {
    "0x0027": "v3",
    "0x0056": None,
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
    "0x0083": "tpu8i",
    "0x007c": "tpu8t",
}
"""Generation of a TPU by PCI id, as in `jax._src.hardware_utils`."""
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
"""Chip bounds of a process by its number of chips; libtpu supports only these parts of a host."""
_SHARING = (
    "; processes share a GPU only if it is the only one, with trainer.mesh.shape=[1,1] and rollout.engine.tp_size=1"
    " (CUDA_VISIBLE_DEVICES=0 shows the run one)"
)
_FIRST_PORT = 8476  # libtpu's own default
_MIB = 2**20
_ASK_S = 10
_BACKENDS: Mapping[Kind, str] = {"tpu": "libtpu", "gpu": r"jax-cuda\d+-plugin"}
_IMPORT_S = 60


@dataclass(frozen=True, slots=True)
class Accelerators:
    """Accelerators to assign, by the names that `variable` takes: numbers, for GPUs also UUIDs."""

    kind: Kind
    names: tuple[str, ...]

    @property
    def variable(self) -> str:
        """Environment variable that lists the accelerators visible to a process."""
        return _VISIBLE[self.kind]


@dataclass(frozen=True, slots=True)
class Gpu:
    """Name of a GPU, and its memory in bytes."""

    name: str
    memory: int


def find_accelerators(kind: Kind, environ: Mapping[str, str], root: Path = Path("/")) -> Accelerators:
    """Accelerators listed in `environ`, else all of the machine whose files are below `root`.

    Raises ConfigError if the list has something else than numbers and UUIDs, or one of them twice.
    """
    given = environ.get(_VISIBLE[kind])
    if kind == "gpu" and given is not None and given.strip() in _HIDDEN:
        return Accelerators(kind, ())
    if given is not None and given.strip():
        names = tuple(name.strip() for name in given.split(","))
        if len(set(names)) < len(names) or not all(re.fullmatch(_NAMES[kind], name) for name in names):
            raise ConfigError(
                f"{_VISIBLE[kind]}={given} is not a list of {kind.upper()}s",
                f"unset it, or name each once by its number{'' if kind == 'tpu' else ' or UUID'}: {_VISIBLE[kind]}=0,1",
            )
        return Accelerators(kind, names)
    n = len(_chips(root)) if kind == "tpu" else _gpus(root)
    return Accelerators(kind, tuple(map(str, range(n))))


def tpu_generation(root: Path = Path("/")) -> str | None:
    """Name of this machine's generation of TPUs; None if it has none, or an unnamed one."""
    return next((_TPU_CHIPS[chip] for chip in _chips(root)), None)


def _chips(root: Path) -> list[str]:
    """PCI ids of the TPU chips of the machine."""
    ids = [
        (part.parent / "device").read_text(encoding="utf-8").strip()
        for part in root.glob("sys/bus/pci/devices/*.0/vendor")
        if part.read_text(encoding="utf-8").strip() == _GOOGLE
    ]
    return [chip for chip in ids if chip in _TPU_CHIPS]


def _gpus(root: Path) -> int:
    return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in root.glob("dev/nvidia*"))


def find_gpu(names: Sequence[str], environ: Mapping[str, str]) -> Gpu | None:
    """Ask nvidia-smi for name and memory of the smallest of the named GPUs.

    Numbers are those of CUDA, whose order is not nvidia-smi's unless CUDA_DEVICE_ORDER=PCI_BUS_ID: without it, the
    smallest GPU of the machine counts. None if nvidia-smi does not answer, or if a name stands for a part of a GPU
    (MIG), whose memory it does not report. Raises ConfigError if there is no such GPU.
    """
    listed = _listed_gpus()
    if listed is None:
        return None
    numbered = {one.index: one for one in listed}
    in_order, found = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID", list[_Listed]()
    for name in names:
        if name.startswith("MIG-"):
            return None
        if name.isdecimal():
            fitting = listed if int(name) < len(listed) else ()
            fitting = [numbered[name]] if in_order and name in numbered else fitting
        else:
            fitting = [one for one in listed if one.uuid.startswith(name)]
        if not fitting:
            raise ConfigError(
                f"{_VISIBLE['gpu']} names GPU {name}, which is not among the {len(listed)} that nvidia-smi lists",
                "see `nvidia-smi -L` for numbers and UUIDs",
            )
        found += fitting
    if any(one.is_divided for one in found):
        return None
    return min((one.gpu for one in found), key=lambda gpu: gpu.memory, default=None)


@dataclass(frozen=True, slots=True)
class _Listed:
    """GPU as nvidia-smi lists it. `is_divided` says that programs see parts of it instead (MIG)."""

    index: str
    uuid: str
    is_divided: bool
    gpu: Gpu


def _listed_gpus() -> list[_Listed] | None:
    """Ask nvidia-smi for all GPUs; None if it does not answer, or does not know their memory."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "memory.total,mig.mode.current,index,uuid,name"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, check=True, timeout=_ASK_S, encoding="utf-8").stdout
        rows = [[part.strip() for part in line.split(",", 4)] for line in lines.splitlines() if line]
        return [
            _Listed(index, uuid, mig == "Enabled", Gpu(name, int(memory) * _MIB))
            for memory, mig, index, uuid, name in rows
        ]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def backend(kind: Kind, environment: str) -> str:
    """Name the package with which JAX of a virtual environment uses such accelerators; empty if there is none.

    Raises ConfigError, OSError, subprocess.SubprocessError.
    """
    asked = "import importlib.metadata as m; print(*{d.name for d in m.distributions()})"
    command = [str(python_of(environment)), "-c", asked]
    names = subprocess.run(command, capture_output=True, check=True, timeout=_IMPORT_S, encoding="utf-8").stdout
    return next((name for name in sorted(names.split()) if re.fullmatch(_BACKENDS[kind], name)), "")


def check_backend(kind: Kind, environment: str) -> None:
    """Raise ConfigError if JAX of a virtual environment is for CPUs only: a trainer would then use the CPU."""
    try:
        installed = backend(kind, environment)
    except (OSError, subprocess.SubprocessError):
        return  # the service itself will say why its environment cannot be used
    has_own = kind == "tpu" and "TPU_LIBRARY_PATH" in os.environ  # a libtpu outside the environment
    if not installed and not has_own:
        raise ConfigError(
            f"rollout.engine.device={kind}, but JAX in the environment {environment} is installed for CPUs only",
            installing(kind),
        )


def _not_found(kind: Kind, key: str = _DEVICE) -> ConfigError:
    return ConfigError(
        f"{key} {kind}: no {kind.upper()} was found on this machine",
        f"cpu uses the CPU; {_VISIBLE[kind]} names those that were not found, and hides all if it is empty or -1",
    )


def check_device(kind: Kind, environments: Iterable[str], key: str = _DEVICE) -> None:
    """Raise ConfigError if this machine has no such accelerator, or JAX of a virtual environment cannot use it.

    Args:
        key: how the user names the device.
    """
    if not find_accelerators(kind, os.environ).names:
        raise _not_found(kind, key)
    for environment in environments:
        check_backend(kind, environment)


def shares(
    config: RunConfig, n_rollout: int, root: Path = Path("/"), n_trainers: int | None = None
) -> dict[str, dict[str, str]]:
    """Environment variables that show each process of a local run its own accelerators, by process name.

    `n_trainers` are the trainer's processes on this machine, by default those of the configuration.

    Raises ConfigError if there are too few, if libtpu does not support such a part of a host, or if the environment
    sets what CUDA or JAX cannot read.
    """
    device, tp_size = config.rollout.engine.device, config.rollout.engine.tp_size
    if device == "cpu":
        return {}
    here = find_accelerators(device, os.environ, root)
    n_engines = 0 if config.rollout.engine.is_external else n_rollout
    servers = [SERVICES["rollout"].process(i) for i in range(n_engines)]
    n_trainers = config.services.trainer.n_local if n_trainers is None else n_trainers
    part = math.prod(config.trainer.mesh.shape) // config.services.trainer.num_processes
    trainers = [SERVICES["trainer"].process(i) for i in range(n_trainers)]
    if device == "gpu":
        given_share(os.environ)  # refuses what JAX cannot read
    if device == "gpu" and is_shared(config, len(here.names), n_engines, n_trainers):
        return _of_one_gpu(config, here, trainers, servers)
    needed = dict.fromkeys(trainers, part) | dict.fromkeys(servers, tp_size)
    if needed and not here.names:
        raise _not_found(device)
    if sum(needed.values()) > len(here.names):
        raise ConfigError(
            f"the run needs {sum(needed.values())} {device.upper()}s, but this machine has {len(here.names)} for it:"
            f" {part * n_trainers} for trainer.mesh, {n_engines} times {tp_size} for services.rollout_replicas with"
            " rollout.engine.tp_size",
            "lower one of them, or name rollout servers of other hosts in services.rollout_urls; if this machine has"
            f" more than were found, list them in {here.variable}=0,1,…{_SHARING if device == 'gpu' else ''}",
        )
    made: dict[str, dict[str, str]] = {}
    start = 0
    for name, n in sorted(needed.items(), key=lambda one: -one[1]):  # the largest first: powers of two are then aligned
        made[name] = _variables(here, start, n)
        start += n
    return made


def _of_one_gpu(
    config: RunConfig, here: Accelerators, trainers: Sequence[str], servers: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Environment variables of processes that share a GPU. Raises ConfigError if the user's shares do not fit."""
    gpu, variables = find_gpu(here.names, os.environ), _variables(here, 0, 1)
    memory = None if gpu is None else gpu.memory
    found = divide(config, _model(config), memory, len(servers), len(trainers), os.environ)
    by_process = dict.fromkeys(trainers, found.trainer) | dict.fromkeys(servers, found.server)
    if given_share(os.environ) is not None:
        return dict.fromkeys(by_process, variables)
    return {name: variables | {variable(os.environ): f"{share:g}"} for name, share in by_process.items()}


def _model(config: RunConfig) -> ModelConfig | None:
    """Read the model's sizes; None if that fails, which the services report."""
    from shared.models.config import ModelConfig
    from shared.models.hub import model_folder

    try:
        return ModelConfig.read(model_folder(config.model.path, config.run.folder))
    except VolleyError:
        return None


def _variables(here: Accelerators, start: int, n: int) -> dict[str, str]:
    """Environment variables of a process that sees `n` accelerators from `start` on; none for all chips of a host.

    Raises ConfigError if libtpu does not support such a part of a host.
    """
    seen = {here.variable: ",".join(here.names[start : start + n])}
    if here.kind == "gpu":  # without a platform's name, JAX falls back to the CPU if CUDA cannot be used
        return seen | ({} if os.environ.get("JAX_PLATFORMS") else {"JAX_PLATFORMS": "cuda,cpu"})
    if n == len(here.names):
        return {}
    if n not in _BOUNDS:
        raise ConfigError(
            f"a process cannot have {n} of a host's {len(here.names)} TPU chips",
            f"trainer.mesh and rollout.engine.tp_size may take {', '.join(map(str, _BOUNDS))} or all of them",
        )
    port = str(_FIRST_PORT + start)
    return seen | {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[n],
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
