import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.env.environments.base import assistant
from services.env.episodes import Episodes, Request
from services.env.runner import Runner
from shared.errors import Conflict, NotFound, RateLimited, Unavailable, VolleyError
from tests.env.scripted import Scripted, entry, until

type Open = Callable[..., Episodes]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_episodes(clock: Clock) -> Iterator[Open]:
    with ThreadPoolExecutor(2) as pool:
        yield lambda max_episodes=8, deadline_s=5.0: Episodes(Runner(pool, deadline_s), max_episodes=max_episodes, ttl_s=10, clock=clock)


def task(env: Scripted, index: int = 0, seed: int | None = None) -> Request:
    return Request(entry(env), "train", index, seed)


async def test_create_and_step_have_one_effect_per_request(open_episodes: Open) -> None:
    episodes, env = open_episodes(), Scripted()
    request = task(env)
    first = await episodes.create("r", request)
    answer = await episodes.step(first.id, "s", assistant("a"))
    assert await episodes.create("r", request) is first
    assert await episodes.step(first.id, "s", assistant("a")) is answer
    assert first.opening[0]["content"] == "step 0"
    assert env.calls == [f"reset 0 {first.seed}", "a"]
    assert len(episodes) == 1


async def test_an_answer_is_repeated_after_later_steps_and_after_the_end(open_episodes: Open) -> None:
    episodes, env = open_episodes(), Scripted()
    slot = await episodes.create("r", task(env))
    first = await episodes.step(slot.id, "1", assistant("a"))
    last = await episodes.step(slot.id, "2", assistant("end"))
    assert await episodes.step(slot.id, "1", assistant("a")) is first
    assert await episodes.step(slot.id, "2", assistant("end")) is last


async def test_another_request_under_the_same_id_conflicts(open_episodes: Open) -> None:
    episodes, env = open_episodes(), Scripted()
    slot = await episodes.create("r", task(env))
    with pytest.raises(Conflict, match="'r'"):
        await episodes.create("r", task(env, index=1))
    await episodes.step(slot.id, "s", assistant("a"))
    with pytest.raises(Conflict, match="'s'"):
        await episodes.step(slot.id, "s", assistant("b"))


async def test_a_step_after_the_end_conflicts(open_episodes: Open) -> None:
    episodes = open_episodes()
    slot = await episodes.create("r", task(Scripted()))
    await episodes.step(slot.id, "1", assistant("end"))
    with pytest.raises(Conflict, match="is over"):
        await episodes.step(slot.id, "2", assistant("a"))


async def test_the_same_request_twice_at_once_has_one_effect(open_episodes: Open) -> None:
    episodes, gate = open_episodes(), threading.Event()
    env = Scripted(slow=frozenset({"reset", "step"}), on_reset=until(gate), on_step=until(gate))
    request = task(env, seed=1)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    one, two = await asyncio.gather(episodes.create("r", request), episodes.create("r", request))
    assert one is two
    gate.clear()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    answers = await asyncio.gather(*(episodes.step(one.id, "s", assistant("a")) for _ in range(3)))
    assert answers[0] is answers[1] is answers[2]
    assert env.calls == ["reset 0 1", "a"]


async def test_seeds_come_from_the_request_id_unless_given(open_episodes: Open) -> None:
    episodes, env = open_episodes(), Scripted()
    a, b, c = [await episodes.create(name, task(env)) for name in "abc"]
    assert len({a.seed, b.seed, c.seed}) == 3
    assert (await open_episodes().create("a", task(env))).seed == a.seed
    assert (await episodes.create("d", task(env, seed=7))).seed == 7


async def test_idle_episodes_expire_and_used_ones_do_not(open_episodes: Open, clock: Clock) -> None:
    episodes, env = open_episodes(), Scripted()
    idle, used = await episodes.create("idle", task(env)), await episodes.create("used", task(env))
    clock.now = 9
    await episodes.step(used.id, "1", assistant("a"))
    clock.now = 11
    assert episodes.expire() == 1
    with pytest.raises(NotFound, match=idle.id):
        await episodes.step(idle.id, "1", assistant("a"))
    await episodes.step(used.id, "2", assistant("a"))
    clock.now = 22
    with pytest.raises(NotFound):
        await episodes.step(used.id, "3", assistant("a"))
    assert len(episodes) == 0


async def test_episodes_are_bounded_until_some_expire(open_episodes: Open, clock: Clock) -> None:
    episodes, env = open_episodes(max_episodes=2), Scripted()
    await episodes.create("a", task(env))
    second = await episodes.create("b", task(env))
    with pytest.raises(RateLimited, match="2 episodes are open") as full:
        await episodes.create("c", task(env))
    assert full.value.retry_after_s > 0
    assert await episodes.create("b", task(env)) is second
    clock.now = 11
    await episodes.create("c", task(env))


async def test_deleting_is_idempotent_and_frees_the_request_id(open_episodes: Open) -> None:
    episodes, env = open_episodes(max_episodes=1), Scripted()
    slot = await episodes.create("r", task(env))
    episodes.delete(slot.id)
    episodes.delete(slot.id)
    assert (await episodes.create("r", task(env))).id != slot.id
    assert len(episodes) == 1


async def test_a_failed_reset_leaves_nothing_and_may_be_repeated(open_episodes: Open) -> None:
    episodes, env = open_episodes(), Scripted()
    with pytest.raises(NotFound, match="no task 99"):
        await episodes.create("r", task(env, index=99))
    assert len(episodes) == 0
    await episodes.create("r", task(env))


async def test_a_defect_of_an_environment_is_one_failed_episode(open_episodes: Open) -> None:
    episodes = open_episodes()
    broken, sound = Scripted(on_step=lambda: {}["key"]), Scripted()
    slot, other = await episodes.create("a", task(broken)), await episodes.create("b", task(sound))
    with pytest.raises(VolleyError, match=r"scripted: step failed with KeyError: 'key'") as failure:
        await episodes.step(slot.id, "1", assistant("a"))
    assert failure.value.status == 500
    for _ in range(2):
        with pytest.raises(Conflict, match="KeyError"):
            await episodes.step(slot.id, "1", assistant("a"))
    await episodes.step(other.id, "1", assistant("a"))


@pytest.fixture
def stuck() -> Iterator[Callable[[], object]]:
    """A call that does not end before the test does."""
    gate = threading.Event()
    yield until(gate)
    gate.set()


async def test_a_reset_that_takes_too_long_leaves_nothing(open_episodes: Open, stuck: Callable[[], object]) -> None:
    episodes = open_episodes(deadline_s=0.1)
    with pytest.raises(Unavailable, match="reset took longer than"):
        await episodes.create("r", task(Scripted(slow=frozenset({"reset"}), on_reset=stuck)))
    assert len(episodes) == 0


async def test_a_step_that_takes_too_long_ends_the_episode(open_episodes: Open, stuck: Callable[[], object]) -> None:
    episodes = open_episodes(deadline_s=0.1)
    slot = await episodes.create("r", task(Scripted(slow=frozenset({"step"}), on_step=stuck)))
    with pytest.raises(Unavailable, match="step took longer than"):
        await episodes.step(slot.id, "1", assistant("a"))
    with pytest.raises(Conflict, match="took longer"):
        await episodes.step(slot.id, "1", assistant("a"))


async def test_a_slow_call_does_not_hold_up_the_others(open_episodes: Open) -> None:
    episodes, gate = open_episodes(), threading.Event()
    slow = Scripted(slow=frozenset({"reset"}), on_reset=until(gate))
    async with asyncio.TaskGroup() as group:
        blocked = group.create_task(episodes.create("slow", task(slow)))
        await asyncio.sleep(0)
        quick = await episodes.create("quick", task(Scripted()))
        await episodes.step(quick.id, "1", assistant("a"))
        assert not blocked.done()
        gate.set()
