"""Four virtual CPU devices for meshes; the tests need the trainer's environment of Python and are not collected in
another.

What is compiled here is not optimized: at the size of tests XLA's optimizations take most of the time. Processes that
tests start compile as in use.
"""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

if importlib.util.find_spec("tunix"):
    from tests.support.redis import redis, redis_server, redis_url  # noqa: F401
    from tests.support.torch_client import torch  # noqa: F401
    from tests.trainer.fakes import bench  # noqa: F401

    collect_ignore_glob = []
else:
    collect_ignore_glob = ["test_*.py"]
