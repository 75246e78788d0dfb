"""What follows when groups fail, by environment: one beside the main one is set aside, the main one ends the run."""

import pytest

from services.orchestrator.schedule.failure_judge import FailureJudge
from services.orchestrator.status import RunStatus
from shared.errors import ServiceUnreachable, VolleyError
from shared.types import Group

LATE = 1e12  # began after whatever failed before


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
    judge = FailureJudge(RunStatus(), Mixture("adder@1"))
    for _ in range(7):
        judge.ended(failed("lake"), LATE)
        judge.ended(good("adder@1"), LATE)
    with pytest.raises(VolleyError, match="8 groups in a row failed, the last with Unavailable"):
        judge.ended(failed("lake"), LATE)


def test_another_one_is_set_aside_after_three_with_its_own_reason():
    status, mixture = RunStatus(), Mixture("adder@1")
    judge = FailureJudge(status, mixture)
    status.episode_failed("adder@1", ServiceUnreachable("adder is gone"))
    status.episode_failed("lake", ServiceUnreachable("something else"))
    for _ in range(2):
        judge.ended(failed("adder@1"), 0.0)
    judge.ended(good("adder@1"), 0.0)
    for _ in range(3):
        assert mixture.aside == []
        judge.ended(failed("adder@1"), 0.0)
    reason = "3 groups in a row failed, the last with ServiceUnreachable: adder is gone"
    assert mixture.aside == [("adder@1", reason)]
    assert mixture.seen.count(("adder@1", True)) == 5


def test_groups_of_the_main_environment_that_one_event_broke_count_once():
    judge = FailureJudge(RunStatus(), Mixture())
    for _ in range(20):
        judge.ended(failed("lake"), 0.0)


def test_another_one_is_set_aside_when_half_of_its_groups_fail_however_they_alternate():
    """Groups without a failure may be those in which nobody gave the answer that fails."""
    mixture = Mixture("adder@1")
    judge = FailureJudge(RunStatus(), mixture)
    for _ in range(16):
        assert mixture.aside == []
        judge.ended(good("adder@1"), 0.0)
        judge.ended(failed("adder@1"), 0.0)
    assert mixture.aside == [("adder@1", "16 of the last 32 groups failed, the last with Unavailable")]
    for _ in range(12):
        judge.ended(good("adder@1"), 0.0)
        judge.ended(failed("adder@1"), 0.0)
    assert len(mixture.aside) == 1, "it is judged by what came since"
