"""Losses and advantages of the user's own: what is refused, and the examples against TRL and against formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.algorithms.terms.rewards import of_tokens
from services.trainer.batches.batch import Batch, BatchLayout, Row, policy_rows, row_weights, with_staleness
from services.trainer.groups.filters import FilterOptions, verdict
from shared import own_rules
from shared.algorithm_base import PolicyGradientSection
from shared.algorithm_schema import GrpoSection, PpoSection
from shared.errors import ConfigError, RuleFailed
from shared.run import rule_files
from shared.types import Branch, Group, Trajectory, VersionSpan, WeightVersion
from tests.trainer import test_policy
from tests.trainer.test_algorithms import trajectory
from volley_algorithms.rules.checks import check_rules
from volley_algorithms.rules.inputs import GroupInputs, group_inputs
from volley_algorithms.rules.made import made_groups
from volley_algorithms.rules.own import Own
from volley_algorithms.sections import DrGrpoSection, GspoSection, OwnSection, ReinforcePlusPlusSection

ROOT = Path(__file__).parents[4]
RULES = ROOT / "examples/rules"
TRL = json.loads((ROOT / "tests/fixtures/trl/rules.json").read_text(encoding="utf-8"))


def text_of(named: str, key: str = "loss") -> str:
    return rule_files.resolved({"algorithm": {key: named}}, RULES)[f"algorithm.{key}"]


def written(folder: Path, body: str, key: str = "loss") -> str:
    """The rule of a function's body, whose argument is t."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "import itertools\nimport jax\nimport jax.numpy as jnp\nimport numpy as np\n\ncount = itertools.count()\n"
    (folder / "rule.py").write_text(f"{head}\n\ndef rule(t):\n{lines}", encoding="utf-8")
    return text_of(f"{folder}/rule.py:rule", key)


def made(section: PolicyGradientSection) -> Own:
    check_rules(section, None)
    found = algorithm(section, 1, 8)
    assert isinstance(found, Own)
    return found


LOSSES = {
    "is not finite": "return jnp.log(t.advantages) * t.logprobs",
    "is not finite: .* 5 nats": "return -t.advantages * jnp.exp(200 * (t.logprobs - t.old))",
    "is not differentiable": "return -jax.lax.stop_gradient(t.logprobs) * t.advantages",
    "is not deterministic": "return -t.logprobs * t.advantages * np.random.rand()",
    "has a gradient outside the mask": "return -t.advantages * jnp.cumsum(t.logprobs[:, ::-1], 1)[:, ::-1]",
    "one micro-batch than for several": "a = t.advantages - t.advantages.max()\nreturn -a * t.logprobs",
    "another result for packed rows": "n = t.mask.sum(1, keepdims=True)\nreturn -t.advantages * t.logprobs / n",
    r"returned float32 \[\]": "return -(t.logprobs * t.advantages).sum()",
    "returned int32": "return jnp.zeros(t.mask.shape, jnp.int32)",
    "returned NoneType": "t.logprobs",
    "raised ZeroDivisionError at line 10: division by zero": "1 / 0",
    "raised AttributeError at line 10: .*no attribute 'rewards'": "return -t.rewards",
    "raised TracerArrayConversionError": "return np.exp(t.logprobs)",
    "raised TypeError at line 10": "return -t.reference",
}


@pytest.mark.parametrize(("why", "body"), LOSSES.items())
def test_a_loss_that_lacks_a_property_is_refused_by_its_name(tmp_path: Path, why: str, body: str):
    with pytest.raises(ConfigError, match=why) as refused:
        made(OwnSection(name="own", loss=written(tmp_path, body)))
    assert "rule.py:rule (sha256" in str(refused.value)


ADVANTAGES = {
    "returned 3 advantages for 4 episodes": "return t.rewards[1:]",
    "returned float64: ": "return t.rewards.mean()",
    r"returned \[2\] for an episode of 10 tokens": "return [np.ones(2) for _ in t.episodes]",
    "not finite for rewards .1. 1. 1.": "return (t.rewards - t.rewards.mean()) / t.rewards.std()",
    "not finite for rewards .0.3": "return (t.rewards - t.rewards.mean()) / (t.rewards.std(ddof=1) + 1e-6)",
    "is not deterministic": "return t.rewards + np.random.rand()",
    "raised RuntimeError at line 11": "if next(count) == 3:\n    raise RuntimeError\nreturn t.rewards",
    "raised ValueError at line 10: .*read-only": "t.rewards[0] = 1\nreturn t.rewards",
    "raised NameError at line 10": "return nothing",
}


@pytest.mark.parametrize(("why", "body"), ADVANTAGES.items())
def test_an_advantage_that_lacks_a_property_is_refused_by_its_name(tmp_path: Path, why: str, body: str):
    with pytest.raises(ConfigError, match=why) as refused, np.errstate(all="ignore"):
        made(OwnSection(name="own", advantage=written(tmp_path, body, "advantage")))
    assert "rule.py:rule (sha256" in str(refused.value)


FILTERS = {
    "returned float64": "return t.rewards.mean()",
    "returned ndarray": "return t.rewards > 0",
    "returned NoneType": "t.rewards",
    "is not deterministic": "return next(count) % 4 > 0",
    "raised ValueError at line 10: .*read-only": "t.success[0] = True\nreturn True",
}


@pytest.mark.parametrize(("why", "body"), FILTERS.items())
def test_a_filter_that_lacks_a_property_is_refused_by_its_name(tmp_path: Path, why: str, body: str):
    with pytest.raises(ConfigError, match=f"trainer.filters.custom.*rule.py:rule .sha256 .*{why}"):
        check_rules(GrpoSection(), written(tmp_path, body, "credit"))


CREDITS = {
    r"returned \[\] for 1 turns": "return t.rewards.sum()",
    r"returned \[1\] for 2 turns": "return t.rewards[:1]",
    "returned str: could not convert": "return 'much'",
    "not finite for rewards .0. 0.": "return t.rewards / t.rewards.sum()",
    "is not deterministic": "return t.rewards + next(count)",
    "raised IndexError at line 10": "return t.rewards[9] + t.rewards",
}


@pytest.mark.parametrize(("why", "body"), CREDITS.items())
def test_a_credit_that_lacks_a_property_is_refused_by_its_name(tmp_path: Path, why: str, body: str):
    with pytest.raises(ConfigError, match=f"algorithm.credit.*rule.py:rule .sha256 .*{why}"), np.errstate(all="ignore"):
        check_rules(GrpoSection(credit=written(tmp_path, body, "credit")), None)


@pytest.mark.parametrize("name", ["vespo", "luspo"])
def test_the_examples_have_the_loss_and_the_gradient_of_trl(name: str):
    mask, old = np.array(TRL["mask"], np.float32), np.array(TRL["old"], np.float32)
    advantages = np.array(TRL["advantages"])[:, None] * mask
    lengths, n = mask.sum(1, keepdims=True), float(len(mask))
    weight = np.full_like(lengths, 1 / mask.sum()) if name == "vespo" else 1 / (n * lengths)
    zeros = np.zeros(mask.shape, np.int32)
    batch = Batch(zeros, zeros, mask, old * mask, advantages.astype(np.float32), mask, weight, staleness=zeros)
    own = made(OwnSection(name="own", loss=text_of(f"{name}.py:loss")))

    def total(logprobs: jax.Array) -> jax.Array:
        return own.loss(TokenScores(logprobs, jnp.zeros_like(logprobs)), batch)[0]

    loss, gradient = jax.value_and_grad(total)(jnp.array(TRL["logprobs"], jnp.float32))
    assert float(loss) == pytest.approx(TRL[name]["loss"], rel=2e-6)
    np.testing.assert_allclose(gradient, TRL[name]["gradient"], rtol=2e-5, atol=1e-7)


def test_luspo_is_gspo_without_the_division_by_lengths():
    tokens = np.array(TRL["mask"]).sum(1)
    rows = [Row(*(np.ones(int(n) + 1),) * 5) for n in tokens]
    of_luspo, of_gspo = (row_weights(rows, how, 1) for how in ("sequence-mean-token-mean", "seq-mean-token-sum"))
    np.testing.assert_allclose(of_luspo * tokens, of_gspo)
    mask, present = np.array(TRL["mask"], np.float32), jnp.array(TRL["logprobs"], jnp.float32)
    old, advantages = (np.array(TRL[k], np.float32) for k in ("old", "advantages"))
    ints, found = np.zeros(mask.shape, np.int32), list[float]()
    gspo = GspoSection(name="gspo-token", epsilon=2e-3, epsilon_high=2.5e-3)
    for section, weight in ((OwnSection(name="own", loss=text_of("luspo.py:loss")), of_luspo), (gspo, of_gspo)):
        batch = Batch(ints, ints, mask, old * mask, advantages[:, None] * mask, mask, weight[:, None])
        loss, _ = algorithm(section, 1, 8).loss(TokenScores(present, jnp.zeros_like(present)), batch)
        found.append(float(loss))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("n_right", range(7))
def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k_answers(n_right: int):
    own, rewards = made(OwnSection(name="own", advantage=text_of("pass_at_k.py:advantage", "advantage"))), np.zeros(6)
    rewards[:n_right] = 1
    (found,) = own.advantages([[EpisodeTokens(trajectory(reward)) for reward in rewards]])
    draws = [(set(one), float(rewards[list(one)].max())) for one in combinations(range(6), 4)]
    mean, deviation = np.mean([r for _, r in draws]), np.std([r for _, r in draws])
    for i, one in enumerate(found):
        mine = np.mean([r - mean for members, r in draws if i in members])
        assert one[4] == pytest.approx(mine / deviation if deviation else 0, abs=1e-9)
        assert not one[~trajectory(0).loss_mask.astype(bool)].any()


GRPO = """
import jax.numpy as jnp


def advantage(group):
    r = group.rewards
    if len(r) < 2 or r.max() - r.min() < 1e-9:
        return 0 * r
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def loss(tokens):
    ratio = tokens.ratio()
    free, held = -tokens.advantages * ratio, -tokens.advantages * jnp.clip(ratio, 0.8, 1.2)
    return jnp.maximum(free, held)
"""


WHOLE = pytest.param(BatchLayout((16,), 8, 0), marks=pytest.mark.long)


@pytest.mark.parametrize("layout", [WHOLE, BatchLayout((16,), 3, 0), BatchLayout((64,), 1, 0, 64)])
def test_a_rule_that_is_grpos_trains_its_weights_bit_for_bit(tmp_path: Path, layout: BatchLayout):
    """In one micro-batch, in several and packed, with a KL term and a correction."""
    (tmp_path / "grpo.py").write_text(GRPO, encoding="utf-8")
    keys = {key: text_of(f"{tmp_path}/grpo.py:{key}", key) for key in ("loss", "advantage")}
    weights, numbers = [], []
    for section in (
        GrpoSection(beta=0.1, sampler_is="token"),
        OwnSection(name="own", beta=0.1, sampler_is="token", **keys),
    ):
        options = replace(test_policy.OPTIONS, algorithm=algorithm(section, 1, 16), layout=layout)
        policy = test_policy.policy(options)
        metrics = policy.step(test_policy.held(1, 2, 3, 4), test_policy.START)
        weights.append(test_policy.params(policy))
        numbers.append((metrics.loss, metrics.grad_norm, metrics.kl))
    assert numbers[0] == numbers[1]
    assert all(np.array_equal(value, weights[1][name]) for name, value in weights[0].items())


def branched() -> Trajectory:
    """8 own tokens of weights 3 and 4, and a branch of 4 tokens of weights 5 after 6 of them."""
    spans = (VersionSpan("e000001-s000003", 4, 7), VersionSpan("e000002-s000004", 9, 14))
    branch = Branch(
        0,
        6,
        np.arange(4, dtype=np.int32),
        np.array([0, 1, 1, 1], np.uint8),
        np.array([0, -1, -1, -1], np.float32),
        (VersionSpan("e000002-s000005", 7, 10),),
        (),
    )
    return replace(trajectory(2.0), versions=spans, branches=(branch,), reward_components={"goal": 1.5})


def test_staleness_counts_steps_of_each_token():
    one, before = branched(), WeightVersion(2, 5)
    first, second = with_staleness(policy_rows(one, before), one, before)
    assert first.staleness is not None
    assert second.staleness is not None
    assert first.staleness.tolist() == [0] * 4 + [2] * 3 + [0] * 2 + [1] * 5
    assert second.staleness.tolist() == [0] * 10


def test_an_advantage_sees_sequences_turns_and_weights():
    group = [branched(), trajectory(1.0)]
    found = group_inputs(group, [of_tokens(one, "episode") for one in group])
    one = found.episodes[0]
    assert (found.rewards.tolist(), found.lengths.tolist()) == ([2.0, 1.0], [11, 8])
    np.testing.assert_array_equal(found.components["goal"], [1.5, np.nan])
    assert one.sequence.tolist() == [0] * 14 + [1] * 4
    assert one.ids.tolist() == [*group[0].token_ids, 0, 1, 2, 3]
    assert one.turn.tolist() == [-1] * 4 + [0] * 3 + [-1] * 2 + [1] * 5 + [-1] + [1] * 3
    assert one.step.tolist() == [-1] * 4 + [3] * 3 + [-1] * 2 + [4] * 5 + [-1] + [5] * 3
    assert one.rewards.sum() == 2.0


def test_an_advantage_may_be_of_tokens(tmp_path: Path):
    rule = written(tmp_path, "return [e.rewards[::-1].cumsum()[::-1] * (e.turn + 1) for e in t.episodes]", "advantage")
    ((found,),) = made(OwnSection(name="own", advantage=rule)).advantages([[EpisodeTokens(trajectory(3.0))]])
    assert found.tolist() == [0] * 4 + [3] * 3 + [0] * 2 + [6] * 5


def test_an_advantage_that_fails_later_stops_training(tmp_path: Path):
    rule = written(tmp_path, "return t.rewards / (t.rewards != 7)", "advantage")
    own = made(OwnSection(name="own", advantage=rule))
    why = r"rule.py:rule \(sha256 \w+…\) returned advantages that are not finite"
    with pytest.raises(RuleFailed, match=why), np.errstate(all="ignore"):
        own.advantages([[EpisodeTokens(trajectory(7.0))]])


ONE_BY_ONE = "import numpy as np\n\ndef credit(turns):\n    return np.cumsum(turns.rewards[::-1])[::-1]\n"


@pytest.mark.parametrize("of", [GrpoSection, DrGrpoSection, ReinforcePlusPlusSection, PpoSection])
def test_the_sum_of_the_following_rewards_is_the_credit_of_turns(tmp_path: Path, of: Any):
    """Also with branches, and along a sequence that a critic values."""
    (tmp_path / "sums.py").write_text(ONE_BY_ONE, encoding="utf-8")
    text = text_of(f"{tmp_path}/sums.py:credit", "credit")
    episodes = [
        replace(branched(), turns=trajectory(2.0, turns=(0.5, 2.0)).turns),
        trajectory(1.0, turns=(1.0,)),
        trajectory(0.5),
    ]
    group = [EpisodeTokens(one, values=np.linspace(0, 1, one.n_stored, dtype=np.float32)) for one in episodes]
    name = get_args(of.model_fields["name"].annotation)[0]
    (found,), (expected,) = (
        algorithm(of(name=name, credit=credit), 1, 8).advantages([group]) for credit in (text, "turn")
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
        assert ours.any()


def test_the_discounted_credit_is_the_sum_of_its_formula():
    section = DrGrpoSection(name="drgrpo", credit=text_of("discounted.py:credit", "credit"))
    episodes = [trajectory(2.0, turns=(0.5, 0.25)), trajectory(1.0, turns=(1.0,)), trajectory(0.0)]
    (found,) = algorithm(section, 1, 8).advantages([[EpisodeTokens(one) for one in episodes]])
    first, second = np.array([0.5 + 0.95 * 1.5, 1.0, 0.0]), np.array([1.5, 0.0, 0.0])
    for i, one in enumerate(found):
        np.testing.assert_allclose(one[4:7], first[i] - first.mean())
        np.testing.assert_allclose(one[9:14], second[i] - second.mean())
        assert not one[[0, 1, 2, 3, 7, 8]].any()


@pytest.mark.parametrize(("n_right", "kept"), [(0, False), (1, True), (4, True), (5, False)])
def test_the_bounds_of_accuracy_keep_what_is_between(n_right: int, kept: bool):
    named = {"trainer": {"filters": {"custom": "accuracy_bounds.py:keeps"}}}
    text = rule_files.resolved(named, RULES)[own_rules.FILTER]
    episodes = tuple(trajectory(float(i < n_right)) for i in range(5))
    found = verdict(Group(1, "toy", "train/1", episodes), FilterOptions(custom=text))
    assert (found is None) is kept
    assert kept or found[0] == "custom"


def test_made_groups_answer_for_any_component_and_episode():
    groups: list[GroupInputs] = made_groups(reference=True)
    assert {len(group.rewards) for group in groups} == {1, 2, 3, 4}
    assert all(np.array_equal(group.components["any name"], group.rewards) for group in groups)
    assert any(e.sequence.max() == 1 for group in groups for e in group.episodes)
    assert all(e.reference is not None for group in groups for e in group.episodes)
