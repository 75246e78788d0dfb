"""Memory that `volley plan` estimates, against the trainer's own estimate and XLA's allocations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.trainer.batches.batch import BatchLayout
from services.trainer.learner.policy import PolicyOptions
from services.trainer.models.options import ModelOptions
from services.trainer.options import LoraOptions, model_options, policy_options
from services.trainer.planning import memory
from services.trainer.settings import TokenLimits
from shared import config
from shared.models.config import ModelConfig
from tests.support import families
from tests.trainer.test_memory import EXPERTS, LORA, MODEL, POLICY, SHAPE, allotted
from volley.planning import trainer
from volley.planning.activations import BatchSize, activations
from volley.planning.devices import this_host

SMOLLM2 = ModelConfig.parse(
    {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=bfloat16", "algorithm.beta=0.1", "trainer.train_micro_batch_size=16"),
        ("trainer.lora.rank=4", "model.dtype=bfloat16"),
        ("algorithm.name=sao", "sft.max_steps=0"),
    ],
)
def test_the_plan_counts_what_the_trainer_counts(overrides: tuple[str, ...]) -> None:
    run = config.load(["configs/quickstart.yaml"], overrides).config
    model = ModelConfig.read(Path(run.model.path))
    policy = policy_options(run, TokenLimits(model.vocab_size, 0))
    warm_start = BatchLayout((64,), min(run.sft.batch_size, 999), 0) if run.sft.trains else None
    expected = memory.estimate(model, model_options(run, Path()), policy, warm_start)
    found = trainer.estimate(run, model, this_host().type)
    assert found.kept == expected.kept
    assert found.host_copies == expected.host_copies
    assert found.published == expected.published
    assert found.step.keys() == expected.step.keys()
    assert found.step["gradients"] == expected.step["gradients"]
    assert found.step["activations"] == pytest.approx(expected.step["activations"], rel=0.35)
    for part in ("parameters", "optimizer", "gradients"):
        assert found.warm_start.get(part) == expected.warm_start.get(part)


def batch_of(model: ModelOptions, policy: PolicyOptions) -> BatchSize:
    shape, adapts = policy.layout, model.lora is not None
    return BatchSize(shape.rows, shape.buckets[-1], model.dtype, model.remat, splash=False, adapts=adapts)


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("qwen2", "gemma2", "moonlight", "experts")]


@pytest.mark.parametrize("remat", ["none", "block", "decoder"])
@pytest.mark.parametrize("name", ["tiny", *OTHERS])
def test_activations_are_near_those_of_the_traced_gradient(name: str, remat: str) -> None:
    known = {"tiny": SHAPE, "experts": EXPERTS}
    described = known[name] if name in known else ModelConfig.parse(families.case(name).written)
    described = replace(described, num_hidden_layers=4)
    model, policy = replace(MODEL, remat=remat), replace(POLICY, layout=BatchLayout((128,), 8, 0))
    expected = memory.estimate(described, model, policy).step["activations"]
    assert 0.6 < activations(described, batch_of(model, policy)) / expected < 1.5


@pytest.mark.long
@pytest.mark.parametrize(
    ("described", "rows", "length", "dtype", "remat", "lora"),
    [
        (SHAPE, 8, 128, "float32", "none", None),
        (SHAPE, 32, 40, "float32", "block", None),
        (SHAPE, 8, 128, "bfloat16", "decoder", None),
        (EXPERTS, 8, 128, "float32", "decoder", None),
        (SMOLLM2, 8, 256, "float32", "none", None),
        (SMOLLM2, 8, 256, "float32", "block", None),
        (SMOLLM2, 8, 256, "float32", "decoder", None),
        (SMOLLM2, 8, 256, "float32", "decoder", LORA),
        (SMOLLM2, 2, 1024, "bfloat16", "decoder", None),
    ],
)
def test_activations_are_near_what_xla_allots(
    described: ModelConfig, rows: int, length: int, dtype: str, remat: str, lora: LoraOptions | None
) -> None:
    model = replace(MODEL, dtype=dtype, remat=remat, lora=lora)
    policy = replace(POLICY, layout=BatchLayout((length,), rows, 0))
    expected = allotted(described, model, policy)
    assert 0.6 < activations(described, batch_of(model, policy)) / expected < 1.6
