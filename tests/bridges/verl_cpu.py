"""A platform of verl for machines without a GPU: VERL_PLATFORM=tests_cpu, VERL_USE_EXTERNAL_MODULES=verl_cpu.

verl counts Ray's GPUs and places its workers by them, so Ray is told of GPUs that do not exist. The workers compute
with torch on the CPU, with FSDP2 over gloo.
"""

from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class Device(ModuleType):
    """torch.cpu; functions of torch.cuda that it lacks measure and free nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, None) or nothing

    @staticmethod
    def mem_get_info(*_):
        return 0, 0

    @staticmethod
    def get_device_name(*_):
        return "cpu"


def nothing(*_, **__):
    return 0


@PlatformRegistry.register(platform="tests_cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = Device("verl_cpu_device")
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = nothing
    cudart = nothing

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False  # only by its name

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False


from verl.utils import distributed  # noqa: E402  the platform has to be known before

_initialize = distributed.initialize_global_process_group_ray
distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: _initialize(
    timeout_second, backend or "cpu:gloo"
)  # verl's default names gloo twice for the same device

from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
