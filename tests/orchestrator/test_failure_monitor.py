"""What follows when groups fail, by environment: one beside the main one is set aside, the main one ends the run."""

import pytest

from services.orchestrator.schedule.failure_monitor import FailureMonitor
from services.orchestrator.status import RunStatus
from shared.errors import ServiceUnreachable, VolleyError
from shared.types import Group

LATE = 1e12  # started after every earlier failure


class Mixture:
    """Sets aside what is `beside` the main environment."""

    def __init__(self, *beside):
        self.beside, self.aside, self.seen = beside, [], []

    def set_aside(self, env, why):
        if env in self.beside:
            self.aside.append((env, why))
        return env in self.beside

    def ended(self, env, *, failed, ticket):
        self.seen.append((env, failed))


def failed(env, failure="Unavailable"):
    return Group(1, env, "t", (), failure=failure)


def good(env):
    return Group(1, env, "t", ())


def test_the_main_environment_ends_the_run_after_eight_in_a_row_whatever_others_do():
    monitor = FailureMonitor(RunStatus(), Mixture("adder@1"))
    for _ in range(7):
        monitor.count(failed("lake"), LATE)
        monitor.count(good("adder@1"), LATE)
    with pytest.raises(VolleyError, match="8 groups in a row failed, the last with Unavailable"):
        monitor.count(failed("lake"), LATE)


def test_another_one_is_set_aside_after_three_with_its_own_reason():
    status, mixture = RunStatus(), Mixture("adder@1")
    monitor = FailureMonitor(status, mixture)
    status.episode_failed("adder@1", ServiceUnreachable("adder is gone"))
    status.episode_failed("lake", ServiceUnreachable("something else"))
    for _ in range(2):
        monitor.count(failed("adder@1"), 0.0)
    monitor.count(good("adder@1"), 0.0)
    for _ in range(3):
        assert mixture.aside == []
        monitor.count(failed("adder@1"), 0.0)
    reason = "3 groups in a row failed, the last with ServiceUnreachable: adder is gone"
    assert mixture.aside == [("adder@1", reason)]
    assert mixture.seen.count(("adder@1", True)) == 5


def test_groups_of_the_main_environment_that_one_event_broke_count_once():
    monitor = FailureMonitor(RunStatus(), Mixture())
    for _ in range(20):
        monitor.count(failed("lake"), 0.0)


def test_another_one_is_set_aside_when_half_of_its_groups_fail_however_they_alternate():
    """Groups without a failure may be those in which nobody gave the answer that fails."""
    mixture = Mixture("adder@1")
    monitor = FailureMonitor(RunStatus(), mixture)
    for _ in range(16):
        assert mixture.aside == []
        monitor.count(good("adder@1"), 0.0)
        monitor.count(failed("adder@1"), 0.0)
    assert mixture.aside == [("adder@1", "16 of the last 32 groups failed, the last with Unavailable")]
    for _ in range(12):
        monitor.count(good("adder@1"), 0.0)
        monitor.count(failed("adder@1"), 0.0)
    assert len(mixture.aside) == 1, "it is judged by what came since"
