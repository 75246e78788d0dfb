import numpy as np
import pytest

from services.trainer.batches.batch import (
    BatchLayout,
    Row,
    arranged,
    by_row,
    left_out,
    micro_batches,
    policy_rows,
    row_weights,
    supervised_row,
)
from shared.errors import DecodeError
from shared.types import WeightVersion
from tests.trainer.support import group, rows

LAYOUT = BatchLayout(buckets=(16, 32), rows=2, pad_id=9)


def make(some: list[Row], n_micro: int = 2, layout: BatchLayout = LAYOUT):
    return micro_batches(some, row_weights(some, "token-mean", 1), layout, n_micro)


def test_position_t_belongs_to_the_token_at_t_plus_one():
    row = Row(
        np.array([5, 6, 7, 8], np.int32),
        np.array([0, 0, 1, 1]),
        np.array([0, 0, -1.0, -2.0]),
        np.array([0, 0, 0, 1]),
        np.array([0, 0, 0.5, 0.25]),
    )
    batch = make([row], 1)[0]
    assert batch.ids[0, :5].tolist() == [5, 6, 7, 8, 9]
    assert batch.targets[0, :4].tolist() == [6, 7, 8, 9]
    assert batch.mask[0, :4].tolist() == [0, 1, 1, 0]
    assert batch.behaviour[0, :4].tolist() == [0, -1, -2, 0]
    assert batch.current[0, :4].tolist() == [0, 0, 1, 0]
    assert batch.advantages[0, :4].tolist() == [0, 0.5, 0.25, 0]
    assert batch.weight.tolist() == [[0.5], [0.0]]


def test_shapes_are_bounded_by_buckets_and_rows():
    shapes = {b.ids.shape for seed in range(5) for b in make(rows(4, seed))}
    assert shapes <= {(2, 16), (2, 32)}
    assert {b.ids.dtype.name for b in make(rows(3))} == {"int32"}
    assert {getattr(b, f).dtype.name for b in make(rows(3)) for f in ("mask", "behaviour", "advantages", "weight")} == {
        "float32"
    }


def test_the_number_of_micro_batches_is_constant_and_empty_ones_weigh_nothing():
    batches = make(rows(1), 3)
    assert len(batches) == 3
    assert [float(b.weight.sum()) > 0 for b in batches] == [True, False, False]
    assert not batches[1].mask.any()


def test_similar_lengths_share_a_micro_batch():
    lengths = [
        [int((r > 0).sum()) for r in (b.ids != 9)]
        for b in make([supervised_row([1] * n, [1] * n) for n in (3, 30, 5, 31)])
    ]
    assert lengths == [[31, 30], [5, 3]]


def test_weights_sum_to_one_where_the_loss_is_a_mean():
    some = [*rows(3), Row(np.arange(5, dtype=np.int32), np.zeros(5), np.zeros(5), np.zeros(5), np.ones(5))]
    for mode in ("token-mean", "sequence-mean-token-mean"):
        weights = row_weights(some, mode, 1)
        assert sum(w * row.n_tokens for w, row in zip(weights, some, strict=True)) == pytest.approx(1.0)


def test_too_long_and_too_many_are_refused():
    with pytest.raises(DecodeError, match="exceeds the longest bucket, 32"):
        make([supervised_row([1] * 40, [1] * 40)])
    with pytest.raises(DecodeError, match="do not fit"):
        make(rows(5))


def test_policy_rows_mark_tokens_of_the_trained_version():
    groups = [group(1, "e000002-s000003"), group(2, "e000001-s000002")]
    made = [policy_rows(t, WeightVersion(2, 3))[0] for one in groups for t in one.trajectories]
    assert [bool(row.current.any()) for row in made] == [True, True, False, False]
    assert np.array_equal(made[0].current, made[0].mask)


def test_an_episode_that_does_not_count_has_no_trainable_token():
    trajectory = group(1, "e000002-s000003").trajectories[0]
    row = left_out(policy_rows(trajectory, WeightVersion(2, 3))[0])
    assert (row.n_tokens, trajectory.n_sampled > 0) == (0, True)
    assert not make([row], 1)[0].current.any()


def test_what_is_computed_of_micro_batches_comes_back_to_the_tokens_of_its_rows():
    some = rows(5)
    parts = arranged(some, LAYOUT, 3)
    tables = [batch.targets.astype(np.float32) for batch in make(some, 3)]
    for row, found in zip(some, by_row(tables, some, parts), strict=True):
        assert found.tolist() == np.where(row.mask > 0, row.ids, 0).tolist()
