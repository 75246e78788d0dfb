"""Filters, selection, stragglers and over-sampling: which groups are sent, and under which rule the others end."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.episodes.groups import run_group
from services.orchestrator.schedule.gate import ReservationGate
from services.orchestrator.schedule.reservations import Admission
from services.orchestrator.schedule.ticket_loop import TicketLoop
from services.orchestrator.status import RunStatus
from shared.generation_schema import (
    GenerationFilters,
    GenerationSection,
    StragglerConfig,
    defeated,
    round_size,
    started_ahead,
)
from shared.types import Group, Trajectory, Turn, VersionSpan
from tests.orchestrator.fakes import MemoryQueue, ScriptedEngine, ScriptedEnv, balancer_of, dispatcher_of, plan
from tests.orchestrator.test_ticket_loop import run_until
from tests.support.virtual_time import virtual_time
from volley_algorithms.generation.policy import ConfiguredPolicy, Selection
from volley_algorithms.generation.stragglers import Stragglers

GRL_SCORES = json.loads((Path(__file__).parents[3] / "tests/fixtures/grl/scores.json").read_text(encoding="utf-8"))
TERMS = Admission(batch=4, max_staleness=3, total=100, lease_s=60, patience_s=5.0)
EPISODE = Trajectory(
    ticket=1,
    sample_index=0,
    attempt=0,
    env="demo",
    task="train/1",
    prompt_len=2,
    token_ids=np.arange(6, dtype=np.int32),
    loss_mask=np.array([0, 0, 1, 1, 1, 1], np.uint8),
    logprobs=np.array([0, 0, -1, -1, -1, -1], np.float32),
    versions=(VersionSpan("e000001-s000000", 2, 6),),
    turns=(Turn(0, 2, "prompt"), Turn(2, 6, "assistant")),
    reward=0.0,
    success=False,
    status="completed",
)


def rewarded(ticket, rewards):
    episodes = [replace(EPISODE, ticket=ticket, sample_index=i, reward=float(r)) for i, r in enumerate(rewards)]
    return Group(ticket, "demo", f"train/{ticket}", tuple(episodes))


@pytest.mark.parametrize(
    ("config", "made", "rule"),
    [
        ({"reward_nonzero_std": True}, rewarded(1, [1, 1]), "zero_variance"),
        ({"reward_nonzero_std": True}, rewarded(1, [1, 0]), None),
        ({"min_reward": 0.5}, rewarded(1, [0.5, 0.2]), "min_reward"),
        ({"min_reward": 0.5}, rewarded(1, [0.6, 0.2]), None),
        ({"response_diversity": 0.6}, rewarded(1, [1, 0]), "response_diversity"),
        ({"response_diversity": 0.5}, rewarded(1, [1, 0]), None),
        ({"quality_and_diversity": True}, rewarded(1, [1, 1]), "zero_variance"),
        ({"quality_and_diversity": True}, rewarded(1, [1, 0, 0]), "response_diversity"),
        ({"reasonable_length": (100, 200)}, rewarded(1, [1, 0]), "reasonable_length"),
        ({"reasonable_length": (1, 200)}, rewarded(1, [1, 0]), None),
    ],
)
async def test_a_filter_sends_the_group_or_its_rule(config, made, rule):
    policy = ConfiguredPolicy(GenerationSection(filters=GenerationFilters(**config)))
    sent = Group.decode((await policy.filter_group(made)).encode())
    assert (sent.rule, bool(sent.trajectories), sent.ticket) == (rule, rule is None, made.ticket)


@pytest.mark.parametrize(
    "config",
    [{"reward_nonzero_std": True}, {"min_reward": 0.5}, {"response_diversity": 0.5}, {"reasonable_length": (5, 9)}],
    ids=str,
)
async def test_filters_look_at_the_episodes_in_the_loss(config):
    """Alone, the last one, which is truncated, makes each of them keep the group."""
    made = rewarded(1, [0.0, 0.0, 0.0, 1.0])
    long = np.arange(26, dtype=np.int32)
    cut = replace(
        EPISODE, sample_index=3, reward=1.0, status="truncated", token_ids=long, loss_mask=(long > 1).astype(np.uint8)
    )
    made = replace(made, trajectories=(*made.trajectories[:3], cut))
    for mask_truncated in (False, True):
        policy = ConfiguredPolicy(GenerationSection(filters=GenerationFilters(**config)), mask_truncated=mask_truncated)
        assert ((await policy.filter_group(made)).rule is not None) is mask_truncated
        none_left = replace(made, trajectories=(cut,))
        assert not mask_truncated or (await policy.filter_group(none_left)).rule is not None


def test_the_selection_ranks_by_the_rewards_in_the_loss():
    groups = [rewarded(1, [0.0, 9.0]), rewarded(2, [0.0, 1.0])]
    cut = replace(groups[0].trajectories[1], status="truncated")
    groups[0] = replace(groups[0], trajectories=(groups[0].trajectories[0], cut))
    for mask_truncated, kept in ((False, 1), (True, 2)):
        chosen = Selection(2, 0.5, "std", mask_truncated)
        assert [g.ticket for g in groups if chosen.why(g, groups) is None] == [kept]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.sampled_from([0.25, 0.5, 0.9]), st.booleans())
def test_the_selection_keeps_exactly_the_groups_with_the_largest_or_smallest_deviation(spreads, ratio, reverse):
    groups = [rewarded(i + 1, [0.0, spread]) for i, spread in enumerate(spreads)]
    chosen = Selection(len(groups), ratio, "std_rev" if reverse else "std")
    kept = [g for g in groups if chosen.why(g, groups) is None]
    assert len(kept) == max(1, int(ratio * len(groups)))
    stds = np.array([np.std([0.0, s]) for s in spreads])
    reference = np.sort(stds)[: len(kept)] if reverse else np.sort(stds)[::-1][: len(kept)]
    assert sorted(reference) == sorted(stds[g.ticket - 1] for g in kept)


def loop_of(queue, generation, run, n_groups=16):
    gate = ReservationGate()
    gate.release(ReservationGate.START)
    policy = ConfiguredPolicy(generation, TERMS.batch)
    return TicketLoop(queue, gate, RunStatus(), TERMS, n_groups=n_groups, run_group=run, policy=policy)


async def made_with_spread(ticket, _need):
    await asyncio.sleep(0.001 * (ticket % 3))
    return rewarded(ticket, [0.0, ticket / 100])


async def test_a_selection_compares_whole_windows_and_the_last_ones_as_they_are():
    """16 groups are compared at once, four are kept; at the end of the run no ticket stays in hand."""
    queue = MemoryQueue(limit=19)
    generation = GenerationSection(filters=GenerationFilters(rollout_filter_ratio=0.25))
    loop = loop_of(queue, generation, made_with_spread, n_groups=19)
    await run_until(loop, lambda: len(queue.published) == 19)
    groups = [Group.decode(data) for data in queue.published.values()]
    assert {g.rule for g in groups} == {None, "rollout_filter_ratio"}
    assert sum(g.rule is None for g in groups) == 5
    assert queue.given_back == []


def stragglers_of(after_share, factor):
    clock = asyncio.get_running_loop().time
    return Stragglers(StragglerConfig(after_share=after_share, factor=factor), 4, clock)


@virtual_time
async def test_a_slow_group_is_void_once_most_others_that_ended_since_were_faster():
    stragglers, slow, ended = stragglers_of(0.75, 10), asyncio.Event(), []

    async def one(ticket):
        async def make():
            await (slow.wait() if ticket == 1 else asyncio.sleep(0.02))
            return rewarded(ticket, [1, 0])

        async def void(why):
            return plan().void(await plan().task_of(ticket), ticket, why, "straggler")

        ended.append(await stragglers.run(ticket, make, void))

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for ticket in range(1, 5):
            tasks.create_task(one(ticket))
    assert [(g.ticket, g.rule) for g in ended[-1:]] == [(1, "straggler")]
    assert {g.rule for g in ended[:-1]} == {None}


@virtual_time
async def test_an_outage_alone_voids_nothing():
    stragglers, back = stragglers_of(0.5, 4), asyncio.Event()

    async def one(ticket):
        async def make():
            await back.wait()
            await asyncio.sleep(0.01 * ticket)
            return rewarded(ticket, [1, 0])

        async def void(why):
            raise AssertionError(why)

        return await stragglers.run(ticket, make, void)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(ticket)) for ticket in range(1, 5)]
        await asyncio.sleep(0.2)
        back.set()
    assert [task.result().rule for task in running] == [None] * 4


@virtual_time
async def test_a_void_straggler_stops_its_episodes_and_is_published():
    queue, env = MemoryQueue(limit=5), ScriptedEnv(n_turns=1, delay_s=0.01)
    dispatcher = dispatcher_of(env, balancer_of(ScriptedEngine()))
    stragglers = stragglers_of(0.5, 50)

    async def run(ticket, need):
        async def generate():
            if ticket == 1:
                await asyncio.sleep(3600)
            return await run_group(dispatcher, plan(2), ticket, need)

        async def void(why):
            return plan().void(await plan().task_of(ticket), ticket, why, "straggler")

        return await stragglers.run(ticket, generate, void)

    await run_until(loop_of(queue, GenerationSection(), run), lambda: len(queue.published) == 5)
    assert {t: Group.decode(d).rule for t, d in queue.published.items()} == {
        t: "straggler" if t == 1 else None for t in range(1, 6)
    }
    assert not env.open


@pytest.mark.parametrize(
    ("generation", "max_staleness", "n_groups", "key"),
    [
        ({"over_sampling_factor": 1.5}, 0, 64, "grpo_config.off_policy_steps to 1"),
        ({"over_sampling_factor": 3}, 1, 64, "grpo_config.off_policy_steps to 2"),
        ({"filters": {"rollout_filter_ratio": 0.25}}, 2, 64, "grpo_config.off_policy_steps to 3"),
        ({"filters": {"rollout_filter_ratio": 0.25}}, 3, 8, "orchestrator.max_concurrent_episodes"),
        ({"filters": {"rollout_filter_ratio": 0.5}, "over_sampling_factor": 1.5}, 1, 64, "over_sampling_factor"),
    ],
)
def test_a_policy_that_a_limit_defeats_is_refused_with_the_key(generation, max_staleness, n_groups, key):
    problem = defeated(GenerationSection(**generation), 4, max_staleness, n_groups)
    assert problem is not None
    assert key in problem


def test_the_number_started_is_exact_for_decimal_factors():
    assert [started_ahead(f, 10) for f in (1.0, 1.1, 1.2, 1.25, 2.0)] == [10, 11, 12, 13, 20]
    assert defeated(GenerationSection(over_sampling_factor=2.0), 4, 1, 64) is None


@given(st.integers(1, 500), st.sampled_from([0.07, 0.25, 0.29, 0.3, 0.5, 0.58, 0.7, 0.9]))
def test_a_whole_selection_keeps_at_least_the_groups_of_a_step(batch, ratio):
    size = round_size(GenerationSection(filters=GenerationFilters(rollout_filter_ratio=ratio)), batch)
    groups = [rewarded(ticket, [0.0, float(ticket)]) for ticket in range(1, size + 1)] if size < 40 else None
    kept = int(ratio * size + 1e-9) if groups is None else _n_kept(Selection(size, ratio, "std"), groups)
    assert batch <= kept <= batch + 1


def _n_kept(chosen, groups):
    return sum(chosen.why(one, groups) is None for one in groups)


@pytest.mark.parametrize(("kind", "ratio", "scores", "kept"), GRL_SCORES["kept"])
def test_the_selected_groups_are_those_of_grl(kind, ratio, scores, kept):
    """Computed by GRL's own code (tests/fixtures/grl/make_scores.py)."""
    groups = [rewarded(number, rewards) for number, rewards in enumerate(scores, 1)]
    selection = Selection(len(groups), ratio, kind)
    assert [group.ticket - 1 for group in groups if selection.why(group, groups) is None] == kept
