"""The reference in the host's memory: the same bits, and nothing of it on the devices between its passes."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from services.trainer.learner.optimizer import make_optimizer
from services.trainer.learner.scoring import Reference, objective, params_of
from services.trainer.learner.train_step import Learner
from services.trainer.models.family import make_mesh
from tests.support import models
from tests.trainer import test_policy
from tests.trainer.support import model_of
from volley_supervised.learner.imitation import supervised_loss

OPTIONS, START, WEIGHTS = test_policy.OPTIONS, test_policy.START, test_policy.WEIGHTS
LATER = models.random_weights(test_policy.CONFIG_1, seed=7)


def living(kind: str) -> int:
    """Bytes in this kind of memory, of all arrays that there are."""
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == kind)


@pytest.mark.parametrize("given", [False, True])
def test_it_lies_on_the_host_and_comes_back_bit_by_bit(given: bool) -> None:
    model = model_of(WEIGHTS, test_policy.CONFIG_1, make_mesh((2, 2), ("fsdp", "tp")))
    learner = Learner(params_of(model), make_optimizer(OPTIONS.optimizer), objective(model, supervised_loss, 1.0))
    values = {k: np.asarray(v) for k, v in params_of(model_of(LATER, test_policy.CONFIG_1)).items()} if given else None
    expected = values or {name: np.asarray(value) for name, value in learner.params.items()}
    n_bytes, before = sum(value.nbytes for value in expected.values()), [living(k) for k in ("device", "pinned_host")]
    reference = Reference(learner, values, offload=True)
    assert [living(k) for k in ("device", "pinned_host")] == [before[0], before[1] + n_bytes]
    brought = reference.params()
    assert living("device") >= before[0] + n_bytes
    for name, value in brought.items():
        assert value.sharding == learner.params[name].sharding
        assert np.asarray(value).tobytes() == expected[name].tobytes()
    del brought, value
    assert living("device") == before[0]


@pytest.mark.long
@pytest.mark.parametrize("later", [False, True])
def test_steps_are_bit_by_bit_those_with_it_on_the_devices(later: bool) -> None:
    """Of the policy's own weights, which the steps change, and of others, as after a restart."""
    values = {k: np.asarray(v) for k, v in params_of(model_of(LATER, test_policy.CONFIG_1)).items()} if later else None
    ones = [test_policy.policy(replace(OPTIONS, offload_reference=off), reference=values) for off in (False, True)]
    first = [asdict(one.step(test_policy.held(1, 2, 3, 4), START)) for one in ones]
    second = [asdict(one.step(test_policy.held(5, 6, 7, 8), START)) for one in ones]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert second[0]["kl"] != 0
    assert ones[0].checksum() == ones[1].checksum()
