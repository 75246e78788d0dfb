"""Seats in an algorithm: each is compared with the same seat alone, as if its trajectories were a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packages.algorithms.tests.trainer.test_own_rules import written
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.algorithm import EpisodeGroup, EpisodeTokens
from services.trainer.algorithms.terms.rewards import Normalization, normalized
from services.trainer.batches.batch import BatchLayout
from services.trainer.groups.filters import FilterOptions, verdict
from services.trainer.groups.group_buffer import ready_group
from services.trainer.learner.baselines import Baselines
from services.trainer.learner.policy import Policy
from services.trainer.learner.training_rows import group_rows
from shared import algorithm_schema as schema
from shared.algorithm_base import PolicyGradientSection
from shared.errors import WeightsError
from shared.seats import by_seat, joined
from shared.types import Group, Trajectory, Turn, WeightVersion
from tests.trainer import test_policy
from tests.trainer.test_branches import START, tree
from volley_algorithms import sections

SEATS = ("x", "o")
SECTIONS = {
    "grpo": schema.GrpoSection(),
    "turns": schema.GrpoSection(credit="turn"),
    "rloo": sections.RlooSection(name="rloo"),
    "masked": sections.DapoSection(name="dapo", mask_truncated=True, overlong_length=20, overlong_buffer=10),
    "normalized": sections.DrGrpoSection(
        name="drgrpo", reward_normalization={"method": "mean_std", "grouping": "inductive"}
    ),
    "whitened": sections.ReinforcePlusPlusSection(name="reinforce_plus_plus"),
    "ppo": schema.PpoSection(name="ppo"),
}


def rewarded(one: Trajectory, reward: float) -> Trajectory:
    """Put the reward at the end of the last sequence, as the orchestrator does."""
    turn = Turn(one.lengths()[-1] - 1, one.lengths()[-1], "assistant", reward)
    *before, last = one.branches or (one,)
    if one.branches:
        return replace(one, branches=(*before, replace(last, turns=(turn,))), reward=reward)
    return replace(one, turns=(turn,), reward=reward)


def seat(rng: np.random.Generator, ticket: int, reward: float) -> Trajectory:
    return rewarded(tree(rng, ticket, int(rng.integers(0, 3)), own=4), reward)


def games(seed: int, n_groups: int = 3, size: int = 4) -> list[list[Trajectory]]:
    """Groups of games; in one of them the seat `o` does not move."""
    rng, made = np.random.default_rng(seed), list[list[Trajectory]]()
    for ticket in range(1, n_groups + 1):
        group = list[Trajectory]()
        for number in range(size):
            seats = {name: seat(rng, ticket, float(rng.normal())) for name in SEATS}
            if (ticket, number) == (1, 0):
                del seats["o"]
            status = "truncated" if rng.random() < 0.25 else "completed"
            group.append(replace(joined(seats), status=status))
        made.append(group)
    return made


def with_values(groups: Sequence[Sequence[Trajectory]]) -> list[EpisodeGroup]:
    rng = np.random.default_rng(1)
    return [
        [
            EpisodeTokens(
                one, *(rng.standard_normal(one.n_stored).astype(np.float32) * one.stored("loss_mask") for _ in range(3))
            )
            for one in group
        ]
        for group in groups
    ]


def places(one: Trajectory, name: str) -> np.ndarray:
    return np.repeat(np.array([seat == name for seat in one.seats]), one.own_lengths())


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_those_of_the_seats_in_groups_of_their_own(name: str, seed: int) -> None:
    made, groups = algorithm(SECTIONS[name], 1, 16), with_values(games(seed))
    apart = [[_alone(e, s) for e in group if s in e.trajectory.seats] for group in groups for s in SEATS]
    for compute in (made.advantages, *([made.returns] if isinstance(made, Ppo) else [])):
        wanted = iter(compute(apart))
        for group, found in zip(groups, compute(groups), strict=True):
            for s in SEATS:
                mine = [
                    a[places(e.trajectory, s)] for e, a in zip(group, found, strict=True) if s in e.trajectory.seats
                ]
                assert all(np.array_equal(a, b) for a, b in zip(mine, next(wanted), strict=True))
            for episode, whole in zip(group, found, strict=True):
                assert not whole[episode.trajectory.stored("loss_mask") == 0].any()


def _alone(episode: EpisodeTokens, name: str) -> EpisodeTokens:
    """The seat as an episode of an environment of its own."""
    one, at = by_seat(episode.trajectory)[name], places(episode.trajectory, name)
    values = (episode.reference, episode.old, episode.values)
    return EpisodeTokens(replace(one, seats=(), env=f"e/{name}"), *(None if v is None else v[at] for v in values))


def test_a_zero_sum_game_gives_the_winners_seat_what_the_losers_loses() -> None:
    """By hand: x wins 1, 1, -1, -1, and o loses as much; their deviation (ddof 1) is the root of 4/3."""
    rng = np.random.default_rng(0)
    group = [joined({"x": seat(rng, 1, r), "o": seat(rng, 1, -r)}) for r in (1.0, 1.0, -1.0, -1.0)]
    assert [one.reward for one in group] == [0.0] * 4
    (found,) = algorithm(schema.GrpoSection(), 1, 16).advantages(with_values([group]))
    for one, values in zip(group, found, strict=True):
        for name, each in by_seat(one).items():
            sampled = values[places(one, name) & (one.stored("loss_mask") > 0)]
            np.testing.assert_allclose(sampled, each.reward * np.sqrt(3 / 4), rtol=1e-5)


def test_rows_of_a_game_carry_their_seats_advantages() -> None:
    rng = np.random.default_rng(0)
    group = [joined({"x": seat(rng, 1, r), "o": seat(rng, 1, -r)}) for r in (1.0, -1.0)]
    made = group_rows([group], START, algorithm(schema.GrpoSection(), 1, 16))
    for one, rows in zip(group, made.rows, strict=True):
        for name, row in zip(one.seats, rows, strict=True):
            assert {*np.sign(row.advantages[row.mask > 0])} == {np.sign(by_seat(one)[name].reward)}


def test_rewards_of_a_pool_are_those_of_one_seat() -> None:
    groups = [[by_seat(one)[name] for one in group] for group in games(0)[1:] for name in SEATS]
    rewards = [np.array([one.reward for one in group]) for group in groups]
    made = normalized(rewards, groups, Normalization("inductive", "mean_std"))
    for name in range(2):
        pool, found = np.concatenate(rewards[name::2]), np.concatenate(made[name::2])
        np.testing.assert_allclose(found, (pool - pool.mean()) / (pool.std() + 1e-6), rtol=1e-12)


def test_functions_of_ones_own_get_a_seat_at_a_time(tmp_path: Path) -> None:
    advantage = written(tmp_path, "return t.rewards + 10 * (t.seat == 'o')", "advantage")
    keeps = written(tmp_path, "return bool(t.seat == 'o' and t.rewards.max() > 0.5)", "advantage")
    section = sections.OwnSection(name="own", advantage=advantage)
    groups = games(0)
    for group, found in zip(groups, algorithm(section, 1, 16).advantages(with_values(groups)), strict=True):
        for one, values in zip(group, found, strict=True):
            for name, each in by_seat(one).items():
                sampled = values[places(one, name) & (one.stored("loss_mask") > 0)]
                assert {*sampled} == {each.reward + 10 * (name == "o")}
    options = FilterOptions(custom=keeps)
    rng = np.random.default_rng(0)
    for best in (0.4, 0.6):
        group = Group(
            1, "e", "train/1", tuple(joined({"x": seat(rng, 1, 9.0), "o": seat(rng, 1, r)}) for r in (0, best))
        )
        assert (verdict(group, options) is None) == (best > 0.5)


# RAE


def averaged(groups: Sequence[Sequence[Trajectory]], decay: float, known: dict[str, float]) -> list[list[np.ndarray]]:
    """The formula of `algorithms.rae`, a seat and a token at a time, in float64; `known` are the averages so far."""
    made = list[list[np.ndarray]]()
    for group in groups:
        made.append([])
        for one in group:
            values = np.zeros(one.n_stored)
            for name, each in by_seat(one).items():
                r, b = float(each.reward), known.get(name, 0.0)
                for t in np.flatnonzero(places(one, name) & (one.stored("loss_mask") > 0)):
                    values[t] = r - b
                known[name] = decay * b + (1 - decay) * r
            made[-1].append(values)
    return made


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_rae_compares_a_seat_with_its_own_moving_average(decay: float) -> None:
    made, kept, known = algorithm(sections.RaeSection(name="rae", decay=decay), 1, 16), Baselines(), dict[str, float]()
    for seed in range(3):
        groups = games(seed)
        wanted = averaged(groups, decay, known)
        for _ in range(2):  # looking does not change them
            before = kept.before(groups, decay, made.counts)
        tokens = [
            [EpisodeTokens(one, baselines=b) for one, b in zip(*pair, strict=True)]
            for pair in zip(groups, before, strict=True)
        ]
        for group, found in zip(wanted, made.advantages(tokens), strict=True):
            for a, b in zip(group, found, strict=True):
                np.testing.assert_array_equal(a, b)
        kept.learn(groups, decay, made.counts)
        again = Baselines()
        again.load(kept.state())
        assert again.before(groups, decay, made.counts) == kept.before(groups, decay, made.counts)


def test_rae_leaves_episodes_outside_the_loss_out_of_the_average() -> None:
    made = algorithm(sections.RaeSection(name="rae", mask_truncated=True), 1, 16)
    group = [
        replace(one, status=status) for one, status in zip(games(0)[1], ["truncated", "completed"] * 2, strict=True)
    ]
    kept, alone = Baselines(), Baselines()
    kept.learn([group], 0.95, made.counts)
    alone.learn([group[1::2]], 0.95, made.counts)
    assert kept.before([group[:1]], 0.95, made.counts) == alone.before([group[:1]], 0.95, made.counts)


def test_baselines_that_cannot_be_read_are_refused_and_missing_ones_start_at_0() -> None:
    kept = Baselines()
    kept.load({})
    assert kept.state() == {}
    for wrong in (b"{", b"[1]", b'{"x": "y"}'):
        with pytest.raises(WeightsError, match="baselines"):
            kept.load({"baselines": np.frombuffer(wrong, np.uint8)})


def test_rae_resumes_bit_for_bit() -> None:
    """Its averages are part of a checkpoint: without them the second step would be another one."""
    section, groups = sections.RaeSection(name="rae"), [ready_group(game_group(n), b"", f"{n}-0") for n in (1, 2)]
    policies = [policy_of(section) for _ in range(3)]
    for policy in policies[:2]:
        policy.step(groups[:1], START)
    contents = policies[1].contents()
    params, state = ({k: np.asarray(v).copy() for k, v in one.items()} for one in (contents.params, contents.optimizer))
    policies[2].load(params, state)
    after = WeightVersion(START.epoch, START.step + 1)
    for policy in (policies[0], policies[2]):
        policy.step(groups[1:], after)
    assert policies[0].checksum() == policies[2].checksum()
    lost = policy_of(section)
    lost.load(params, {name: value for name, value in state.items() if name != "baselines"})
    lost.step(groups[1:], after)
    assert lost.checksum() != policies[0].checksum()


def game_group(ticket: int) -> Group:
    return Group(ticket, "e", f"train/{ticket}", tuple(games(0)[ticket - 1]))


def policy_of(section: PolicyGradientSection) -> Policy:
    layout = BatchLayout((64,), 8, 0)
    return test_policy.policy(replace(test_policy.OPTIONS, algorithm=algorithm(section, 1, 16), layout=layout))
