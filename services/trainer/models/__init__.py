"""Models assembled from Tunix's layers, loaded from a Hugging Face folder and sharded over a mesh.

Tunix's own `__init__` imports its trainers and samplers, and with them pandas, boto3 and tensorboardX: a fifth of the
CPU time of all imports of the trainer, and 100 MB. Modules are imported here by their own names, so it is not run until
somebody asks for a name that only it has.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


def _without_init(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)

    def rest(name: str) -> Any:
        if spec.loader is None or (name.startswith("__") and name != "__version__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        del module.__getattr__
        spec.loader.exec_module(module)
        return getattr(module, name)

    module.__getattr__ = rest  # type: ignore[method-assign]
    return module


if "tunix" not in sys.modules and (_spec := find_spec("tunix")) is not None:
    sys.modules["tunix"] = _without_init(_spec)
