"""A family that does not exist: Gemma 2's parts with Qwen2's biases, as one file beside the real families."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shared.models.families as package
from tests.support import models

NAME = "imaginary"
CODE = """
from shared.models.family import FULL, SLIDING, Family

FAMILY = Family(
    title="Imaginary",
    architecture="ImaginaryForCausalLM",
    defaults={"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
    neutral={"hidden_act": ("gelu_pytorch_tanh",)},
    written={"imaginary": True},
    engine_names={"norm.scale": "norm.gain"},
    qkv_bias=True,
    tied=True,
    scaled_embeddings=True,
    norms_add_one=True,
    output_norms=True,
    activation="gelu_pytorch_tanh",
    attention={"sliding_window": 7, "final_logit_softcapping": 5.0},
    layer_types=(FULL, SLIDING),
)
"""
CONFIG = models.tiny_config(
    model_type=NAME,
    architectures=["ImaginaryForCausalLM"],
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    head_dim=16,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)


@contextmanager
def added(folder: Path) -> Iterator[None]:
    """Add the family's one file, written to `folder`, to the package of families."""
    (folder / f"{NAME}.py").write_text(CODE, encoding="utf-8")
    package.__path__.append(str(folder))
    package.families.cache_clear()
    try:
        yield
    finally:
        package.__path__.remove(str(folder))
        package.families.cache_clear()
        sys.modules.pop(f"{package.__name__}.{NAME}", None)
