"""A platform of verl for machines without a GPU, to try a whole training there: VERL_PLATFORM=volley_cpu.

Ray has to be told of GPUs that do not exist (`+ray_kwargs.ray_init.num_gpus=1`): verl counts them, and places its
workers by them. The workers then compute with torch on the CPU, with FSDP2 over gloo. It is for tests; it is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "volley_cpu"


class _Device(ModuleType):
    """torch.cpu, and every function of torch.cuda that it lacks: they measure and free nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, None) or _nothing

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"


def _nothing(*_: Any, **__: Any) -> int:
    return 0


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """torch on CPUs; Ray's GPUs are only a count."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("volley_verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # only by name

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """A CPU's work is done when it returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """There are none."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """There is none."""

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register_engines() -> None:
    """Let verl's FSDP engines be found for this platform's device."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        EngineRegistry.register(model_type=kind, backend=["fsdp", "fsdp2"], device="cpu")(engine)
