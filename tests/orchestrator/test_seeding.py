"""Tickets to tasks: a permutation for each pass, the same everywhere."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.run.seeding import TaskOrder, env_seed, sampling_seed


@given(seed=st.integers(0, 2**31), n_tasks=st.integers(1, 300), turn=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_pass_meets_every_task_once(seed, n_tasks, turn):
    order = TaskOrder(seed, n_tasks)
    first = turn * n_tasks + 1
    assert sorted(order.index(t) for t in range(first, first + n_tasks)) == list(range(n_tasks))


def test_passes_and_seeds_have_orders_of_their_own():
    order = TaskOrder(0, 50)
    passes = [tuple(order.index(t) for t in range(p * 50 + 1, p * 50 + 51)) for p in range(4)]
    other = tuple(TaskOrder(1, 50).index(t) for t in range(1, 51))
    assert len({*passes, other}) == 5


def test_a_huge_split_costs_nothing():
    order = TaskOrder(3, 2**31 - 1)
    drawn = [order.index(t) for t in range(1, 2001)]
    assert len(set(drawn)) == 2000
    assert max(drawn) < 2**31 - 1
    assert max(drawn) > 2**30


def test_the_first_tickets_are_spread_evenly():
    order = TaskOrder(0, 1000)
    firsts = [TaskOrder(seed, 1000).index(1) for seed in range(2000)]
    assert abs(sum(firsts) / 2000 - 499.5) < 30
    assert len(set(firsts)) > 800
    assert order.index(1) == TaskOrder(0, 1000).index(1)


def test_seeds_differ_between_siblings_turns_and_tickets_and_fit_31_bits():
    seeds = {sampling_seed(0, t, s, p) for t in range(10) for s in range(8) for p in range(0, 100, 10)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds | {env_seed(0, 1, 1)})
