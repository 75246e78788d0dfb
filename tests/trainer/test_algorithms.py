"""Advantages of every algorithm, token by token, against numpy float64 written from the papers' formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.trainer.algorithms.ppo import Ppo, WithCritic
from services.trainer.algorithms.registry import algorithm, names, taught
from services.trainer.algorithms.terms.advantages import gae, returns_to_go, whitened
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.rewards import of_tokens, turn_of_tokens
from shared import algorithm_schema as schema
from shared.algorithm_base import PolicyGradientSection, RewardNormalization
from shared.run import rule_files
from shared.types import Trajectory, Turn, VersionSpan
from volley_algorithms import sections

N = 14
MODEL_TURNS = ((4, 7), (9, 14))
VERSION = "e000001-s000000"


def trajectory(reward: float, *, turns: Sequence[float] = (), task: int = 1, **changes) -> Trajectory:
    """Two turns of the model, of 3 and of 5 tokens; `turns` are their rewards."""
    mask = np.zeros(N, np.uint8)
    for start, end in MODEL_TURNS:
        mask[start:end] = 1
    made = Trajectory(
        ticket=task,
        sample_index=0,
        attempt=0,
        env="e",
        task=f"train/{task}",
        prompt_len=4,
        token_ids=np.arange(N, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=tuple(VersionSpan(VERSION, *one) for one in MODEL_TURNS),
        turns=tuple(Turn(s, e, "assistant", r) for (s, e), r in zip(MODEL_TURNS, turns, strict=False)),
        reward=reward,
        success=reward > 0,
        status="completed",
    )
    return replace(made, **changes)


def episodes(*rewards: float) -> list[EpisodeTokens]:
    return [EpisodeTokens(trajectory(reward)) for reward in rewards]


def advantages(section: PolicyGradientSection, *groups: Sequence[EpisodeTokens]) -> list[list[np.ndarray]]:
    return algorithm(section, 1, 8).advantages(groups)


SAMPLED = trajectory(0).loss_mask.astype(bool)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (schema.GrpoSection(), lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
        (sections.DrGrpoSection(name="drgrpo"), lambda r: r - r.mean()),
        (sections.RlooSection(name="rloo"), lambda r: r - (r.sum() - r) / (len(r) - 1)),
        (sections.DapoSection(name="dapo"), lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
        (sections.GspoSection(name="gspo-token", advantage_estimator="drgrpo"), lambda r: r - r.mean()),
        (sections.CispoSection(name="cispo", advantage_estimator="rloo"), lambda r: (r - r.mean()) * 4 / 3),
    ],
)
def test_every_sampled_token_has_its_episodes_advantage_against_its_group(section, expected):
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    (found,) = advantages(section, episodes(*rewards))
    for one, wanted in zip(found, expected(rewards), strict=True):
        np.testing.assert_allclose(one, wanted * SAMPLED, rtol=1e-9)


def test_by_turn_a_token_has_what_was_rewarded_from_its_turn_on():
    group = [EpisodeTokens(trajectory(1.0, turns=(1.0, 0.0))), EpisodeTokens(trajectory(1.0, turns=(0.0, 1.0)))]
    section = sections.DrGrpoSection(name="drgrpo", credit="turn")
    (first, second) = advantages(section, group)[0]
    for (start, end), a, b in zip(MODEL_TURNS, (0.0, -0.5), (0.0, 0.5), strict=True):
        assert first[start:end].tolist() == [a] * (end - start)
        assert second[start:end].tolist() == [b] * (end - start)


def test_an_episode_with_fewer_turns_is_compared_where_it_had_one():
    short = trajectory(0.0, versions=(VersionSpan(VERSION, 4, 7),))
    short = replace(short, loss_mask=np.where(np.arange(N) < 7, short.loss_mask, 0).astype(np.uint8))
    group = [EpisodeTokens(trajectory(2.0, turns=(1.0, 1.0))), EpisodeTokens(short)]
    found = advantages(sections.DrGrpoSection(name="drgrpo", credit="turn"), group)[0]
    assert (found[0][4], found[0][9], found[1][4]) == (1.0, 0.0, -1.0)


@given(
    reward=st.floats(-1e3, 1e3),
    turns=st.lists(st.floats(-1e3, 1e3), max_size=2),
    credit=st.sampled_from(["episode", "turn"]),
)
def test_rewards_of_tokens_add_up_to_the_episodes(reward: float, turns: list[float], credit):
    one = trajectory(reward, turns=turns)
    found = of_tokens(one, credit).tokens
    assert found.sum() == pytest.approx(reward, abs=1e-9)
    assert not found[~SAMPLED].any()


def test_a_turn_is_a_run_of_sampled_tokens():
    assert turn_of_tokens(trajectory(0)).tolist() == [-1] * 4 + [0] * 3 + [-1] * 2 + [1] * 5


def test_overlong_episodes_lose_linearly():
    section = sections.DapoSection(
        name="dapo", advantage_estimator="drgrpo", overlong_length=10, overlong_buffer=4, overlong_penalty=2.0
    )
    short = replace(trajectory(1.0), loss_mask=np.where(np.arange(N) < 7, SAMPLED, 0).astype(np.uint8))
    found = advantages(section, [EpisodeTokens(trajectory(1.0)), EpisodeTokens(short)])[0]
    # 8 sampled tokens are 2 beyond 6, half of the buffer: 1 of the penalty's 2.
    assert (found[0][4], found[1][4]) == (-0.5, 0.5)


def test_a_penalty_in_the_reward_is_k1_to_the_reference():
    section = sections.DrGrpoSection(name="drgrpo", beta=0.5, kl_in="reward")
    near, far = (np.where(SAMPLED, -1.0 - d, 0).astype(np.float32) for d in (0.0, 0.25))
    group = [EpisodeTokens(trajectory(1.0), reference=near), EpisodeTokens(trajectory(1.0), reference=far)]
    found = advantages(section, group)[0]
    assert found[0][4] == pytest.approx(0.5 * 8 * 0.25 / 2)
    assert found[1][4] == -found[0][4]


def test_rewards_are_normalized_over_those_that_belong_together():
    rewards = [np.array([1.0, 0.0]), np.array([3.0, 0.0])]
    groups = [[EpisodeTokens(trajectory(r, task=i)) for r in one] for i, one in enumerate(rewards)]
    every = np.concatenate(rewards)
    for grouping, pools in (("state", rewards), ("batch", [every, every]), ("inductive", [every, every])):
        how = RewardNormalization(grouping=grouping, method="mean_std")
        section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", reward_normalization=how)
        made = algorithm(section, 1, 8).token_rewards(groups)
        for group, given_rewards, pool in zip(made, rewards, pools, strict=True):
            wanted = (given_rewards - pool.mean()) / (pool.std() + 1e-6)
            assert [one.total for one in group] == pytest.approx(wanted.tolist(), rel=1e-6)
    how = RewardNormalization(grouping="batch", method="asym_clip")
    section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", reward_normalization=how)
    made = algorithm(section, 1, 8).token_rewards([episodes(*[0.0] * 30, 100.0, -5.0)])
    totals = [one.total for one in made[0]]
    assert (max(totals), min(totals) > -1) == (3.0, True)


def test_reinforce_plus_plus_normalizes_returns_over_all_tokens_of_the_step():
    section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", gamma=0.9)
    groups = [episodes(1.0, 0.0), episodes(0.5, -1.0)]
    found = np.array([one[SAMPLED] for group in advantages(section, *groups) for one in group])
    returns = np.array([r * 0.9 ** np.arange(7, -1, -1) for r in (1.0, 0.0, 0.5, -1.0)])
    np.testing.assert_allclose(found, (returns - returns.mean()) / (returns.std() + 1e-6), rtol=1e-6)


def test_its_baseline_is_the_groups_mean():
    section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", baseline="group")
    found = advantages(section, episodes(1.0, 0.0), episodes(5.0, 5.0))
    assert found[0][0][4] == pytest.approx(-found[0][1][4])
    assert found[0][0][4] == pytest.approx(np.sqrt(2), rel=1e-5)
    assert found[1][0][4] == pytest.approx(0, abs=1e-9)


def gae_of_the_paper(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Equation 16 as a sum, over the sampled tokens alone."""
    n = len(rewards)
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 20), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_papers_over_the_sampled_tokens(seed: int, length: int, gamma: float, lam: float):
    rng = np.random.default_rng(seed)
    sampled = rng.random(length) < 0.6
    sampled[rng.integers(length)] = True
    rewards, values = rng.standard_normal((2, length))
    found = gae(rewards, values, sampled, gamma, lam)
    wanted = gae_of_the_paper(rewards[sampled], values[sampled], gamma, lam)
    np.testing.assert_allclose(found[sampled], wanted, rtol=1e-9, atol=1e-12)
    assert not found[~sampled].any()
    to_go = returns_to_go(rewards, sampled, gamma)
    np.testing.assert_allclose(to_go[sampled], gae_of_the_paper(rewards[sampled], 0 * wanted, gamma, 1.0), atol=1e-9)


def test_ppo_rewards_and_values_make_advantages_and_returns():
    made = Ppo(schema.PpoSection(name="ppo", whiten_advantages=False, gamma=0.9, gae_lambda=0.8), 1, 8)
    values = np.where(SAMPLED, np.linspace(0, 1, N), 0).astype(np.float32)
    group = [EpisodeTokens(trajectory(1.0, turns=(0.25, 0.75)), values=values)]
    rewards = np.zeros(8)
    rewards[-1] = 1.0
    wanted = gae_of_the_paper(rewards, values[SAMPLED].astype(np.float64), 0.9, 0.8)
    np.testing.assert_allclose(made.advantages([group])[0][0][SAMPLED], wanted)
    np.testing.assert_allclose(made.returns([group])[0][0][SAMPLED], wanted + values[SAMPLED])
    by_turn = Ppo(schema.PpoSection(name="ppo", whiten_advantages=False, credit="turn"), 1, 8)
    rewards[[2, 7]] = 0.25, 0.75
    wanted = gae_of_the_paper(rewards, values[SAMPLED].astype(np.float64), 1.0, 0.95)
    np.testing.assert_allclose(by_turn.advantages([group])[0][0][SAMPLED], wanted)


def test_a_single_token_has_an_advantage_and_equal_ones_have_none():
    """Tunix's GAE gives NaN for one trainable token."""
    assert gae(np.array([1.0]), np.array([0.25]), np.array([True]), 1.0, 0.95).tolist() == [0.75]
    one = np.array([0.7])
    assert whitened([one], [np.array([True])])[0].tolist() == [0.0]
    assert [x.tolist() for x in whitened([np.full(3, 0.1)] * 2, [np.ones(3, bool)] * 2)] == [[0.0] * 3] * 2
    assert whitened([], []) == []


def test_truncated_episodes_can_be_left_out_of_the_loss():
    cut = trajectory(0.0, status="truncated")
    for mask_truncated in (False, True):
        made = algorithm(schema.GrpoSection(mask_truncated=mask_truncated), 1, 8)
        assert made.counts(trajectory(0.0))
        assert made.counts(cut) is not mask_truncated


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("name", ["grpo", "drgrpo", "rloo", "reinforce_plus_plus"])
def test_rewards_of_any_size_give_finite_advantages(name: str, scale: float):
    section = {
        "grpo": schema.GrpoSection(),
        "drgrpo": sections.DrGrpoSection(name="drgrpo"),
        "rloo": sections.RlooSection(name="rloo"),
        "reinforce_plus_plus": sections.ReinforcePlusPlusSection(name="reinforce_plus_plus"),
    }[name]
    for group in advantages(section, episodes(scale, -scale, 0.0), episodes(0.0, scale)):
        for one in group:
            assert np.isfinite(one.astype(np.float32)).all()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
def test_a_normalized_reward_of_a_failed_episode_is_at_its_last_sampled_token(name: str):
    """Where nothing was rewarded, too."""
    how = RewardNormalization(grouping="batch", method="mean_std")
    if name == "ppo":
        made = Ppo(schema.PpoSection(name="ppo", reward_normalization=how, whiten_advantages=False), 1, 8)
    else:
        section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", reward_normalization=how)
        made = algorithm(section, 1, 8)
    group = [EpisodeTokens(trajectory(r), values=np.zeros(N, np.float32)) for r in (0.0, 0.0, 1.0, 1.0)]
    found = [one.tokens for one in made.token_rewards([group])[0]]
    for one, sign in zip(found, (-1, -1, 1, 1), strict=True):
        assert np.flatnonzero(one).tolist() == [N - 1]
        assert one[-1] == pytest.approx(sign, rel=1e-4)
    assert made.advantages([group])[0][0][4] < 0 < made.advantages([group])[0][3][4]


def test_normalizing_enormous_rewards_keeps_their_proportions():
    how = RewardNormalization(grouping="state", method="mean_std")
    made = algorithm(sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", reward_normalization=how), 1, 8)
    small, large = (
        [one.total for one in made.token_rewards([episodes(*(scale * r for r in (0.0, 1.0, 2.0, 5.0)))])[0]]
        for scale in (1.0, 1e17)
    )
    assert large == pytest.approx(small, rel=1e-5)
    huge = [np.array([1.7e308]), np.array([-1.7e308, -1.7e308])]
    assert all(np.isfinite(one).all() for one in whitened(huge, [np.ones(1, bool), np.ones(2, bool)]))


RULES = rule_files.resolved(
    {"algorithm": {"loss": "examples/rules/luspo.py:loss", "credit": "examples/rules/discounted.py:credit"}},
    Path(__file__).parents[2],
)
OF_NAME = {
    "gdpo": {"reward_components": {"a": 1.0, "b": 2.0}},
    "mopd": {"outcome_coef": 1.0},
    "own": {"loss": RULES["algorithm.loss"]},
}
WITHOUT_REWARD = ("gdpo", "on_policy_distillation", "rae")
NORMALIZED = {"reward_normalization": {"grouping": "batch", "method": "mean_std"}}
OF_REWARDS = ({"credit": "turn"}, {"credit": RULES["algorithm.credit"]}, NORMALIZED, {"beta": 0.1, "kl_in": "reward"})
CASES = [
    (name, more)
    for name in names()
    for more in ({}, {"teacher_kl_coef": 0.5}, *(() if name in WITHOUT_REWARD else OF_REWARDS))
]


@pytest.mark.parametrize(("name", "more"), CASES)
def test_an_episode_outside_the_loss_is_in_no_statistic(name: str, more: dict):
    """Advantages and the critic's targets are those of a step without it, whatever its reward; its own are 0."""
    keys = {"name": name, "mask_truncated": True, **OF_NAME.get(name, {}), **more}
    section, rng = TypeAdapter(schema.any_section()).validate_python(keys), np.random.default_rng(3)
    inner = algorithm(section, 1, 8)
    made = [taught(inner, section).advantages, *([inner.returns] if isinstance(inner, WithCritic) else ())]

    def scored(reward: float, status: str) -> EpisodeTokens:
        known = [np.where(SAMPLED, -rng.random(N), 0).astype(np.float32) for _ in range(4)]
        components = {"a": reward, "b": float(rng.random())}
        one = trajectory(reward, turns=(reward / 2, 0), reward_components=components, status=status)
        return EpisodeTokens(replace(one, teacher_logprobs=known[0]), *known[1:])

    for cut in ([], [9.0], [9.0, -1e6]):
        trained = [[scored(r, "completed") for r in rewards] for rewards in ((1.0, 0.0, 0.5), (0.0, 1.0))]
        others = [scored(r, "truncated") for r in cut]
        whole = [[*others, *trained[0]], others or trained[0], [*trained[1], *others]]
        alone = [trained[0], trained[1]] if others else [trained[0], trained[0], trained[1]]
        every = [e.trajectory.status == "completed" for group in whole for e in group]
        for compute in made:
            found = np.array([a for group in compute(whole) for a in group])
            assert not found[~np.array(every)].any()
            np.testing.assert_array_equal(found[every], [a for group in compute(alone) for a in group])


@pytest.mark.parametrize(("name", "left"), [("grpo", (1.0, 0.0, 0.5)), ("rloo", (1.0, 0.0, 0.5)), ("rloo", (1.0,))])
def test_a_group_is_compared_among_the_episodes_in_the_loss(name: str, left: tuple[float, ...]):
    section = TypeAdapter(schema.any_section()).validate_python({"name": name, "mask_truncated": True})
    (found,) = advantages(section, [*episodes(*left), EpisodeTokens(trajectory(-3.0, status="truncated"))])
    r, n = np.array(left, np.float64), len(left)
    if name == "grpo":
        wanted = (r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).sum() / (n - 1)) + 1e-6)
    else:
        wanted = r - np.array([(r.sum() - x) / (n - 1) for x in r]) if n > 1 else np.zeros(1)
    np.testing.assert_allclose([one[4] for one in found], [*wanted, 0.0], rtol=1e-12)
