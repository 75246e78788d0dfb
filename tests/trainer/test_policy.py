"""A step of the whole policy: bit-identical from the same groups, right against numpy, continued from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from services.trainer.algorithms.grpo import Grpo
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm
from services.trainer.algorithms.terms.algorithm import EpisodeGroup
from services.trainer.batches.batch import BatchLayout
from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.learner.critic import CriticSetup
from services.trainer.learner.optimizer import OptimizerOptions, schedule
from services.trainer.learner.policy import Policy, PolicyOptions
from services.trainer.learner.shapes import micro_batch
from services.trainer.models.options import ModelOptions
from shared.algorithm_base import PolicyGradientSection
from shared.algorithm_schema import GrpoSection, PpoSection
from shared.errors import NonFinite, WeightsError
from shared.models.config import ModelConfig
from shared.run.rounding import LIMIT, MOST
from shared.run.token_values import CLIPPED, REJECTED, TRUNCATED
from shared.types import WeightVersion
from tests.support import decoder_reference, models
from tests.trainer.support import CONFIG, group, model_of, sharing
from volley_algorithms.sao import Sao
from volley_algorithms.sections import CispoSection, DppoSection, SaoSection
from volley_proof.replay.values import values_of

CONFIG_1 = CONFIG | {"num_hidden_layers": 1}
WEIGHTS = models.random_weights(CONFIG_1, seed=4)
START = WeightVersion(1, 0)
SECTION = GrpoSection(beta=0.1, sampler_is="token")
OPTIONS = PolicyOptions(
    algorithm=algorithm(SECTION, 1, 16),
    aggregation="token-mean",
    temperature=0.9,
    n_iterations=1,
    max_response_length=16,
    rows_per_step=8,
    layout=BatchLayout((16,), 4, 0),
    optimizer=OptimizerOptions(1e-3, "constant", 0, 10, 0.9, 0.95, 0.0, 1.0),
    published_dtype="float32",
)


def policy(options: PolicyOptions = OPTIONS, weights: models.Weights = WEIGHTS, reference=None) -> Policy:
    return sharing(unshared(options, weights, reference))


def unshared(options: PolicyOptions, weights: models.Weights = WEIGHTS, reference=None) -> Policy:
    """A policy that compiles its own programs."""
    return Policy(model_of(weights, CONFIG_1), options, CONFIG_1, reference)


def held(*tickets: int, version: str = str(START)) -> list[ReadyGroup]:
    return [ready_group(group(ticket, version, seed=5), b"", f"{ticket}-0") for ticket in tickets]


def params(one: Policy) -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in one.contents().params.items()}


def test_the_same_groups_give_bit_identical_weights_also_from_a_checkpoint():
    straight = policy()
    first = straight.step(held(1, 2, 3, 4), START)
    saved = straight.contents()
    weights, optimizer = ({k: np.asarray(v) for k, v in x.items()} for x in (saved.params, saved.optimizer))
    second = straight.step(held(5, 6, 7, 8), WeightVersion(1, 1))

    resumed = Policy(model_of_leaves(weights), OPTIONS, CONFIG_1, params(policy()))
    resumed.load_optimizer(optimizer)
    assert resumed.step(held(5, 6, 7, 8), WeightVersion(1, 1)) == second
    a, b = params(straight), params(resumed)
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert (first.kl, first.step, second.version) == (pytest.approx(0, abs=1e-6), 1, "e000001-s000002")
    assert second.kl > 0


@pytest.mark.parametrize("layout", [OPTIONS.layout, BatchLayout((64,), 1, 0, tokens=64)])
def test_a_step_runs_what_was_compiled_before_it(layout: BatchLayout, caplog: pytest.LogCaptureFixture):
    """The same weights, and nothing is left to compile."""
    options = replace(OPTIONS, layout=layout)
    model = ModelOptions(Path(), "float32", "none", (1, 1), ("fsdp", "tp"), 0)
    shapes = micro_batch(ModelConfig.parse(CONFIG_1), model, options, layout.rows)
    one, other = unshared(options), unshared(options)
    assert layout.has_one_shape
    one.compile(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    batches, _ = one._batches(held(1, 2, 3, 4), START)
    assert len(batches) > 1
    with jax.log_compiles():
        one._learner.update(batches)
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        other._learner.update(batches)
        assert [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert one.checksum() == other.checksum()


def test_values_of_tokens_have_the_advantages_of_the_step():
    """Also where advantages have a KL term of the sampler's log-probabilities, and not of the trainer's."""
    section = GrpoSection(beta=0.5, kl_in="reward")
    one, groups = policy(replace(OPTIONS, algorithm=algorithm(section, 1, 16))), held(1, 2, 3, 4)
    values = [its for group in values_of(one, groups, START) for its in group]
    batches, _ = one._batches(groups, START)
    of_step = np.concatenate([batch.advantages[batch.mask > 0] for batch in batches])
    shown = np.concatenate([its.advantages for its in values])
    assert sorted(of_step[of_step != 0].tolist()) == sorted(shown[shown != 0].tolist())
    assert all(its.logprobs.any() for its in values)


PADDED, PACKED = OPTIONS.layout, BatchLayout((64,), 1, 0, tokens=64)
CLIPPING = GrpoSection(epsilon=0.01)
TRUNCATING = GrpoSection(sampler_is="token", sampler_is_threshold=1.0)
REJECTING = GrpoSection(sampler_is="token", sampler_rs="token", sampler_rs_bounds=(0.9, 1.1))
DPPO, CISPO = DppoSection(name="dppo", epsilon=0.001, epsilon_high=0.001), CispoSection(name="cispo", epsilon=0.5)


@pytest.mark.parametrize(
    ("section", "layout", "mark"),
    [
        (CLIPPING, PADDED, CLIPPED),
        (REJECTING, PACKED, REJECTED),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (TRUNCATING, PADDED, TRUNCATED),
                (DPPO, PADDED, CLIPPED),
                (CISPO, PACKED, CLIPPED),
            )
        ),
    ],
)
def test_masks_of_tokens_are_those_of_the_loss(section: PolicyGradientSection, layout: BatchLayout, mark: int):
    """Their means over the sampled tokens are the fractions that the step reports."""
    options = replace(OPTIONS, algorithm=algorithm(section, 1, 16), layout=layout)
    one, groups = policy(options), held(1, 2, 3, 4)
    values = [its for group in values_of(one, groups, START) for its in group]
    sampled = [t.stored("loss_mask") > 0 for h in groups for t in h.group.trajectories]
    marks, weights = (
        np.concatenate([getattr(its, kind)[at] for its, at in zip(values, sampled, strict=True)])
        for kind in ("marks", "weights")
    )
    step = one.step(groups, START)
    assert step.tokens == len(marks)
    assert np.mean(marks & CLIPPED > 0) == pytest.approx(step.clip_fraction)
    assert weights.mean() == pytest.approx(step.more.get("importance_weight", 1.0), rel=1e-5)
    assert np.mean(marks & REJECTED > 0) == pytest.approx(step.more.get("rejected_fraction", 0.0))
    assert np.all(weights[marks & REJECTED > 0] == 0)
    assert np.any(marks & mark), "the case has such tokens"


def model_of_leaves(leaves: dict[str, np.ndarray]):
    from services.trainer.models.family import build, make_mesh
    from shared.models.config import ModelConfig

    return build(
        ModelConfig.parse(CONFIG_1), lambda name, _: leaves[name], make_mesh((1, 1), ("fsdp", "tp")), dtype="float32"
    )


def test_reported_numbers_equal_their_definitions():
    groups = held(1, 2, 3, 4)
    found = policy().step(groups, START)
    trajectories = [t for h in groups for t in h.group.trajectories]
    differences = []
    for t in trajectories:
        table = decoder_reference.log_softmax(
            decoder_reference.logits(WEIGHTS, CONFIG_1, t.token_ids), OPTIONS.temperature
        )
        logp = table[np.arange(len(t.token_ids) - 1), t.token_ids[1:]]
        differences.append(np.abs(logp - t.logprobs[1:])[t.loss_mask[1:] > 0])
    rewards = np.array([t.reward for t in trajectories])
    assert (
        found.logprob_abs_diff
        == pytest.approx(np.concatenate(differences).mean(), rel=1e-4)
        == found.logprob_abs_diff_current
    )
    assert found.logprob_abs_diff_current_max == pytest.approx(np.concatenate(differences).max(), rel=1e-4)
    assert (found.reward_mean, found.reward_std, found.success) == pytest.approx(
        (rewards.mean(), rewards.std(), rewards.mean())
    )
    assert (found.tokens, found.groups, found.episodes) == (sum(t.n_sampled for t in trajectories), 4, 8)
    assert 0 < found.entropy <= np.log(CONFIG_1["vocab_size"])


def test_the_probe_is_the_published_models_log_probabilities():
    probe = policy().contents().probe
    assert probe is not None
    exact = decoder_reference.score(WEIGHTS, CONFIG_1, probe.input_ids[:1], probe.input_ids[1:])
    np.testing.assert_allclose(probe.logprobs, exact, atol=2e-5)
    assert 0 < np.mean(probe.noise) <= np.max(probe.noise) < 2e-5
    assert len(set(probe.input_ids)) == len(probe.input_ids) == len(probe.logprobs) + 1


def test_a_step_measures_the_probe_anew():
    """What was kept of the weights before the step would prove the wrong weights to the servers."""
    one = policy()
    before = one.contents().probe
    one.step(held(1, 2, 3, 4), START)
    stepped = one.contents()
    assert stepped.probe is not None
    assert stepped.probe != before
    loaded = policy()
    loaded.contents()
    loaded.load(*({k: np.asarray(v) for k, v in x.items()} for x in (stepped.params, stepped.optimizer)))
    assert loaded.contents().probe == stepped.probe


def test_iterations_move_further_on_the_same_data():
    groups = held(1, 2, 3, 4)
    one, three = (
        policy(),
        policy(replace(OPTIONS, n_iterations=3, algorithm=algorithm(SECTION, 3, 16))),
    )
    start = params(one)
    a, b = one.step(groups, START), three.step(groups, START)
    assert a.logprob_abs_diff == pytest.approx(b.logprob_abs_diff, rel=1e-5)
    moved = [sum(np.abs(x[k] - start[k]).sum() for k in start) for x in (params(one), params(three))]
    assert moved[1] > 1.5 * moved[0]


@cache
def ppo_options(**changes: Any) -> PolicyOptions:
    section = PpoSection(name="ppo", **changes)
    made = Ppo(section, 1, 16)
    return replace(OPTIONS, algorithm=made, critic=CriticSetup(made, OPTIONS.optimizer, section.critic_warmup_steps))


def test_ppo_goes_on_from_a_checkpoint_bit_by_bit_with_its_critic():
    straight = policy(ppo_options())
    first = straight.step(held(1, 2, 3, 4), START)
    saved = straight.contents()
    weights, training = ({k: np.asarray(v) for k, v in x.items()} for x in (saved.params, saved.optimizer))
    second = straight.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    resumed = Policy(model_of_leaves(weights), ppo_options(), CONFIG_1, None)
    resumed.load_optimizer(training)
    assert resumed.step(held(5, 6, 7, 8), WeightVersion(1, 1)) == second
    for a, b in zip(*((one.contents().params, one.contents().optimizer) for one in (straight, resumed)), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert {"critic.params.value_head", "critic.opt_state.0.norm"} <= training.keys()
    assert first.more["critic/value_mean"] == 0
    assert second.more["critic/value_mean"] != 0
    assert 0 < second.more["critic/value_loss"] < first.more["critic/value_loss"]


def test_sao_takes_more_updates_of_the_critic_and_leaves_its_attention():
    """And goes on from a checkpoint bit by bit, frozen attention included."""
    options = sao_options()
    straight = policy(options)
    initial = {k: np.asarray(v) for k, v in straight.contents().optimizer.items()}
    straight.step(held(1, 2, 3, 4), START)
    saved = straight.contents()
    weights, training = ({k: np.asarray(v) for k, v in x.items()} for x in (saved.params, saved.optimizer))
    critic = {name: value for name, value in training.items() if name.startswith("critic.params.")}
    moved = {name for name, value in critic.items() if not np.array_equal(value, initial[name])}
    assert {name for name in critic if ".attn." in name}.isdisjoint(moved)
    assert {"critic.params.value_head", "critic.params.layers.0.mlp.gate_proj.kernel"} <= moved
    counts = [int(value) for name, value in training.items() if name.startswith("critic.") and name.endswith("count")]
    assert set(counts) == {2}
    assert not any(".attn." in name for name in training if name.startswith("critic.opt_state"))
    second = straight.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    resumed = Policy(model_of_leaves(weights), options, CONFIG_1, None)
    resumed.load_optimizer(training)
    assert resumed.step(held(5, 6, 7, 8), WeightVersion(1, 1)) == second
    assert resumed.optimizer_checksum() == straight.optimizer_checksum()


@cache
def sao_options(**changes: Any) -> PolicyOptions:
    section = SaoSection(name="sao", **changes)
    made = Sao(section, 1, 16)
    critic = CriticSetup(made, OPTIONS.optimizer, 0, section.critic_updates, section.critic_frozen == "none")
    return replace(OPTIONS, algorithm=made, critic=critic)


def test_a_checkpoint_without_a_critic_is_no_start_for_ppo():
    with pytest.raises(WeightsError, match="holds no critic"):
        policy(ppo_options()).load_optimizer({k: np.asarray(v) for k, v in policy().contents().optimizer.items()})


def test_the_policy_waits_for_the_critic():
    one = policy(ppo_options(critic_warmup_steps=1))
    before, critic = params(one), np.asarray(one.contents().optimizer["critic.params.value_head"])
    one.step(held(1, 2, 3, 4), START)
    after = params(one)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not np.array_equal(critic, one.contents().optimizer["critic.params.value_head"])
    one.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    assert any(not np.array_equal(before[name], value) for name, value in params(one).items())


def test_a_critic_that_is_not_finite_refuses_the_step():
    options = ppo_options()
    assert options.critic is not None
    far = replace(options.critic, optimizer=replace(OPTIONS.optimizer, learning_rate=1e38))
    one = policy(replace(options, critic=far))
    one.step(held(1, 2, 3, 4), START)
    with pytest.raises(NonFinite) as caught, np.errstate(invalid="ignore"):
        one.step(held(5, 6, 7, 8), START)
    assert any("critic" in what for what in caught.value.what)


class Listening(Grpo):
    """Remembers what it was asked about."""

    heard: Sequence[EpisodeGroup] = ()

    def advantages(self, groups: Sequence[EpisodeGroup]) -> list[list[np.ndarray]]:
        self.heard = groups
        return super().advantages(groups)


def test_an_episode_that_is_left_out_of_the_loss_is_scored_like_any_other():
    groups = held(1, 2, 3, 4)
    first = groups[0].group
    cut = replace(first, trajectories=(replace(first.trajectories[0], status="truncated"), *first.trajectories[1:]))
    listening = Listening(GrpoSection(beta=0.5, kl_in="reward", mask_truncated=True), 1, 16)
    found = policy(replace(OPTIONS, algorithm=listening)).step([ready_group(cut, b"", "1-0"), *groups[1:]], START)
    reference = listening.heard[0][0].reference
    assert reference is not None
    assert (reference < 0).sum() == first.trajectories[0].n_sampled
    assert found.tokens == sum(t.n_sampled for h in groups for t in h.group.trajectories) - (reference < 0).sum()


def test_rounded_publication_keeps_exact_master_weights():
    contents = policy(replace(OPTIONS, published_dtype="bfloat16")).contents()
    assert {v.dtype.name for v in contents.params.values()} == {"bfloat16"}
    assert contents.master is not None
    assert {v.dtype.name for v in contents.master.values()} == {"float32"}


def test_optimizer_state_of_another_model_is_refused():
    state = policy().contents().optimizer
    name = next(name for name in state if name.endswith("mu.final_norm.w"))
    with pytest.raises(WeightsError, match="another optimizer"):
        policy().load_optimizer({**state, name: np.zeros(3)})


def test_a_checkpoint_of_another_micro_batch_goes_on():
    """Its state is the same, however the rows of a step are cut."""
    whole = policy(replace(OPTIONS, layout=BatchLayout((16,), 8, 0)))
    parts = policy()
    for one in (whole, parts):
        one.step(held(1, 2, 3, 4), START)
    state = parts.contents().optimizer
    whole.load_optimizer({name: np.asarray(value) for name, value in state.items()})
    found = whole.contents().optimizer
    assert all(np.array_equal(found[name], value) for name, value in state.items())


def test_learning_rate_schedules():
    base = OptimizerOptions(1.0, "constant", 4, 12, 0.9, 0.95, 0.0, 1.0)
    rates = {
        kind: [float(schedule(replace(base, schedule_type=kind))(i)) for i in (0, 4, 8, 12)]
        for kind in ("constant", "linear", "cosine")
    }
    assert rates == {
        "constant": pytest.approx([0.25, 1, 1, 1]),
        "linear": pytest.approx([0.25, 1, 0.5, 0]),
        "cosine": pytest.approx([0.25, 1, 0.5, 0], abs=1e-6),
    }


FAR = replace(OPTIONS, optimizer=replace(OPTIONS.optimizer, learning_rate=1e30))


@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.long), 8], ids=["accumulated", "whole"])
def test_the_first_step_of_a_huge_learning_rate_is_refused_and_undone_bit_for_bit(rows: int):
    """The parameters it gives are finite in float32: what they compute is not."""
    options = replace(FAR, layout=BatchLayout((16,), rows, 0))
    one, other = policy(options), policy(options)
    before = one.contents()
    params_before, optimizer_before = (
        {k: np.asarray(v) for k, v in x.items()} for x in (before.params, before.optimizer)
    )
    with pytest.raises(NonFinite, match=r"e000001-s000001: .* not finite") as caught:
        one.step(held(1, 2, 3, 4), START)
    assert "the log-probabilities of the probe" in caught.value.what
    with pytest.raises(NonFinite):
        one.contents()
    one.load(params_before, optimizer_before)
    after = one.contents()
    assert all(np.array_equal(params_before[k], after.params[k]) for k in params_before)
    assert all(np.array_equal(optimizer_before[k], after.optimizer[k]) for k in optimizer_before)
    with pytest.raises(NonFinite) as again:
        one.step(held(1, 2, 3, 4), START)
    with pytest.raises(NonFinite) as fresh:
        other.step(held(1, 2, 3, 4), START)
    assert again.value.what == fresh.value.what == caught.value.what


@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.long), 8], ids=["accumulated", "whole"])
def test_after_a_refused_step_training_goes_on_as_if_it_had_not_been(rows: int):
    options = replace(OPTIONS, layout=BatchLayout((16,), rows, 0))
    one, other = policy(options), policy(options)
    for each in (one, other):
        each.step(held(1, 2, 3, 4), START)
    saved = one.contents()
    saved_params, saved_optimizer = ({k: np.asarray(v) for k, v in x.items()} for x in (saved.params, saved.optimizer))
    name = sorted(saved_params)[0]
    one.load({**saved_params, name: np.full_like(saved_params[name], np.nan)}, saved_optimizer)
    with pytest.raises(NonFinite) as caught:
        one.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    assert {"loss", "grad_norm", name} <= set(caught.value.what)
    one.load(saved_params, saved_optimizer)
    assert one.step(held(5, 6, 7, 8), WeightVersion(1, 1)) == other.step(held(5, 6, 7, 8), WeightVersion(1, 1))
    a, b = params(one), params(other)
    assert all(np.array_equal(a[k], b[k]) for k in a)


def test_parameters_that_only_the_published_dtype_cannot_hold_are_refused():
    largest = np.finfo(np.float32).max
    name = "lm_head.weight" if "lm_head.weight" in WEIGHTS else sorted(WEIGHTS)[0]
    weights = {**WEIGHTS, name: WEIGHTS[name].copy()}
    weights[name].flat[0] = largest
    with pytest.raises(NonFinite) as caught:
        policy(replace(OPTIONS, published_dtype="bfloat16"), weights).contents()
    assert len(caught.value.what) >= 1
    assert any("head" in what or "embed" in what for what in caught.value.what)


def test_the_probe_tells_the_rounding_of_bfloat16():
    """Its log-probabilities are exact for the published parameters, which are rounded; its noise is that of rounded
    arithmetic.
    """
    model = model_of(WEIGHTS, CONFIG_1, dtype="bfloat16")
    probe = Policy(model, replace(OPTIONS, published_dtype="bfloat16"), CONFIG_1, None).contents().probe
    assert probe is not None
    published = {name: decoder_reference.bfloat16(value.astype(np.float64)) for name, value in WEIGHTS.items()}
    ids = probe.input_ids
    exact = decoder_reference.score(published, CONFIG_1, ids[:1], ids[1:])
    np.testing.assert_allclose(probe.logprobs, exact, atol=2e-5)
    emulated = np.abs(
        decoder_reference.score(WEIGHTS, CONFIG_1, ids[:1], ids[1:], keep=decoder_reference.bfloat16) - exact
    )
    assert np.mean(emulated) / 3 < np.mean(probe.noise) < 3 * np.mean(emulated)
    assert np.minimum(emulated / probe.noise, MOST).mean() < LIMIT


def test_vectors_are_trained_as_they_are_published():
    """Norms use their factors in float32, and engines get them rounded; the loss must not see what no engine has."""
    one, other = fine_and_rounded_vectors(OPTIONS)
    assert one.step(held(1, 2), START).loss == other.step(held(1, 2), START).loss


def fine_and_rounded_vectors(options: PolicyOptions) -> list[Policy]:
    """Two bfloat16 policies: norms and biases of one have more digits, those of the other are rounded by numpy."""
    config = CONFIG_1 | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 8}
    weights = models.random_weights(config, seed=4)
    fine = {name: np.float32(1 + 2e-3) * v if v.ndim == 1 else v for name, v in weights.items()}
    assert {name.rpartition(".")[2] for name, v in fine.items() if v.ndim == 1} == {"weight", "bias"}
    rounded = {
        name: decoder_reference.bfloat16(v.astype(np.float64)).astype(np.float32) if v.ndim == 1 else v
        for name, v in fine.items()
    }
    assert any(not np.array_equal(fine[name], v) for name, v in rounded.items() if name.endswith("bias"))
    return [sharing(Policy(model_of(one, config, dtype="bfloat16"), options, config, None)) for one in (fine, rounded)]


def test_the_critic_uses_its_vectors_unrounded():
    """No engine gets them: they stay exact in training and in checkpoints."""
    options, batch = ppo_options(), held(1, 2)
    found = []
    for one in fine_and_rounded_vectors(options):
        state = {name: np.asarray(value) for name, value in one.contents().optimizer.items()}
        head = state["critic.params.value_head"]
        one.load_optimizer(state | {"critic.params.value_head": np.ones_like(head)})
        found.append(one.step(batch, START))
    exact, rounded = found
    assert exact.more["critic/value_mean"] != rounded.more["critic/value_mean"]
    assert exact.kl == rounded.kl


def test_the_difference_of_a_group_is_that_of_a_numpy_model_over_tokens_of_the_present_weights():
    one, groups = policy(), held(1, 2, 3, 4)
    mixed = replace(
        groups[1].group.trajectories[0], versions=spans_of(groups[1].group.trajectories[0], "e000001-s000001")
    )
    groups[1] = ready_group(
        replace(groups[1].group, trajectories=(mixed, *groups[1].group.trajectories[1:])), b"", "2-0"
    )
    groups[2:3] = held(3, version="e000001-s000001")
    before = params(one)
    found = one.logprob_diffs(groups, START)
    assert found[2] is None
    for h, diff in zip(groups, found, strict=True):
        expected = [
            abs(reference_logprobs(t)[i] - t.logprobs[i])
            for t in h.group.trajectories
            for span in t.versions
            if span.version == str(START)
            for i in range(span.start, span.end)
        ]
        assert (diff is None) == (not expected)
        assert diff is None or diff == pytest.approx(np.mean(expected), abs=1e-5)
    assert one.logprob_diffs(groups[1:2], START) == [pytest.approx(found[1], abs=1e-6)]
    after = params(one)
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_the_effective_share_of_groups_is_kishs_of_a_numpy_models_ratios_over_sampled_tokens():
    """Tokens of every version count, prompts and observations do not; no weight changes."""
    one, groups = policy(), [*held(1, 2), *held(3, 4, version="e000001-s000001")]
    before = params(one)
    trajectories = [t for h in groups for t in h.group.trajectories]
    ratios = np.concatenate([np.exp(reference_logprobs(t) - t.logprobs)[t.loss_mask > 0] for t in trajectories])
    expected = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert 0 < expected < 0.99
    assert one.effective_share(groups, START) == pytest.approx(expected, rel=1e-4)
    after = params(one)
    assert all(np.array_equal(before[k], after[k]) for k in before)


def spans_of(trajectory, first):
    """The same spans, the first of them sampled by other weights."""
    return (replace(trajectory.versions[0], version=first), *trajectory.versions[1:])


def reference_logprobs(trajectory) -> np.ndarray:
    """float64 [T]: of each token given those before it, at the policy's temperature; 0 for the first."""
    table = decoder_reference.log_softmax(
        decoder_reference.logits(WEIGHTS, CONFIG_1, trajectory.token_ids), OPTIONS.temperature
    )
    return np.concatenate([[0.0], table[np.arange(len(table) - 1), trajectory.token_ids[1:]]])
