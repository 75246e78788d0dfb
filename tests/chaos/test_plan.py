"""The list of faults: a pure function of the seed, with as many of each kind as was asked for, and none that undo the
test itself.
"""

from __future__ import annotations

from itertools import chain, islice

from tools.chaos.plan import LINKS, TARGETS, Amounts, Round, counts, endless, kills, plan

CI = Amounts(kills=300, wipes=10, zombies=20)


def ends_a_trainer(faults: Round) -> int:
    return sum(fault.at == "trainer" and fault.kind in ("kill", "zombie") for fault in faults)


def test_the_same_seed_is_the_same_plan():
    assert plan(7, CI) == plan(7, CI)
    assert plan(7, CI) != plan(8, CI)
    assert list(islice(endless(7), 20)) == list(islice(endless(7), 20))


def test_it_has_what_was_asked_for():
    faults = list(chain(*plan(1, CI)))
    assert sum(kills(faults).values()) == 300
    assert (counts(faults)["wipe"], counts(faults)["zombie"]) == (10, 20)
    assert kills(faults).keys() == set(TARGETS)
    assert min(kills(faults).values()) >= 5


def test_every_kind_and_every_link_is_there():
    faults = list(chain(*plan(1, CI)))
    assert counts(faults).keys() == {"kill", "pause", "wipe", "zombie", "disk_full", "delay", "stall", "cut"}
    assert {fault.at for fault in faults if fault.kind in ("delay", "stall", "cut")} == set(LINKS)
    assert max(fault.for_s for fault in faults if fault.kind == "pause") > 10


def test_small_plans_are_plans():
    assert sum(kills(chain(*plan(3, Amounts(6, 0, 0)))).values()) == 6
    assert counts(chain(*plan(3, Amounts(0, 1, 1))))["zombie"] == 1


def test_a_round_ends_one_trainer_at_most():
    for faults in (*plan(1, CI), *islice(endless(1), 50)):
        assert ends_a_trainer(faults) <= 1


def test_redis_forgets_nothing_while_there_is_a_zombie():
    for faults in (*plan(1, CI), *islice(endless(1), 50)):
        if any(fault.kind == "zombie" for fault in faults):
            assert not any(fault.at == "redis" and fault.kind in ("kill", "flush", "lose") for fault in faults)


def test_a_run_on_a_clock_meets_every_kind_soon():
    faults = list(chain(*islice(endless(2), 5)))
    assert counts(faults).keys() == {"kill", "pause", "wipe", "zombie", "disk_full", "delay", "stall", "cut"}
    assert kills(faults).keys() >= {"env", "orchestrator", "trainer", "rollout-0", "rollout-1"}


def test_half_of_the_rounds_with_kills_spare_the_orchestrator():
    storms = [faults for faults in plan(1, CI) if sum(fault.kind == "kill" for fault in faults) > 1]
    spared = [
        faults for faults in storms if not any(fault.kind == "kill" and fault.at == "orchestrator" for fault in faults)
    ]
    assert len(spared) == len(storms) // 2
