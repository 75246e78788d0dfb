"""Types of devices that a run may use, as named on the command line or found on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import ConfigError
from shared.planning.serving import Platform
from shared.process.host_memory import host_limit
from volley_launch.accelerators import Kind, find_accelerators, find_gpu, tpu_generation
from volley_launch.planning.quantities import parse_bytes
from volley_launch.sharing import given_share, variable

_GIB, _MIB = 2**30, 2**20
_GPU_SHARE, _TPU_SHARE = 0.75, 0.98
"""Share of a device's memory that JAX may fill: its default on GPUs; on TPUs all but what the runtime takes."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Type of a device. `memory` is in bytes; `per_host` is the number of devices of its largest usual host.

    `share` is the part of a GPU that a process may fill, if it shares the GPU with others of the run.
    """

    name: str
    platform: Platform
    memory: int
    per_host: int = 8
    share: float | None = None

    @property
    def usable(self) -> int:
        """Bytes that JAX may fill."""
        if self.platform == "tpu":
            return int(self.memory * _TPU_SHARE)
        return int(self.memory * self._gpu_share) if self.platform == "gpu" else self.memory

    @property
    def limit(self) -> str:
        """Name of the limit, for errors."""
        if self.share is not None:
            return f"its {self.share:.0%} of the shared {self.name}"
        if self.platform == "gpu":
            return f"{self._gpu_share:.0%} of one {self.name} (set {variable(os.environ)} for more)"
        return "this machine" if self.platform == "cpu" and self.name == "cpu" else f"one {self.name}"

    @property
    def _gpu_share(self) -> float:
        return self.share or given_share(os.environ) or _GPU_SHARE


DEVICES: Mapping[str, DeviceType] = {
    one.name: one
    for one in (
        DeviceType("v4", "tpu", 32 * _GIB, 4),
        DeviceType("v5e", "tpu", 16 * _GIB),
        DeviceType("v5p", "tpu", 95 * _GIB, 4),
        DeviceType("v6e", "tpu", 32 * _GIB),
        DeviceType("t4", "gpu", 15360 * _MIB),
        DeviceType("l4", "gpu", 23034 * _MIB),
        DeviceType("a10g", "gpu", 23028 * _MIB),
        DeviceType("l40s", "gpu", 46068 * _MIB),
        DeviceType("a100-40gb", "gpu", 40960 * _MIB),
        DeviceType("a100", "gpu", 81920 * _MIB),
        DeviceType("h100", "gpu", 81559 * _MIB),
        DeviceType("h200", "gpu", 143771 * _MIB),
        DeviceType("b200", "gpu", 183359 * _MIB),
    )
}
"""Chips of TPUs by Google's documentation, GPUs by the memory that nvidia-smi reports."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one type; `count` None: as many as the configuration needs."""

    type: DeviceType
    count: int | None = None


def parse(text: str, platform: Platform) -> Devices:
    """Read NAME, NAME:COUNT or NAME=BYTES:COUNT, e.g. v5e:8 or mychip=24GiB:4.

    Args:
        platform: of a device that is not in the table.

    Raises ConfigError with the known names.
    """
    match = re.fullmatch(r"(?P<name>[\w.-]+)(=(?P<memory>[^:]+))?(:(?P<count>\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} names no devices", "write NAME, NAME:COUNT or NAME=BYTES:COUNT, e.g. v5e:8")
    name, count = match["name"].lower(), match["count"]
    if count is not None and int(count) < 1:
        raise ConfigError(f"{text}: there must be at least one device", f"leave out :{count}, or name another number")
    if name == "cpu" and count not in (None, "1"):
        raise ConfigError(f"{text}: a CPU is one device for JAX", "leave out the number")
    if match["memory"] is not None:
        known, memory = DEVICES.get(name), parse_bytes(match["memory"])
        if name == "cpu":
            return Devices(DeviceType("cpu", "cpu", memory, 1), 1)
        found = replace(known, memory=memory) if known else DeviceType(name, platform, memory)
        return Devices(found, None if count is None else int(count))
    if name == "cpu":
        return this_host()
    if name not in DEVICES:
        raise ConfigError(
            f"no device {name!r} is known",
            f"known: {', '.join(DEVICES)}; or give its memory, e.g. {name}=24GiB",
        )
    return Devices(DEVICES[name], None if count is None else int(count))


def this_host() -> Devices:
    """Return the processors of this machine: one device for JAX, whose memory all processes share."""
    return Devices(DeviceType("cpu", "cpu", host_limit()[0], 1), 1)


def local(kind: Kind, root: Path = Path("/")) -> Devices:
    """Find this machine's accelerators. Raises ConfigError if there is none, or its memory is not known."""
    here = find_accelerators(kind, os.environ, root)
    n = len(here.names)
    example = "v5e:8" if kind == "tpu" else "h100:8"
    named = (
        "--trainer h100:1 --rollout shared" if (kind, n) == ("gpu", 1) else f"--trainer {example} --rollout {example}"
    )
    hint = f"name the devices to plan for, e.g. {named}"
    if n == 0:
        shown = f" that {here.variable} shows" if here.variable in os.environ else ""
        raise ConfigError(f"rollout.engine.device={kind}, and this machine has no {kind.upper()}{shown}", hint)
    name = tpu_generation(root) if kind == "tpu" else None
    gpu = find_gpu(here.names, os.environ) if kind == "gpu" else None
    found = DEVICES.get(name or "") if gpu is None else DeviceType(gpu.name, "gpu", gpu.memory)
    if found is None:
        raise ConfigError(f"the memory of this machine's {kind.upper()}s is not known", hint)
    return Devices(found, n)
