from dataclasses import replace

import numpy as np

from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from shared.queue.records import StreamEntry
from shared.routing import RoutingShape
from shared.run.progress import TicketProgress
from shared.types import Branch, Group, VersionSpan
from tests.trainer.support import group

RULES = AdmissionRules(order="ticket", max_staleness=1, longest=32, vocab_size=96, group_size=2)
LINEAGE = ((1, 0), (2, 4))


def entry(made: Group, deliveries: int = 1, ticket: int | None = None) -> StreamEntry:
    return StreamEntry(f"{made.ticket}-0", ticket or made.ticket, made.encode(), deliveries)


def buffer(low: int = 0, **rules) -> GroupBuffer:
    return GroupBuffer(
        TicketProgress(low),
        LINEAGE,
        AdmissionRules(**{**{f: getattr(RULES, f) for f in RULES.__dataclass_fields__}, **rules}),
    )


def offered(one: GroupBuffer, *tickets: int, version: str = "e000002-s000004") -> None:
    for ticket in tickets:
        assert one.offer(entry(group(ticket, version))) is None


def tickets(held) -> list[int] | None:
    return held and [h.group.ticket for h in held]


def test_ticket_order_waits_for_the_next_ticket():
    one = buffer()
    offered(one, 3, 2)
    assert one.take(2) is None
    offered(one, 1)
    assert tickets(one.take(2)) == [1, 2]
    assert one.progress.low == 2


def test_arrival_order_takes_what_is_there():
    one = buffer(order="arrival")
    offered(one, 3, 2)
    assert tickets(one.take(2)) == [3, 2]
    assert one.progress.done == {2, 3}


def test_all_sequences_of_an_episode_are_checked_and_dated():
    made = group(1, "e000002-s000004", length=20)
    span = VersionSpan("e000001-s000003", 20, 21)
    branch = Branch(0, 20, np.array([95], np.int32), np.ones(1, np.uint8), np.float32([-1]), (span,), ())

    def with_branch(**changes) -> Group:
        trees = [replace(t, branches=(replace(branch, **changes),)) for t in made.trajectories]
        return replace(made, trajectories=tuple(trees))

    one = buffer(longest=21)
    assert one.offer(entry(with_branch())) is None
    (held,) = one.take(1) or ()
    assert (str(held.oldest), str(held.newest)) == ("e000001-s000003", "e000002-s000004")
    experts = np.zeros((1, 2, 2), np.uint8)
    for rules, changes, why in (
        ({"longest": 20}, {}, "21 tokens"),
        ({}, {"token_ids": np.array([96], np.int32)}, "outside the vocabulary"),
        ({}, {"routed_experts": experts}, "the model has none"),
        ({"routing": RoutingShape(2, 4, 3)}, {"routed_experts": experts}, "experts of 2 layers"),
        ({"has_teacher": True}, {}, "no teacher"),
        ({"components": ("goal",)}, {}, "no reward component 'goal'"),
    ):
        dropped = buffer(**rules).offer(entry(with_branch(**changes)))
        assert dropped is not None
        assert (dropped.reason, why in dropped.detail) == ("poison", True)


def test_void_tickets_do_not_hold_up_ticket_order():
    one = buffer()
    offered(one, 2, 3)
    dropped = one.offer(entry(Group(1, "toy", "t", (), failure="Timeout")))
    assert dropped is not None
    assert (dropped.reason, dropped.detail) == ("failed", "Timeout")
    assert tickets(one.take(2)) == [2, 3]
    assert (one.progress.low, one.progress.void, one.progress.n_trained) == (3, 1, 2)


def test_duplicates_and_finished_tickets_are_ignored():
    one = buffer(low=5)
    offered(one, 5, 6, 6)
    assert one.n_waiting == 1


def test_staleness_is_judged_when_a_step_would_take_the_group():
    one = buffer()
    offered(one, 1, version="e000002-s000004")
    assert one.expire(5) == []
    (dropped,) = one.expire(6)
    assert (dropped.reason, dropped.entry.ticket, str(dropped.versions[0])) == ("stale", 1, "e000002-s000004")
    assert one.progress.is_finished(1)


def test_tokens_of_weights_that_are_not_made_yet_are_superseded():
    one = buffer()
    offered(one, 1, version="e000002-s000005")
    offered(one, 2, version="e000002-s000006")
    (dropped,) = one.expire(5)
    assert (dropped.reason, dropped.entry.ticket) == ("superseded", 2)
    assert tickets(one.take(1)) == [1]
    dropped = buffer().offer(entry(group(3, "e000003-s000004")))
    assert dropped is not None
    assert dropped.reason == "superseded"


def test_tokens_of_an_undone_lineage_are_superseded():
    assert buffer().offer(entry(group(1, "e000001-s000004"))) is None
    dropped = buffer().offer(entry(group(1, "e000001-s000005")))
    assert dropped is not None
    assert dropped.reason == "superseded"
    dropped = buffer().offer(entry(group(1, "e000002-s000003")))
    assert dropped is not None


def test_poison():
    good = group(1, "e000002-s000004")
    cases = {
        "msgpack": StreamEntry("1-0", 1, b"\x91", 1),
        "2 trainers ended": entry(good, deliveries=3),
        "says ticket 1": entry(good, ticket=7),
        "4 episodes": entry(Group(1, "toy", "t", good.trajectories * 2)),
        "exceeds the longest bucket": entry(group(1, "e000002-s000004", length=40)),
        "outside the vocabulary": entry(group(1, "e000002-s000004", vocab=5000)),
    }
    for detail, poisoned in cases.items():
        dropped = buffer().offer(poisoned)
        assert dropped is not None
        assert dropped.reason == "poison"
        assert detail in dropped.detail
