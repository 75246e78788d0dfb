"""Mixtures of a run that goes on: who joins, leaves, is set aside and comes back; no ticket changes its task."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from services.orchestrator.mixture.suspension import Suspensions
from shared.errors import DecodeError, InputError, QueueUnavailable, StorageUnavailable, Unavailable, VolleyError
from shared.run.seeding import TaskOrder
from tests.orchestrator.fakes import MemoryQueue
from tests.orchestrator.mixtures import MixtureUnderTest, RowSource, row

BOTH = {"frozen_lake": 2, "sokoban": 1}


async def test_a_run_with_one_environment_is_what_it_was_and_writes_no_file(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look()
    order = TaskOrder(7, 20)
    assert await run.tasks(60) == [("frozen_lake", order.index(ticket)) for ticket in range(1, 61)]
    assert list(tmp_path.iterdir()) == []


async def test_a_configured_mixture_divides_the_tickets_and_meets_every_task_once_a_pass(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 3, "sokoban": 1})
    await run.look()
    tasks = await run.tasks(80)
    assert Counter(env for env, _ in tasks) == {"frozen_lake": 60, "sokoban": 20}
    for env, passes in (("frozen_lake", 3), ("sokoban", 1)):
        indices = [index for name, index in tasks if name == env]
        assert all(sorted(indices[p * 20 : p * 20 + 20]) == list(range(20)) for p in range(passes))


async def test_what_becomes_active_joins_at_once_and_what_is_retired_leaves(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look()
    assert await run.play(5) == ["frozen_lake"] * 5
    await run.look(row("adder@1"))
    assert await run.play(1) == ["adder@1"]
    assert Counter(await run.play(40)) == {"frozen_lake": 20, "adder@1": 20}
    await run.look(row("adder@1", "retired"))
    assert await run.play(10) == ["frozen_lake"] * 10
    assert [change.why for change in run.lines()] == ["adder@1 joined", "adder@1 left"]


async def test_a_canary_has_one_group_in_twenty_until_it_is_active(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1", "canary", 3))
    assert await run.play(1) == ["adder@1"]
    assert Counter(await run.play(200)) == {"frozen_lake": 190, "adder@1": 10}
    await run.look(row("adder@1", "active", 3))
    assert Counter(await run.play(80)) == {"frozen_lake": 20, "adder@1": 60}


async def test_many_canaries_have_a_fifth_of_the_groups_together(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(*(row(f"e{i}@1", "canary") for i in range(10)))
    await run.play(10)
    assert Counter(await run.play(100)) == {"frozen_lake": 80} | {f"e{i}@1": 2 for i in range(10)}


async def test_two_versions_are_two_environments(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"), row("adder@2", "canary"))
    await run.play(2)
    assert Counter(await run.play(400)) == {"frozen_lake": 190, "adder@1": 190, "adder@2": 20}
    await run.look(row("adder@2"))
    assert Counter(await run.play(40)) == {"frozen_lake": 20, "adder@2": 20}


async def test_a_version_of_what_is_configured_without_one_does_not_join_beside_it(tmp_path):
    run = MixtureUnderTest(tmp_path, members={"frozen_lake": 1, "adder": 1})
    await run.look(row("adder@1"), row("adder@2", "canary"))
    assert Counter(await run.play(20)) == {"frozen_lake": 10, "adder": 10}


@pytest.mark.parametrize(
    "one",
    [
        row("adder@1", "submitted"),
        row("adder@1", "validating"),
        row("adder@1", "rejected"),
        row("adder@1", weight=0),
        {"name": "adder@1"},
    ],
)
async def test_what_is_not_ready_or_has_no_weight_does_not_join(tmp_path, one):
    run = MixtureUnderTest(tmp_path)
    await run.look(one)
    assert await run.play(30) == ["frozen_lake"] * 30
    assert not run.path.exists()


@pytest.mark.parametrize("rows", [[{"name": "b@1", "weight": "x"}], [{"weight": 1}], [3], None])
async def test_a_list_that_cannot_be_read_changes_nothing(tmp_path, rows):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    run.source.rows = rows
    with pytest.raises(VolleyError):
        await run.look()
    assert Counter(await run.play(41)) == {"frozen_lake": 20, "adder@1": 21}


async def test_what_could_not_be_read_back_is_not_written(tmp_path):
    run = MixtureUnderTest(tmp_path)
    with pytest.raises(DecodeError):
        await run.look(row("a" * 300 + "@1"))
    assert not run.path.exists()
    assert await run.play(3) == ["frozen_lake"] * 3


async def test_a_service_that_is_away_is_waited_for(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    run.source.away = True
    watching = asyncio.ensure_future(run.mixture.watch())
    await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
    assert Counter(await run.play(41)) == {"frozen_lake": 20, "adder@1": 21}


async def test_what_does_not_tell_its_tasks_joins_when_it_does(tmp_path):
    run = MixtureUnderTest(tmp_path)
    run.source.sizes["adder@1"] = (0, 4)
    await run.look(row("adder@1"))
    assert await run.play(3) == ["frozen_lake"] * 3
    assert told(run)["adder@1"]["reason"] == "adder@1 has no tasks to train on"
    run.source.sizes["adder@1"] = (5, None)
    await run.look()
    assert await run.play(1) == ["adder@1"]
    assert run.lines()[-1].sizes == {"adder@1": (5, 0)}


async def test_a_restart_gives_every_ticket_the_same_task_whatever_joined_or_left(tmp_path):
    run = MixtureUnderTest(tmp_path, members=BOTH)
    await run.play(7)
    await run.look(row("adder@1", "canary"))
    await run.play(9)
    await run.look(row("adder@1"), row("words@3", weight=2))
    await run.play(13)
    await run.look(row("words@3", weight=2))
    await run.play(11)
    before = await run.tasks(40)
    assert {"adder@1", "words@3"} < {env for env, _ in before}
    away = RowSource(away=True)
    again = MixtureUnderTest(tmp_path, away, BOTH, run.queue)
    with suppress(VolleyError):
        await again.look()
    assert await again.tasks(40) == before
    assert await again.tasks(80) == await run.tasks(80)
    away.away, away.sizes["words@3"] = False, (999, 999)
    await again.look(row("words@3", weight=2))
    assert await again.tasks(40) == before


async def test_two_orchestrators_of_a_run_agree_on_every_ticket(tmp_path):
    queue, source = MemoryQueue(), RowSource()
    one, other = (MixtureUnderTest(tmp_path, source, queue=queue) for _ in range(2))
    await one.play(4)
    await other.look(row("adder@1"))
    assert await one.play(1) == ["adder@1"]
    await one.look()
    assert len(one.lines()) == 1
    assert await one.tasks(50) == await other.tasks(50)


async def test_tickets_reserved_while_the_mixture_changes_are_the_same_in_both_processes(tmp_path):
    queue, source = MemoryQueue(), RowSource()
    one, other = (MixtureUnderTest(tmp_path, source, queue=queue) for _ in range(2))
    seen: list[str] = []

    async def reserve():
        for _ in range(60):
            seen.extend(await one.play(1))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(reserve())
        for n in range(1, 6):
            await other.look(*(row(f"e{i}@1") for i in range(n)))
            await asyncio.sleep(0.005)
    assert len(other.lines()) == 5
    assert seen == [env for env, _ in await other.tasks(60)]


async def test_a_torn_line_was_never_in_force(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    await run.play(10)
    before = await run.tasks(10)
    (whole,) = run.path.read_bytes().splitlines()
    with run.path.open("ab") as file:
        file.write(whole.replace(b'"from_ticket":1', b'"from_ticket":3').replace(b"adder@1", b"frozen_lake"))
    again = MixtureUnderTest(tmp_path, run.source, queue=run.queue)
    assert await again.tasks(10) == before
    await again.look(row("adder@1"), row("words@1"))
    assert await again.tasks(10) == before
    assert [change.from_ticket for change in again.lines()] == [1, 11]
    assert await MixtureUnderTest(tmp_path, queue=run.queue).tasks(30) == await again.tasks(30) == await run.tasks(30)


@pytest.mark.parametrize("kept", [None, 0, 20])
async def test_a_file_that_is_removed_or_cut_is_written_again(tmp_path, kept):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    await run.play(10)
    await run.look(row("adder@1"), row("words@1"))
    before, written = await run.tasks(10), run.path.read_bytes()
    if kept is None:
        run.path.unlink()
    else:
        run.path.write_bytes(written[:kept])
    assert await run.tasks(10) == before
    assert run.path.read_bytes() == written
    run.path.unlink()
    await run.look(row("words@1"))
    assert run.path.read_bytes().startswith(written)
    assert len(run.lines()) == 3
    assert await MixtureUnderTest(tmp_path, queue=run.queue).tasks(30) == await run.tasks(30)


async def test_a_queue_that_was_wiped_gives_no_ticket_another_task(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.play(12)
    run.queue.issued = 3
    await run.look(row("adder@1"))
    assert run.lines()[0].from_ticket == 13
    assert await run.play(10) == ["frozen_lake"] * 9 + ["adder@1"]


async def test_who_was_to_play_first_still_does_when_another_one_joins_before(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    await run.look(row("adder@1"), row("words@1"))
    assert await run.play(2) == ["adder@1", "words@1"]


async def test_a_change_that_cannot_be_written_is_made_later(tmp_path):
    run = MixtureUnderTest(tmp_path)
    run.queue.away = 1
    with pytest.raises(QueueUnavailable):
        await run.look(row("adder@1"))
    run.path.mkdir()
    with pytest.raises((StorageUnavailable, OSError)):
        await run.look()
    run.path.rmdir()
    await run.look()
    assert await run.play(1) == ["adder@1"]


async def test_a_persons_weights_outrank_all_others_and_last(tmp_path):
    run = MixtureUnderTest(tmp_path, members=BOTH)
    await run.look(row("adder@1", weight=100))
    await run.mixture.choose({"adder": 1, "frozen_lake": 1, "sokoban": 0})
    await run.play(1)
    assert Counter(await run.play(20)) == {"frozen_lake": 10, "adder@1": 10}
    written = run.path.read_bytes()
    await run.mixture.choose({"adder": 1, "sokoban": 0})
    assert run.path.read_bytes() == written
    again = MixtureUnderTest(tmp_path, run.source, BOTH, run.queue)
    await again.look(row("adder@2", weight=100))
    await again.play(1)
    assert Counter(await again.play(20)) == {"frozen_lake": 10, "adder@2": 10}


async def test_a_person_may_add_what_does_not_join_by_itself(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look()
    await run.mixture.choose({"sokoban": 1})
    assert await run.play(1) == ["sokoban"]
    await run.mixture.choose({"sokoban": 0})
    assert await run.play(5) == ["frozen_lake"] * 5


async def test_what_is_wrong_with_a_wish_is_told(tmp_path):
    run = MixtureUnderTest(tmp_path)
    with pytest.raises(Unavailable, match="has not answered yet"):
        await run.mixture.choose({"sokoban": 1})
    await run.look(row("adder@1"))
    with pytest.raises(InputError, match="there is no environment 'chess'") as caught:
        await run.mixture.choose({"chess": 1})
    assert caught.value.hint == "known: adder, frozen_lake, sokoban"
    with pytest.raises(InputError, match="nothing would be left"):
        await run.mixture.choose({"frozen_lake": 0, "adder": 0})
    await run.mixture.choose({"frozen_lake": 0})
    await run.play(1)
    assert await run.play(9) == ["adder@1"] * 9
    await run.look(row("adder@1", "retired"))
    assert await run.play(3) == ["frozen_lake"] * 3


async def test_the_description_tells_weights_shares_and_states(tmp_path):
    run = MixtureUnderTest(tmp_path, members=BOTH)
    await run.look(row("adder@1", weight=1), row("words@2", "canary"))
    rows = told(run)
    assert {env: (one["state"], one["weight"], one["share"]) for env, one in rows.items()} == {
        "frozen_lake": ("configured", 2.0, 0.475),
        "sokoban": ("configured", 1.0, 0.2375),
        "adder@1": ("active", 1.0, 0.2375),
        "words@2": ("canary", 1.0, 0.05),
    }
    await run.mixture.choose({"sokoban": 0})
    assert told(run)["sokoban"]["state"] == "removed"


async def test_what_is_evaluated_beside_the_main_environment(tmp_path):
    run = MixtureUnderTest(tmp_path, members=BOTH)
    assert run.mixture.evaluated() == {"sokoban": 8}
    run.source.sizes["words@2"] = (5, None)
    await run.look(row("adder@1"), row("words@2", "canary"))
    assert run.mixture.evaluated() == {"adder@1": 4, "sokoban": 8, "words@2": 0}
    await run.mixture.choose({"sokoban": 0})
    run.mixture.set_aside("adder@1", "gone")
    await run.look()
    assert run.mixture.evaluated() == {"sokoban": 8, "words@2": 0}


async def test_what_only_fails_is_set_aside_and_tried_again_until_it_is_back(tmp_path):
    now = [0.0]
    run = MixtureUnderTest(tmp_path, suspensions=Suspensions(lambda: now[0]))
    await run.look(row("adder@1"))
    await run.play(4)
    assert run.mixture.set_aside("adder@1", "3 groups in a row failed, the last with EpisodeTimeout")
    await run.look()
    assert await run.play(5) == ["frozen_lake"] * 5
    assert told(run)["adder@1"] | {"weight": 1.0, "share": 0.0, "state": "suspended"} == told(run)["adder@1"]
    assert "EpisodeTimeout" in told(run)["adder@1"]["reason"]
    for wait_s in (15, 30, 60, 120, 240, 240):
        now[0] += wait_s - 1
        await run.look()
        assert await run.play(2) == ["frozen_lake"] * 2
        now[0] += 1
        await run.look()
        assert await run.play(2) == ["adder@1", "frozen_lake"]
        await run.look()
        assert await run.play(1) == ["frozen_lake"]
        run.mixture.ended("adder@1", failed=False, ticket=4)  # one of those before it was set aside
        run.mixture.ended("adder@1", failed=True, ticket=run.queue.issued)
    now[0] += 240
    await run.look()
    await run.play(1)
    run.mixture.ended("adder@1", failed=False, ticket=run.queue.issued)
    await run.look()
    assert Counter(await run.play(10)) == {"frozen_lake": 5, "adder@1": 5}
    assert run.lines()[-1].why == "adder@1 is back"
    again = MixtureUnderTest(tmp_path, run.source, queue=run.queue)
    assert await again.tasks(60) == await run.tasks(60)


async def test_a_trial_of_which_nothing_is_heard_is_made_again(tmp_path):
    now = [0.0]
    run = MixtureUnderTest(tmp_path, suspensions=Suspensions(lambda: now[0]))
    await run.look(row("adder@1"))
    await run.play(4)
    run.mixture.set_aside("adder@1", "gone")
    await run.look()
    for wait_s in (15, 240):
        now[0] += wait_s - 1
        await run.look()
        assert await run.play(2) == ["frozen_lake"] * 2
        now[0] += 1
        await run.look()
        assert await run.play(2) == ["adder@1", "frozen_lake"]


async def test_what_is_set_aside_stays_so_after_a_restart_until_its_trial(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    await run.play(1)
    run.mixture.set_aside("adder@1", "gone")
    await run.look()
    now = [0.0]
    again = MixtureUnderTest(tmp_path, run.source, queue=run.queue, suspensions=Suspensions(lambda: now[0]))
    await again.look()
    assert await again.play(4) == ["frozen_lake"] * 4
    now[0] = 15
    await again.look()
    assert await again.play(2) == ["adder@1", "frozen_lake"]


async def test_neither_the_main_nor_the_last_environment_is_set_aside(tmp_path):
    run = MixtureUnderTest(tmp_path)
    await run.look(row("adder@1"))
    assert not run.mixture.set_aside("frozen_lake", "gone")
    await run.mixture.choose({"frozen_lake": 0})
    assert not run.mixture.set_aside("adder@1", "gone")


def told(run):
    return {one["env"]: one for one in run.mixture.describe()}
