"""Episodes of several sequences: advantages, weights, packing, and a whole step, against each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.rewards import of_tokens, turn_of_tokens
from services.trainer.batches.batch import (
    BatchLayout,
    Row,
    arranged,
    assembled,
    by_row,
    by_sequence,
    efficiency,
    left_out,
    policy_rows,
    row_weights,
    stored,
)
from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.learner.scoring import objective, params_of
from services.trainer.models.attention import seen
from shared import algorithm_schema as schema
from shared.algorithm_base import PolicyGradientSection
from shared.errors import DecodeError
from shared.sequences import spans
from shared.types import Branch, Group, Trajectory, Turn, WeightVersion
from tests.support import models
from tests.trainer import grpo_ref, test_policy
from tests.trainer.support import CONFIG, model_of
from volley_algorithms import sections

START = WeightVersion(1, 0)
VERSION = str(START)
PROMPT = 5


def tree(
    rng: np.random.Generator, ticket: int = 1, n_branches: int = 3, *, prompt: int = PROMPT, own: int = 6
) -> Trajectory:
    """An episode whose branches begin at any token of an earlier sequence after its prompt, or by themselves."""
    reward = float(rng.integers(0, 2))
    task, tokens = f"train/{ticket}", _tokens(rng, ticket, prompt, 2 * own)
    made = Trajectory(ticket, 0, 0, "e", task, prompt, *tokens, (), reward, True, "completed")
    for number in range(n_branches):
        lengths = made.lengths()
        parent = int(rng.integers(-(number > 1), len(lengths)))
        shared = int(rng.integers(prompt, lengths[parent] + 1)) if parent >= 0 else 0
        own_prompt = prompt if parent < 0 else int(rng.integers(0, 3))
        ids, mask, logprobs, versions = _tokens(rng, None, own_prompt, own, first=shared)
        made = replace(made, branches=(*made.branches, Branch(parent, shared, ids, mask, logprobs, versions, ())))
    made.validate()
    return made


def _tokens(rng: np.random.Generator, ticket: int | None, prompt: int, n: int, first: int = 0):
    """Tokens of which some after the first `prompt` are sampled; those of a ticket begin with its prompt."""
    ids = rng.integers(1, 96, prompt + n).astype(np.int32)
    if ticket is not None:
        ids[:prompt] = np.random.default_rng(ticket).integers(1, 96, prompt)
    mask = np.ones(prompt + n, np.uint8)
    mask[:prompt], mask[prompt + 2 : prompt + 4] = 0, 0
    at = first + np.flatnonzero(mask)
    logprobs = np.where(mask, -4.5 + 0.3 * rng.standard_normal(len(ids)), 0).astype(np.float32)
    return ids, mask, logprobs, spans([VERSION] * len(at), at.tolist())


def step_rows(episodes: Sequence[Trajectory], seed: int = 0) -> tuple[list[Row], list[int]]:
    """Rows of the episodes with made-up token values, and the episode of each."""
    rng = np.random.default_rng(seed)
    made, owners = list[Row](), list[int]()
    for number, episode in enumerate(episodes):
        for row in policy_rows(episode, START):
            tables = {
                name: (row.mask * (-4.5 + 0.3 * rng.standard_normal(len(row.ids)))).astype(np.float32)
                for name in ("reference", "old", "values", "returns")
            }
            made.append(replace(row, advantages=row.mask * rng.standard_normal(len(row.ids)), **tables))
            owners.append(number)
    return made, owners


def some_trees(seed: int, n: int = 3) -> list[Trajectory]:
    """Episodes of two tasks, with none to four branches."""
    rng = np.random.default_rng(seed)
    return [tree(rng, 1 + i % 2, int(rng.integers(0, 5))) for i in range(n)]


LAYOUTS = BatchLayout((64,), 4, 0), BatchLayout((64, 128), 1, 0, tokens=128)


# Packing


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_each_sampled_token_is_predicted_at_one_place_from_its_own_sequence(seed: int, masks: bool):
    episodes = some_trees(seed)
    rows, owners = step_rows(episodes)
    if masks:
        rows = [left_out(row) if owner == 0 else row for row, owner in zip(rows, owners, strict=True)]
    parts = arranged(rows, LAYOUTS[1], 0)
    n_counted = 0
    for part, batch in zip(parts, assembled(rows, np.arange(1.0, len(rows) + 1), parts, 0), strict=True):
        assert batch.packing is not None
        visible = np.asarray(
            seen(0, *(2 * batch.ids.shape[1:]), batch.packing.visible_until, batch.packing.positions, None)
        )
        sequences: dict[tuple[int, int], set[int]] = {}
        for place in part.places:
            row, columns = rows[place.sequence], place.columns
            assert batch.ids[place.row, columns].tolist() == row.ids.tolist()
            for t, column in enumerate(columns):
                assert np.flatnonzero(visible[place.row, column]).tolist() == columns[: t + 1].tolist()
            at = place.row, columns[:-1][row.mask[1:] > 0]
            own = row.mask[1:] > 0
            assert batch.targets[at].tolist() == row.ids[1:][own].tolist()
            for name, given_ in (("behaviour", row.behaviour), ("advantages", row.advantages), ("old", row.old)):
                assert np.array_equal(getattr(batch, name)[at], np.asarray(given_)[1:][own].astype(np.float32)), name
            assert set(batch.weight[at].tolist()) <= {np.float32(place.sequence + 1)}
            assert batch.mask[at].all()
            for number in set(batch.packing.sequences[at].tolist()):
                sequences.setdefault((place.row, number), set()).add(place.sequence)
        n_counted += int(batch.mask.sum())
        assert all(len(one) == 1 for one in sequences.values())
    assert n_counted == sum(row.n_tokens for row in rows)
    if not masks:
        assert n_counted == sum(one.n_sampled for one in episodes)


def test_a_long_prefix_of_eight_branches_is_computed_once():
    rng, prefix, own = np.random.default_rng(0), 400, 10
    first = tree(rng, n_branches=0, prompt=40, own=(prefix - 40) // 2)
    branches = []
    for _ in range(8):
        ids, mask, logprobs, versions = _tokens(rng, None, 1, own, first=prefix)
        branches.append(Branch(0, prefix, ids, mask, logprobs, versions, ()))
    episode = replace(first, branches=tuple(branches))
    rows = policy_rows(episode, START)
    alone = efficiency(arranged(rows, BatchLayout((512,), 1, 0), 9))["computed_tokens"]
    parts = arranged(rows, BatchLayout((512,), 1, 0, tokens=512), 0)
    assert alone == 9 * 512
    assert [part.n_tokens for part in parts] == [episode.n_stored] == [prefix + 8 * (1 + own)]
    assert efficiency(parts)["computed_tokens"] == 512
    at_once = [replace(branch, token_ids=branch.token_ids[1:], loss_mask=np.ones(own, np.uint8)) for branch in branches]
    rows = policy_rows(replace(episode, branches=tuple(replace(b, logprobs=b.logprobs[1:]) for b in at_once)), START)
    assert arranged(rows, BatchLayout((512,), 1, 0, tokens=512), 0)[0].n_tokens == prefix + 8 * (1 + own)


def test_tokens_share_a_place_only_with_the_same_experts():
    rng, made = np.random.default_rng(2), list[Row]()
    for episode in some_trees(8):
        tables = [
            np.array([rng.permutation(6)[:2] for _ in range(n)], np.uint8)[:, None] for n in episode.own_lengths()
        ]
        routed = [replace(one, routed_experts=x[:-1]) for one, x in zip(episode.branches, tables[1:], strict=True)]
        tree_ = replace(episode, routed_experts=tables[0][:-2], branches=tuple(routed))
        tree_.validate()
        made += policy_rows(tree_, START)
    parts = arranged(made, LAYOUTS[1], 0)
    for part, batch in zip(parts, assembled(made, np.ones(len(made)), parts, 0), strict=True):
        assert batch.routed is not None
        for place in part.places:
            known = made[place.sequence].routed
            assert known is not None
            assert np.array_equal(batch.routed[place.row, place.columns[: len(known)]], known)


def test_episodes_of_one_sequence_are_placed_as_before():
    rows, _ = step_rows([tree(np.random.default_rng(i), i % 2, 0) for i in range(6)])
    assert all((row.parent, row.shared) == (0, 0) for row in rows)
    (part,) = arranged(rows, BatchLayout((128,), 1, 0, tokens=128), 0)
    assert part.n_tokens == sum(len(row.ids) for row in rows) - 4 * (PROMPT - 1)


TIS = "tis by sequence"
"""The product of a sequence's ratios amplifies rounding."""
SECTIONS: dict[str, PolicyGradientSection] = {
    "grpo": schema.GrpoSection(beta=0.1, entropy_coef=0.01),
    "gspo-token": sections.GspoSection(name="gspo-token"),
    TIS: sections.RlooSection(name="rloo", sampler_is="sequence", sampler_rs="geometric"),
    "ppo's critic": schema.PpoSection(name="ppo"),
}


@cache
def tiny():
    return model_of(models.random_weights(CONFIG, seed=1), CONFIG)


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(x, marks=pytest.mark.long) for x in list(SECTIONS)[1:])])
def test_losses_and_gradients_of_packed_trees_are_those_of_each_sequence_by_itself(name: str):
    rows, owners = step_rows(some_trees(5))
    weights = row_weights(rows, "sequence-mean-token-mean", 1, owners)
    section, model = SECTIONS[name], tiny()
    loss = objective(model, algorithm(section, 1, 16).loss, 0.9, "gradient")
    if name == "ppo's critic":
        ppo = Ppo(schema.PpoSection(name="ppo"), 1, 16)
        loss = objective(model, lambda scores, batch: ppo.value_loss(scores.logprobs, batch), 1.0)
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found = []
    for layout in (BatchLayout((64,), 1, 0), LAYOUTS[1]):
        parts = arranged(rows, layout, len(rows))
        with jax.default_matmul_precision("highest"):
            made = [gradient(params_of(model), batch) for batch in assembled(rows, weights, parts, 0)]
        found.append((sum(float(v) for (v, _), _ in made), jax.tree.map(lambda *x: sum(x), *[g for _, g in made])))
        found.append(sum(part.n_tokens for part in parts))
    (value, whole), n_alone, (again, of_packed), n_packed = found
    assert n_packed < n_alone
    assert again == pytest.approx(value, rel=1e-6, abs=1e-7)
    norm = np.sqrt(sum(float(jnp.square(g).sum()) for g in whole.values()))
    apart = np.sqrt(sum(float(jnp.square(g - of_packed[k]).sum()) for k, g in whole.items()))
    assert apart <= (5e-6 if name == TIS else 2e-6) * norm


# Weights and advantages


def test_an_episode_counts_once_in_a_mean_over_sequences():
    rows, owners = step_rows(some_trees(5))
    tokens = np.array([row.n_tokens for row in rows])
    of_episode = np.bincount(owners, tokens)
    assert len(rows) > len(of_episode)
    for mode, wanted in (
        ("token-mean", of_episode / of_episode.sum()),
        ("sequence-mean-token-mean", np.full(3, 1 / 3)),
        ("sequence-mean-token-scale", of_episode / 7 / 3),
        ("seq-mean-token-sum", of_episode / 3),
    ):
        weights = row_weights(rows, mode, 7, owners)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.bincount(owners, weights * tokens), wanted, rtol=1e-12, err_msg=mode)
        assert all(len({weights[i] for i, o in enumerate(owners) if o == owner}) == 1 for owner in set(owners))


def test_arrays_of_an_episode_go_to_its_rows_and_back():
    episode = tree(np.random.default_rng(3), n_branches=4)
    rows, values = policy_rows(episode, START), np.arange(float(episode.n_stored))
    parts = by_sequence(values, rows)
    assert [len(part) for part in parts] == episode.lengths()
    assert all(not part[: row.shared].any() for part, row in zip(parts, rows, strict=True))
    back = stored([replace(row, advantages=part) for row, part in zip(rows, parts, strict=True)], "advantages")
    assert back is not None
    assert np.array_equal(back, values)
    assert stored(rows, "reference") is None


def conversation(reward: float, turns: Sequence[float] = (0.0, 0.0, 0.0), **changes) -> EpisodeTokens:
    """Sequence 0: prompt, turn 0, turn 1 (2 tokens each); a branch after turn 0: its own turn 1 of 3 tokens."""
    mask, own = np.array([0, 0, 1, 1, 0, 1, 1], np.uint8), np.array([0, 1, 1, 1], np.uint8)
    logprobs = [np.where(m, -1.0, 0).astype(np.float32) for m in (mask, own)]
    branch = Branch(
        0, 4, np.arange(4, dtype=np.int32), own, logprobs[1], spans([VERSION] * 3, [5, 6, 7]),
        (Turn(5, 8, "assistant", turns[2]),),
    )  # fmt: skip
    made = Trajectory(
        1, 0, 0, "e", "t", 2, np.arange(7, dtype=np.int32), mask, logprobs[0], spans([VERSION] * 4, [2, 3, 5, 6]),
        (Turn(2, 4, "assistant", turns[0]), Turn(5, 7, "assistant", turns[1])), reward, True, "completed",
        branches=(branch,),
    )  # fmt: skip
    made.validate()
    return EpisodeTokens(replace(made, **changes))


def plain(episode: EpisodeTokens) -> EpisodeTokens:
    return EpisodeTokens(replace(episode.trajectory, branches=()))


SAMPLED = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1], bool)


@pytest.mark.parametrize(
    "section",
    [
        schema.GrpoSection(),
        sections.DrGrpoSection(name="drgrpo"),
        sections.RlooSection(name="rloo"),
        sections.DapoSection(name="dapo"),
        sections.GspoSection(name="gspo-token"),
        sections.CispoSection(name="cispo"),
        sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", baseline="group"),
    ],
)
def test_all_sampled_tokens_of_an_episode_share_its_advantage_against_other_episodes(section):
    """An episode of two sequences weighs in the group's statistics as one of one sequence does."""
    rewards = (1.0, 0.0, 0.5)
    group = [conversation(rewards[0]), plain(conversation(rewards[1])), conversation(rewards[2])]
    found = algorithm(section, 1, 8).advantages([group])[0]
    same = algorithm(section, 1, 8).advantages([[plain(conversation(r)) for r in rewards]])[0]
    if section.name == "reinforce_plus_plus":  # normalized over tokens, of which a tree has more
        shown = np.concatenate([a[SAMPLED[: len(a)]] for a in found])
        assert (shown.mean(), shown.std()) == pytest.approx((0, 1), abs=1e-5)
    else:
        assert [a[2] for a in found] == pytest.approx([a[2] for a in same])
    for a in found:
        assert np.array_equal(a, np.where(SAMPLED[: len(a)], a[2], 0.0))


def test_rewards_are_the_episodes_once_and_end_each_sequence():
    one = of_tokens(conversation(2.0, (0.25, 0.5, 1.0)).trajectory, "turn")
    assert one.tokens.tolist() == [0, 0, 0, 0.25, 0, 0, 0.5 + 0.25, 0, 0, 0, 1.0]
    assert (one.total, one.outcome, one.ends) == (2.0, 0.75, (6, 10)), "the last turn's reward is the whole episode's"
    assert one.along_sequences().tolist() == [0, 0, 0, 0.25, 0, 0, 0.75, 0, 0, 0, 1.75]
    moved = one.with_total(1.0)
    assert (moved.total, moved.outcome) == (1.0, 0.75)
    assert of_tokens(conversation(2.0).trajectory, "episode", -0.5).along_sequences()[[6, 10]].tolist() == [1.5, 1.5]


def test_turns_count_from_the_beginning_of_the_whole_sequence():
    assert turn_of_tokens(conversation(0).trajectory).tolist() == [-1, -1, 0, 0, -1, 1, 1, -1, 1, 1, 1]


def test_by_turn_an_episode_is_compared_by_the_mean_of_its_sequences():
    section = sections.DrGrpoSection(name="drgrpo", credit="turn")
    group = [conversation(1.0, (0.0, 0.0, 1.0)), plain(conversation(0.0))]
    first, second = algorithm(section, 1, 8).advantages([group])[0]
    # Outcome 0. From turn 0: sequence 0 has 0. Turn 1: 0 in sequence 0 and 1 in the branch, mean 0.5, against 0.
    assert first.tolist() == [0, 0, 0, 0, 0, 0.25, 0.25, 0, 0.25, 0.25, 0.25]
    assert second.tolist() == [0, 0, 0, 0, 0, -0.25, -0.25]


def test_returns_and_gae_run_along_each_sequences_own_tokens():
    gamma, lam = 0.9, 0.8
    rng = np.random.default_rng(0)
    values = np.where(SAMPLED, rng.standard_normal(11), 0).astype(np.float32)
    one = conversation(1.0)
    made = Ppo(schema.PpoSection(name="ppo", gamma=gamma, gae_lambda=lam, whiten_advantages=False), 1, 8)
    (found,) = made.advantages([[replace(one, values=values)]])[0]
    for at in ([2, 3, 5, 6], [8, 9, 10]):
        wanted, after, expected = [], 0.0, 0.0
        for i, place in enumerate(reversed(at)):
            after = (1.0 if i == 0 else 0.0) + gamma * expected - values[place] + gamma * lam * after
            expected = values[place]
            wanted.append(after)
        np.testing.assert_allclose(found[at], wanted[::-1], rtol=1e-6)
    section = sections.ReinforcePlusPlusSection(name="reinforce_plus_plus", gamma=gamma)
    (returns,) = algorithm(section, 1, 8).advantages([[one]])[0]
    raw = np.array([gamma ** (3 - i) for i in range(4)] + [gamma ** (2 - i) for i in range(3)])
    np.testing.assert_allclose(returns[SAMPLED], (raw - raw.mean()) / (raw.std() + 1e-6), rtol=1e-9)


def test_a_teacher_grades_the_tokens_of_all_sequences():
    one = conversation(1.0).trajectory
    taught = replace(
        one, teacher_logprobs=one.logprobs * 2,
        branches=(replace(one.branches[0], teacher_logprobs=one.branches[0].logprobs * 3),),
    )  # fmt: skip
    section = sections.OnPolicyDistillationSection(name="on_policy_distillation", gamma=1.0)
    (found,) = algorithm(section, 1, 8).advantages([[EpisodeTokens(taught)]])[0]
    assert found[SAMPLED].tolist() == [-4, -3, -2, -1, -6, -4, -2]


# Steps


def tree_group(ticket: int, version: str = VERSION, n: int = 2) -> Group:
    rng = np.random.default_rng([9, ticket])
    trees = [tree(rng, ticket, 1 + (ticket + i) % 3, own=4) for i in range(n)]
    return Group(ticket, "e", f"train/{ticket}", tuple(replace(t, sample_index=i) for i, t in enumerate(trees)))


def held(*tickets: int) -> list[ReadyGroup]:
    return [ready_group(tree_group(ticket), b"", f"{ticket}-0") for ticket in tickets]


OPTIONS = replace(test_policy.OPTIONS, layout=BatchLayout((32,), 4, 0), rows_per_step=4)
PACKED = replace(OPTIONS, layout=BatchLayout((32, 96), 1, 0, tokens=96))


def test_a_step_on_trees_is_numpys_and_takes_more_micro_batches_of_one_shape():
    """Loss of GRPO from the paper's formulas, sequence by sequence, in float64."""
    groups = held(1, 2)
    section = schema.GrpoSection()
    options = replace(OPTIONS, algorithm=algorithm(section, 1, 16), aggregation="sequence-mean-token-mean")
    found = test_policy.policy(options).step(groups, START)
    episodes = [t for h in groups for t in h.group.trajectories]
    assert found.more["sequences"] == sum(len(t.branches) + 1 for t in episodes) > 4
    assert found.more["compiled_shapes"] == 1
    assert (found.tokens, found.episodes) == (sum(t.n_sampled for t in episodes), 4)
    assert found.sequence_tokens == sum(t.n_stored for t in episodes)
    per_episode = []
    for group in groups:
        rewards = np.array([t.reward for t in group.group.trajectories])
        for t, a in zip(
            group.group.trajectories, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), strict=True
        ):
            losses = []
            for one in t.sequences():
                logp = grpo_ref.token_logprobs(test_policy.WEIGHTS, test_policy.CONFIG_1, one.token_ids, 0.9)
                ratio = np.exp(logp - one.logprobs)
                losses.append(-np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)[one.loss_mask > 0])
            per_episode.append(np.concatenate(losses).mean())
    assert found.loss == pytest.approx(np.mean(per_episode), rel=1e-4, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_packed_step_on_trees_is_the_same_and_again_bit_for_bit(name: str):
    given_ = test_policy.ppo_options(beta=0.1) if name == "ppo" else test_policy.OPTIONS
    layouts = OPTIONS.layout, PACKED.layout, PACKED.layout
    alone, together, again = (test_policy.policy(replace(given_, layout=one, rows_per_step=4)) for one in layouts)
    a, b, c = (one.step(held(1, 2), START) for one in (alone, together, again))
    assert (b.loss, b.grad_norm, b.kl) == pytest.approx((a.loss, a.grad_norm, a.kl), rel=1e-5, abs=1e-6)
    assert b.more["computed_tokens"] < a.more["computed_tokens"]
    assert b == c
    one, two = test_policy.params(together), test_policy.params(again)
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_the_difference_of_log_probabilities_covers_all_sequences():
    one = test_policy.policy(OPTIONS)
    groups = held(1, 2, 3)
    found = one.logprob_diffs(groups, START)
    rows = [row for h in groups[:1] for t in h.group.trajectories for row in policy_rows(t, START)]
    parts = arranged(rows, OPTIONS.layout, OPTIONS.layout.n_micro(len(rows)))
    batches = assembled(rows, np.zeros(len(rows)), parts, 0)
    scored = by_row([one._scorer.logprobs(one._learner.params, b) for b in batches], rows, parts)
    apart = np.concatenate([np.abs(s - r.behaviour)[r.mask > 0] for s, r in zip(scored, rows, strict=True)])
    assert found[0] == pytest.approx(apart.mean(), rel=1e-5)
    assert len(found) == 3


def test_supervised_rows_beyond_the_micro_batches_are_still_refused():
    rows, _ = step_rows(some_trees(5))
    with pytest.raises(DecodeError, match="do not fit"):
        arranged(rows, BatchLayout((64,), 1, 0), 2)
