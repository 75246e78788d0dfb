"""Initial weights out of files: only the part that is asked for, as the whole tensor has it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from services.trainer.models.initial_weights import safetensors_leaves
from shared.errors import ConfigError
from shared.models.names import from_hf, hf_name

LEAVES = {
    "embedder.input_embedding": (12, 8),
    "layers.0.attn.q_proj.w": (8, 2, 4),
    "layers.0.attn.o_proj.w": (2, 4, 8),
    "layers.0.mlp.down_proj.kernel": (6, 8),
    "final_norm.w": (8,),
}
INDICES = {1: (slice(2, 6),), 2: (slice(2, 6), slice(4, 8)), 3: (slice(0, 2), slice(1, 2), slice(None))}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path: Path, dtype: type):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, size in LEAVES.items():
        flat = {"embedder.input_embedding": (12, 8), "final_norm.w": (8,)}.get(name)
        matrix = (size[-1], size[0] * size[1]) if name.endswith("o_proj.w") else (int(np.prod(size[1:])), size[0])
        tensors[hf_name(name)] = rng.standard_normal(flat or matrix).astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    leaves = safetensors_leaves(tmp_path, [tmp_path / "model.safetensors"])
    for name, size in LEAVES.items():
        whole, found = from_hf(name, tensors[hf_name(name)], size), leaves(name, size)
        assert (found.shape, found.dtype) == (size, np.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), whole)
        index = INDICES[len(size)]
        part = found[index]
        np.testing.assert_array_equal(part, whole[index])
        assert not isinstance(part, np.memmap)
        assert part.flags.owndata


def test_what_a_file_lacks_or_cannot_be_is_named(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.zeros(8, np.int32)}, file)
    leaves = safetensors_leaves(tmp_path, [file])
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.embed_tokens"):
        leaves("embedder.input_embedding", (12, 8))
    with pytest.raises(ConfigError, match="I32"):
        leaves("final_norm.w", (8,))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="cannot be read"):
        safetensors_leaves(tmp_path, [file])
