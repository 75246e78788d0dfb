"""The trainer's step is one that TPUs and GPUs can be given: lowered for them on a CPU, in bfloat16.

Whether it fits and compiles there says `make lower`, which needs libtpu.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from services.trainer import options
from services.trainer.models.family import make_mesh
from services.trainer.settings import TokenLimits
from shared.config import validate
from shared.models.config import ModelConfig
from tests.support import models
from tools.lower import trainer

MODEL = ModelConfig.parse(models.tiny_config(num_hidden_layers=1, vocab_size=64, hidden_size=32, intermediate_size=32))


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [
        ({"name": "grpo", "beta": 0.1}, {"train_micro_batch_size": 4}),
        ({"name": "ppo"}, {"micro_batch_tokens": 256}),
    ],
)
def test_the_step_lowers_for_accelerators(algorithm: dict[str, object], sizes: dict[str, int]) -> None:
    config = validate(
        {
            "run": {"name": "lowered"},
            "model": {"path": "none", "dtype": "bfloat16", "remat": "decoder"},
            "data": {"env": "none"},
            "grpo_config": {"num_generations": 4},
            "algorithm": algorithm,
            "trainer": {"max_steps": 1, "groups_per_step": 2, "length_buckets": [128], **sizes},
            "rollout": {"engine": {"context_length": 128}},
        }
    ).config
    mesh = make_mesh((1, 1), ("fsdp", "tp"))
    model, policy = options.model_options(config, Path()), options.policy_options(config, TokenLimits(64, 0))
    for platform, attention in (("tpu", "auto"), ("cuda", "blocks")):
        found = trainer.programs(MODEL, replace(model, attention=attention), policy, mesh)
        assert [program.name for program in found] == ["gradient", "optimizer"]
        for program in found:
            with mesh:
                text = program.function.trace(*program.arguments).lower(lowering_platforms=(platform,)).as_text()
            assert "stablehlo" in text
            is_gradient = program.name == "gradient"
            assert ("bf16" in text) == is_gradient  # parameters and the optimizer's state are float32
            kernels = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
            assert all((name in text) == (is_gradient and attention == "auto") for name in kernels)
    assert jax.default_backend() == "cpu"
