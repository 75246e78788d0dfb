"""The trainer's settings for GPUs, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CHOSEN = """
import os
from services.trainer.models.family import make_mesh

make_mesh((1, 1), ("fsdp", "tp"))
print(os.environ.get("XLA_FLAGS"))
"""


def test_kernels_for_gpus_add_in_a_fixed_order(tmp_path: Path) -> None:
    """A restarted trainer compares checksums of steps that it repeats."""
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").touch()
    deterministic = "--xla_gpu_deterministic_ops=true"
    assert flags(tmp_path) == deterministic
    assert flags(tmp_path, XLA_FLAGS="--xla_dump_max_hlo_modules=1") == f"--xla_dump_max_hlo_modules=1 {deterministic}"
    own = "--xla_gpu_deterministic_ops=false"
    assert flags(tmp_path, XLA_FLAGS=own) == own
    assert flags(tmp_path, JAX_PLATFORMS="cpu") == "None"


def flags(packages: Path, **variables: str) -> str:
    """XLA_FLAGS of a trainer that has opened its devices, with these packages installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    kept |= {"PYTHONPATH": f"{packages}{os.pathsep}{Path(__file__).parents[2]}", **variables}
    done = subprocess.run([sys.executable, "-c", _CHOSEN], env=kept, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()
