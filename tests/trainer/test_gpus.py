"""The trainer's settings for GPUs, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.models.config import ModelConfig
from tools.bench.trainer import step_flops

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
    in_order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"  # for CPUs, to save memory
    assert flags(tmp_path).split() == [deterministic, in_order]
    given = "--xla_dump_max_hlo_modules=1"
    assert flags(tmp_path, XLA_FLAGS=given).split() == [given, deterministic, in_order]
    own = "--xla_gpu_deterministic_ops=false --xla_cpu_enable_concurrency_optimized_scheduler=true"
    assert flags(tmp_path, XLA_FLAGS=own) == own
    assert flags(tmp_path, JAX_PLATFORMS="cpu") == in_order


def flags(packages: Path, **variables: str) -> str:
    """XLA_FLAGS of a trainer that has opened its devices, with these packages installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    kept |= {"PYTHONPATH": f"{packages}{os.pathsep}{Path(__file__).parents[2]}", **variables}
    done = subprocess.run([sys.executable, "-c", _CHOSEN], env=kept, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()


def test_the_benchmark_counts_products_of_chosen_experts_and_no_table_of_embeddings() -> None:
    """Two layers; a token is sent to 2 of 16 experts of 3 matrices of 64 x 32."""
    shape = {
        "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e4,
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 64 * 16 + 2 * 3 * 64 * 32
    tokens, pairs = 3 * 10, 3 * 55
    exact = 6 * tokens * (2 * layer + 64 * 1000) + 12 * pairs * 2 * 4 * 16
    assert step_flops(ModelConfig.parse(shape), 3, 10) == pytest.approx(exact, rel=0.03)
