"""Every requirement that is broken is named; nothing is broken without a name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.types import WeightVersion
from tools.chaos.arena import Sighting, Zombie
from tools.chaos.plan import Fault
from tools.chaos.siege import InjectedFault, SiegeLog
from tools.chaos.verdict import Evidence, judge, spread

AT = WeightVersion(3, 14)
PROVEN = {"ok": True, "redis": "agrees", "lost": 0, "doubly_trained": 0, "violations": []}
SOUND = Evidence(None, None, 0, 5, [], [], PROVEN, [Zombie(AT, True, "Fenced")], None)


def proof(kind: str, **more: int) -> dict[str, object]:
    violation = {"kind": kind, "detail": "because", "ticket": 7, "step": None, "file": None}
    return {**PROVEN, "ok": False, "violations": [violation], **more}


def test_a_sound_run_breaks_nothing():
    assert judge(SOUND) == []


@pytest.mark.parametrize(
    ("change", "named", "detail"),
    [
        ({"unfinished": "trainer ended with exit code 2"}, "finished", "exit code 2"),
        ({"stuck": "after kill env: env did not become ready"}, "progress", "after kill env"),
        ({"skipped": 3}, "plan", "3 planned faults"),
        ({"proof": proof("lost", lost=1)}, "lost", "1 tickets"),
        ({"proof": proof("doubly_trained", doubly_trained=2)}, "doubly_trained", "2 tickets"),
        ({"proof": proof("staleness")}, "staleness", "ticket 7: because"),
        ({"proof": proof("digest")}, "verify", "digest: ticket 7: because"),
        ({"zombies": [Zombie(AT, False, "still there")]}, "zombie", "e000003-s000014 did not end fenced: still there"),
        ({"injected": 0}, "plan", "no fault"),
        ({"crashed": ["env: worker crashed: KeyError"]}, "crashed", "env: worker crashed"),
        ({"idle": ["env"]}, "links", "the link to env"),
        ({"proof": PROVEN | {"redis": "differs"}}, "redis", "differs"),
        ({"unlike": "2 of 3 files differ"}, "bit_identical", "2 of 3 files differ"),
    ],
)
def test_each_broken_requirement_is_named(change: dict[str, object], named: str, detail: str):
    broken = judge(replace(SOUND, **change))
    assert named in {one.requirement for one in broken}
    assert any(detail in one.detail for one in broken)


def test_recovery_counts_to_readiness_and_to_the_next_durable_step():
    seen = [Sighting(1.0, WeightVersion(1, 1)), Sighting(5.0, WeightVersion(2, 1)), Sighting(7.0, WeightVersion(2, 2))]
    log = SiegeLog(
        injected=[
            InjectedFault(Fault("kill", "env"), 3.0, 4.0, 0.5),
            InjectedFault(Fault("cut", "redis"), 8.0, 8.0, 0.1),
        ],
        durable=seen,
    )
    assert log.recoveries() == {"env": [0.5], "run": [3.0], "redis": [0.1]}


def test_the_spread_is_median_and_maximum():
    assert spread({"env": [1.0, 2.0, 9.0], "none": []}) == {"env": {"median": 2.0, "max": 9.0}}
