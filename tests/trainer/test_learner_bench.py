"""The benchmark beside Tunix's learner: what both are given, and that both train on it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tools.bench import learner, trainer
from tools.bench.learner import LOGNORMAL, N_PASSES, N_STEPS
from tools.bench.tunix_learner import Lengths, step_seconds

SMALL = dataclasses.replace(
    LOGNORMAL,
    model=dataclasses.replace(
        trainer.MODEL, vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16
    ),
    n_groups=2,
    group_size=2,
    micro_rows=2,
    lengths=Lengths(4, 12),
    median=4.0,
    buckets=(16,),
)


def test_a_workload_is_groups_of_one_prompt_with_answers_that_fit():
    steps = LOGNORMAL.steps()
    assert [len(step) for step in steps] == [16] * N_STEPS
    for step in steps:
        for i in range(0, len(step), LOGNORMAL.group_size):
            group = step[i : i + LOGNORMAL.group_size]
            assert all(np.array_equal(one.prompt, group[0].prompt) for one in group)
        assert all(0 < len(one.completion) <= 448 and one.completion.min() >= 2 for one in step)
    again = LOGNORMAL.steps()
    assert all(np.array_equal(a.completion, b.completion) for a, b in zip(steps[1], again[1], strict=True))


@pytest.mark.long
def test_both_learners_make_every_step():
    model, before = trainer.make_model(SMALL.model), list[int]()
    was = np.asarray(model.embedder.input_embedding.get_value()).copy()
    seconds = step_seconds(
        model, SMALL.steps(), group_size=2, micro_rows=2, lengths=SMALL.lengths, between=before.append
    )
    assert before == list(range(N_STEPS)) == list(range(len(seconds)))
    assert not np.array_equal(was, np.asarray(model.embedder.input_embedding.get_value()))
    assert N_PASSES > 1
    assert all(taken > 0 for taken in learner._compared(SMALL))
