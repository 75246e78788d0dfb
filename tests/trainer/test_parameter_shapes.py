"""Shapes of parameters from config.json alone, against the models that the trainer builds."""

from __future__ import annotations

import math

import pytest
from flax import nnx

from services.trainer.models.family import abstract, leaf_name, make_mesh
from services.trainer.models.lora import LoraOptions
from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from tests.support import families

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("name", families.NAMES)
def test_the_shapes_are_those_of_the_built_model(name: str, rank: int | None) -> None:
    model = ModelConfig.parse(families.case(name).written)
    lora = None if rank is None else LoraOptions(rank, 1.0, TARGETS)
    _, state = abstract(model, "float32", "none", make_mesh((1, 1), ("fsdp", "tp")), lora)
    built = {leaf_name(path): variable for path, variable in nnx.to_flat_state(state)}
    found = parameters(model, rank, TARGETS)
    assert found.keys() == built.keys()
    for leaf, variable in built.items():
        expected = tuple(variable.get_value().shape)
        assert found[leaf].shape == expected, leaf
        assert found[leaf].axes == tuple(variable.get_metadata()["out_sharding"]), leaf
        assert found[leaf].n == math.prod(expected)
