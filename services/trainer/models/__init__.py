"""Models assembled from Tunix's layers, loaded from a Hugging Face folder and sharded over a mesh.

Tunix's own `__init__` imports its trainers and samplers, and with them pandas, boto3 and tensorboardX: a fifth of the
CPU time of all imports of the trainer, and 100 MB. Modules are imported here by their own names, so it is not run.
"""

import sys
from importlib.util import find_spec, module_from_spec

if "tunix" not in sys.modules and (_spec := find_spec("tunix")) is not None:
    sys.modules["tunix"] = module_from_spec(_spec)
