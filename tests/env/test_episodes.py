import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from services.env.backend import demonstrations
from services.env.episode_slots import EpisodeRequest
from services.env.episode_types import Demonstration, Message, StepResult, assistant
from services.env.episodes import MAX_STEPS, Episodes
from services.env.threads import ThreadRunner
from shared.errors import Busy, Conflict, GivenUp, NotFound, RateLimited, Unavailable, VolleyError
from tests.env.scripted import ScriptedEnvironment, entry, until
from tests.support.loop_clock import skip

DEADLINE_S = 120.0
"""Deadline of a call. Too long for any machine to reach it; tests of it move the clock."""


class EpisodeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> EpisodeClock:
    return EpisodeClock()


class ScriptedEpisodes(Episodes):
    """The service's episodes, with the threads that their environments share."""

    def __init__(self, runner: ThreadRunner, max_episodes: int, clock: EpisodeClock) -> None:
        super().__init__(max_episodes=max_episodes, ttl_s=10, deadline_s=runner.deadline_s, clock=clock)
        self.runner = runner

    def task(
        self, env: ScriptedEnvironment, index: int = 0, seed: int | None = None, kind: str = "scripted"
    ) -> EpisodeRequest:
        return EpisodeRequest("scripted", "train", index, seed, entry(env, self.runner, kind))


type Open = Callable[..., ScriptedEpisodes]


@pytest.fixture
def open_episodes(clock: EpisodeClock) -> Iterator[Open]:
    runners: list[ThreadRunner] = []

    def make(max_episodes: int = 8, n_threads: int = 2) -> ScriptedEpisodes:
        runners.append(ThreadRunner(n_threads, DEADLINE_S, max_waiting=8))
        return ScriptedEpisodes(runners[-1], max_episodes, clock)

    yield make
    for runner in runners:
        runner.close()


async def test_create_and_step_have_one_effect_per_request(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    request = episodes.task(env)
    first = await episodes.create("r", request)
    answer = await episodes.step(first.id, "s", assistant("a"))
    assert await episodes.create("r", request) is first
    assert await episodes.step(first.id, "s", assistant("a")) is answer
    assert first.opening[0]["content"] == "step 0"
    assert env.calls == [f"reset 0 {first.seed}", "a"]
    assert len(episodes) == 1


async def test_an_answer_is_repeated_after_later_steps_and_the_last_one_after_the_end(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    slot = await episodes.create("r", episodes.task(env))
    first = await episodes.step(slot.id, "1", assistant("a"))
    await episodes.step(slot.id, "2", assistant("b"))
    assert await episodes.step(slot.id, "1", assistant("a")) is first
    last = await episodes.step(slot.id, "3", assistant("end"))
    assert await episodes.step(slot.id, "3", assistant("end")) is last
    with pytest.raises(Conflict, match="is over"):
        await episodes.step(slot.id, "1", assistant("a"))


async def test_another_request_under_the_same_id_conflicts(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    slot = await episodes.create("r", episodes.task(env))
    with pytest.raises(Conflict, match="'r'"):
        await episodes.create("r", episodes.task(env, index=1))
    await episodes.step(slot.id, "s", assistant("a"))
    with pytest.raises(Conflict, match="'s'"):
        await episodes.step(slot.id, "s", assistant("b"))


async def test_a_step_after_the_end_conflicts(open_episodes: Open) -> None:
    episodes = open_episodes()
    slot = await episodes.create("r", episodes.task(ScriptedEnvironment()))
    await episodes.step(slot.id, "1", assistant("end"))
    with pytest.raises(Conflict, match="is over"):
        await episodes.step(slot.id, "2", assistant("a"))


async def test_the_same_request_twice_at_once_has_one_effect(open_episodes: Open) -> None:
    episodes, gate = open_episodes(), threading.Event()
    env = ScriptedEnvironment(on_reset=until(gate), on_step=until(gate))
    request = episodes.task(env, seed=1)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    one, two = await asyncio.gather(episodes.create("r", request), episodes.create("r", request))
    assert one is two
    gate.clear()
    asyncio.get_running_loop().call_later(0.05, gate.set)
    answers = await asyncio.gather(*(episodes.step(one.id, "s", assistant("a")) for _ in range(3)))
    assert answers[0] is answers[1] is answers[2]
    assert env.calls == ["reset 0 1", "a"]


async def test_seeds_come_from_the_request_id_unless_given(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    a, b, c = [await episodes.create(name, episodes.task(env)) for name in "abc"]
    assert len({a.seed, b.seed, c.seed}) == 3
    assert (await open_episodes().create("a", episodes.task(env))).seed == a.seed
    assert (await episodes.create("d", episodes.task(env, seed=7))).seed == 7


async def test_idle_episodes_expire_and_used_ones_do_not(open_episodes: Open, clock: EpisodeClock) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    idle, used = await episodes.create("idle", episodes.task(env)), await episodes.create("used", episodes.task(env))
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


class Lingering:
    """An episode whose end takes long."""

    task, opening, tools, database = "lingers", (), (), None

    def __init__(self) -> None:
        self.ending, self.gate = asyncio.Event(), asyncio.Event()

    async def step(self, message: Message) -> StepResult:
        await self.gate.wait()
        raise AssertionError("it was to be given up")

    async def close(self) -> None:
        self.ending.set()
        await self.gate.wait()


async def test_nobody_waits_for_the_end_of_others_episodes(open_episodes: Open, clock: EpisodeClock) -> None:
    """Of two that have expired and one whose step was given up, each ends beside the others."""
    episodes, env, lingering = open_episodes(), ScriptedEnvironment(), [Lingering() for _ in range(3)]
    sweeping = asyncio.ensure_future(episodes.sweep())
    for n, one in enumerate(lingering):
        slot = await episodes.create(f"lingering {n}", episodes.task(env))
        slot.episode = one
    stepping = asyncio.ensure_future(episodes.step(slot.id, "1", assistant("a")))
    await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    clock.now = 11
    async with asyncio.timeout(30):
        other = await episodes.create("other", episodes.task(env))
        await episodes.step(other.id, "1", assistant("end"))
        await episodes.delete(other.id)
        for one in lingering:
            await one.ending.wait()
            assert not one.gate.is_set()
    sweeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sweeping


async def test_what_nobody_waits_for_is_freed_long_before_the_next_sweep(open_episodes: Open) -> None:
    episodes, lingering = open_episodes(), Lingering()
    episodes.ttl_s = 10_000  # so it looks every 30 s
    sweeping = asyncio.ensure_future(episodes.sweep())
    slot = await episodes.create("r", episodes.task(ScriptedEnvironment()))
    slot.episode = lingering
    await asyncio.sleep(0)
    stepping = asyncio.ensure_future(episodes.step(slot.id, "1", assistant("a")))
    await asyncio.sleep(0)
    stepping.cancel()
    async with asyncio.timeout(20):
        await lingering.ending.wait()
    for task in (stepping, sweeping):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_episodes_are_bounded_until_some_expire(open_episodes: Open, clock: EpisodeClock) -> None:
    episodes, env = open_episodes(max_episodes=2), ScriptedEnvironment()
    await episodes.create("a", episodes.task(env))
    second = await episodes.create("b", episodes.task(env))
    with pytest.raises(RateLimited, match="2 episodes are open") as full:
        await episodes.create("c", episodes.task(env))
    assert full.value.retry_after_s > 0
    assert await episodes.create("b", episodes.task(env)) is second
    clock.now = 11
    await episodes.create("c", episodes.task(env))


async def test_few_episodes_that_are_over_are_kept_and_take_no_place(open_episodes: Open) -> None:
    episodes, env = open_episodes(max_episodes=2), ScriptedEnvironment()
    over = await episodes.create("a", episodes.task(env))
    last = await episodes.step(over.id, "1", assistant("end"))
    assert len(episodes) == 0
    other = await episodes.create("b", episodes.task(env))
    await episodes.create("c", episodes.task(env))
    with pytest.raises(RateLimited):
        await episodes.create("d", episodes.task(env))
    assert await episodes.step(over.id, "1", assistant("end")) is last
    await episodes.step(other.id, "1", assistant("end"))
    with pytest.raises(NotFound):
        await episodes.step(over.id, "1", assistant("end"))
    assert len(episodes) == 1


async def test_of_an_episode_that_is_over_only_its_last_answer_is_kept(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    over = await episodes.create("r", episodes.task(env))
    await episodes.step(over.id, "1", assistant("a"))
    await episodes.step(over.id, "2", assistant("end"))
    assert (over.episode, over.opening, over.tools, list(over.answers)) == (None, (), (), ["2"])
    again = await episodes.create("r", episodes.task(env))
    assert (again.id != over.id, again.seed) == (True, over.seed)
    await episodes.delete(over.id)
    assert await episodes.create("r", episodes.task(env)) is again
    assert len(episodes) == 1


async def test_an_error_among_demonstrations_leaves_no_thread_behind(open_episodes: Open) -> None:
    going, busy = threading.Event(), RateLimited("more layouts are drawn")

    class Drawing(ScriptedEnvironment):
        def demonstration(self, split: str, index: int) -> Demonstration:
            self.calls.append(str(index))
            if index == 1:
                raise busy
            going.wait(60)
            return super().demonstration(split, index)

    runner, env = open_episodes(n_threads=3).runner, Drawing()
    shown = await begun(env, demonstrations(entry(env, runner).backend, "train", range(8)))
    asyncio.get_running_loop().call_later(0.05, going.set)
    with pytest.raises(RateLimited) as error:
        await shown
    assert error.value is busy
    assert sorted(env.calls) == ["0", "1", "2", "3"]
    assert runner.stuck_reason("scripted") is None


async def test_deleting_is_idempotent_and_frees_the_request_id(open_episodes: Open) -> None:
    episodes, env = open_episodes(max_episodes=1), ScriptedEnvironment()
    slot = await episodes.create("r", episodes.task(env))
    await episodes.delete(slot.id)
    await episodes.delete(slot.id)
    assert (await episodes.create("r", episodes.task(env))).id != slot.id
    assert len(episodes) == 1


async def test_a_failed_reset_leaves_nothing_and_may_be_repeated(open_episodes: Open) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment()
    with pytest.raises(NotFound, match="no task 99"):
        await episodes.create("r", episodes.task(env, index=99))
    assert len(episodes) == 0
    await episodes.create("r", episodes.task(env))


async def test_a_defect_of_an_environment_is_one_failed_episode(open_episodes: Open) -> None:
    episodes = open_episodes()
    broken, sound = ScriptedEnvironment(on_step=lambda: {}["key"]), ScriptedEnvironment()
    slot, other = await episodes.create("a", episodes.task(broken)), await episodes.create("b", episodes.task(sound))
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


async def begun[T](env: ScriptedEnvironment, call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """The call, once a thread is in the environment."""
    before, calling = len(env.calls), asyncio.ensure_future(call)
    async with asyncio.timeout(60):
        while len(env.calls) == before:
            await asyncio.sleep(0.001)
    return calling


async def test_a_reset_that_takes_too_long_leaves_nothing(open_episodes: Open, stuck: Callable[[], object]) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment(on_reset=stuck)
    resetting = await begun(env, episodes.create("r", episodes.task(env)))
    skip(DEADLINE_S)
    with pytest.raises(Unavailable, match="reset took longer than"):
        await resetting
    assert len(episodes) == 0


async def test_a_step_that_takes_too_long_ends_the_episode(open_episodes: Open, stuck: Callable[[], object]) -> None:
    episodes, env = open_episodes(), ScriptedEnvironment(on_step=stuck)
    slot = await episodes.create("r", episodes.task(env))
    stepping = await begun(env, episodes.step(slot.id, "1", assistant("a")))
    skip(DEADLINE_S)
    with pytest.raises(Unavailable, match="step took longer than"):
        await stepping
    with pytest.raises(Conflict, match="took longer"):
        await episodes.step(slot.id, "1", assistant("a"))


async def test_a_slow_call_does_not_hold_up_the_others(open_episodes: Open) -> None:
    episodes, gate = open_episodes(), threading.Event()
    slow = ScriptedEnvironment(on_reset=until(gate))
    async with asyncio.TaskGroup() as group:
        blocked = group.create_task(episodes.create("slow", episodes.task(slow)))
        await asyncio.sleep(0)
        quick = await episodes.create("quick", episodes.task(ScriptedEnvironment()))
        await episodes.step(quick.id, "1", assistant("a"))
        assert not blocked.done()
        gate.set()


async def test_a_hung_environment_starves_only_itself(open_episodes: Open, stuck: Callable[[], object]) -> None:
    """All threads of its kind hang: its calls are refused at once, other kinds go on, and it is back when the calls
    return.
    """
    gate = threading.Event()
    episodes = open_episodes()
    hung, other = ScriptedEnvironment(on_step=until(gate)), ScriptedEnvironment()
    slots = [await episodes.create(str(i), episodes.task(hung)) for i in range(3)]
    for slot in slots[:2]:
        stepping = await begun(hung, episodes.step(slot.id, "1", assistant("a")))
        skip(DEADLINE_S)
        with pytest.raises(GivenUp, match="step took longer than"):
            await stepping
    with pytest.raises(Busy, match="all 2 threads hang"):
        await episodes.step(slots[2].id, "1", assistant("a"))
    quick = await episodes.create("other", episodes.task(other, kind="other"))
    await episodes.step(quick.id, "1", assistant("a"))
    gate.set()
    async with asyncio.timeout(60):
        while True:
            try:
                await episodes.step(slots[2].id, "1", assistant("a"))
                return
            except Busy:
                await asyncio.sleep(0.01)


async def test_a_call_that_never_began_may_be_repeated(open_episodes: Open) -> None:
    """The only thread is taken: the step waits in vain, its episode goes on afterwards."""
    gate = threading.Event()
    episodes, env = open_episodes(n_threads=1), ScriptedEnvironment(on_step=until(gate))
    waiting = await episodes.create("a", episodes.task(ScriptedEnvironment()))
    hung = await episodes.create("b", episodes.task(env))
    first = await begun(env, episodes.step(hung.id, "1", assistant("a")))
    second = asyncio.ensure_future(episodes.step(waiting.id, "1", assistant("a")))
    await asyncio.sleep(0)
    skip(DEADLINE_S)
    with pytest.raises(GivenUp):
        await first
    with pytest.raises(Busy, match="no thread was free"):
        await second
    gate.set()
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await episodes.step(waiting.id, "1", assistant("a"))).reward == 1
                return
            except Busy:
                await asyncio.sleep(0.01)


async def test_waiting_calls_are_bounded(open_episodes: Open) -> None:
    gate = threading.Event()
    episodes = open_episodes(max_episodes=100, n_threads=1)
    slots = [await episodes.create(str(i), episodes.task(ScriptedEnvironment(on_step=until(gate)))) for i in range(9)]
    async with asyncio.TaskGroup() as group:
        for slot in slots[:8]:
            group.create_task(episodes.step(slot.id, "1", assistant("a")))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="8 calls are waiting"):
            await episodes.step(slots[8].id, "1", assistant("a"))
        gate.set()


async def test_a_request_behind_another_has_a_deadline(open_episodes: Open) -> None:
    episodes = open_episodes()
    slot = await episodes.create("r", episodes.task(ScriptedEnvironment()))
    async with slot.lock:
        stepping = asyncio.ensure_future(episodes.step(slot.id, "1", assistant("a")))
        await asyncio.sleep(0)
        skip(DEADLINE_S)
        with pytest.raises(Busy, match="busy with another request"):
            await stepping
    await episodes.step(slot.id, "1", assistant("a"))


async def test_a_step_whose_client_is_cancelled_is_never_taken_twice(open_episodes: Open) -> None:
    episodes, gate = open_episodes(), threading.Event()
    env = ScriptedEnvironment(on_step=until(gate))
    slot = await episodes.create("r", episodes.task(env))
    stepping = await begun(env, episodes.step(slot.id, "1", assistant("a")))
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    gate.set()
    with pytest.raises(Conflict, match="given up"):
        await episodes.step(slot.id, "1", assistant("a"))
    assert env.calls.count("a") == 1


async def test_an_environment_that_exits_is_one_failed_episode(open_episodes: Open) -> None:
    episodes = open_episodes()
    slot = await episodes.create("r", episodes.task(ScriptedEnvironment(on_step=lambda: sys.exit(3))))
    with pytest.raises(VolleyError, match="SystemExit"):
        await episodes.step(slot.id, "1", assistant("a"))


async def test_an_episode_answers_a_bounded_number_of_messages(open_episodes: Open) -> None:
    episodes = open_episodes()
    slot = await episodes.create("r", episodes.task(ScriptedEnvironment()))
    for n in range(MAX_STEPS):
        await episodes.step(slot.id, str(n), assistant("a"))
    with pytest.raises(Conflict, match=f"has answered {MAX_STEPS} messages"):
        await episodes.step(slot.id, "more", assistant("a"))


async def test_a_service_whose_environment_never_recovers_ends(stuck: Callable[[], object]) -> None:
    runner, env = ThreadRunner(1, DEADLINE_S, max_waiting=8), ScriptedEnvironment(on_reset=stuck)
    call = await begun(env, runner.run("scripted", "scripted", "reset", lambda: env.reset("train", 0, 0)))
    skip(DEADLINE_S)
    with pytest.raises(GivenUp):
        await call
    assert runner.stuck_reason("scripted") == "scripted: all 1 threads hang in calls that were given up"
    assert runner.stuck_reason("other") is None
    watching = asyncio.ensure_future(runner.watch())
    for _ in range(10):  # more than it takes to look twice
        await asyncio.sleep(0)
        skip(DEADLINE_S)
    with pytest.raises(VolleyError, match="all 1 threads hang"):
        await watching
