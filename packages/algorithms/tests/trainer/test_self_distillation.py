"""Data of a privileged teacher in the trainer: against TRL's SDPO, and without a term where it lacked information."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from services.trainer.algorithms.registry import algorithm, taught
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import Batch
from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from shared import algorithm_schema as schema
from shared.algorithm_schema import AlgorithmSection
from shared.queue.records import StreamEntry
from shared.run.progress import TicketProgress
from shared.teacher_view import TeacherPrompt, TeacherView
from shared.types import Group, Trajectory, VersionSpan
from tests.trainer import support
from volley_algorithms.sections import MopdSection
from volley_algorithms.teachers.distillation import of_teacher, penalty

VERSION = "e000001-s000000"
TRL = json.loads((Path(__file__).parents[4] / "tests/fixtures/trl/sdpo.json").read_text(encoding="utf-8"))
IDS, MASK, TAUGHT = np.array(TRL["ids"]), np.array(TRL["mask"]), np.array(TRL["taught"])
PURE = MopdSection(name="mopd", ratio_bounds=(0.5, 2.0))
MIXED = schema.GrpoSection(teacher_kl_coef=1.0, loss_agg_mode="sequence-mean-token-mean")
LACKS = TeacherView(lacks=("sibling",))


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Compute log-probabilities [B, T] of the sampled tokens from logits [B, T, V]."""
    logits = logits - logits.max(-1, keepdims=True)
    return np.take_along_axis(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), IDS[..., None], -1)[..., 0]


STUDENT, TEACHER = logprobs(np.array(TRL["student"])), logprobs(np.array(TRL["teacher"]))


def episode(i: int, sampler: np.ndarray) -> EpisodeTokens:
    """Row `i` as an episode that begins with a prompt of one token."""

    def after_prompt(x: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], x[i] * MASK[i]]).astype(np.float32)

    is_taught = bool(TAUGHT[i])
    one = replace(
        support.group(1, VERSION, n=1).trajectories[0],
        prompt_len=1,
        token_ids=np.concatenate([[0], IDS[i]]).astype(np.int32),
        loss_mask=after_prompt(np.ones_like(MASK)).astype(np.uint8),
        logprobs=after_prompt(sampler),
        teacher_logprobs=after_prompt(TEACHER) if is_taught else None,
        teacher_view=None if is_taught else LACKS,
    )
    return EpisodeTokens(one, old=after_prompt(STUDENT))


def loss_and_gradient(
    section: AlgorithmSection, sampler: np.ndarray, advantages: Sequence[np.ndarray]
) -> tuple[float, np.ndarray]:
    """Compute the loss of all rows, and its gradient by the logits; `sampler`: behaviour log-probabilities [B, T]."""
    zeros = np.zeros(MASK.shape, np.int32)
    weight = (1 / (len(MASK) * MASK.sum(1, keepdims=True))).astype(np.float32)
    mask, columns = MASK.astype(np.float32), np.stack([one[1:] for one in advantages]).astype(np.float32)
    old = (STUDENT * MASK).astype(np.float32)
    batch = Batch(zeros, zeros, mask, (sampler * MASK).astype(np.float32), columns, mask, weight, old=old)

    def total(logits: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[..., None], -1)[..., 0]
        return algorithm(section, 1, 8).loss(TokenScores(found, jnp.zeros_like(found)), batch)[0]

    value, gradient = jax.value_and_grad(total)(jnp.array(TRL["student"], jnp.float32))
    return float(value), np.asarray(gradient)


def test_alone_it_has_the_loss_and_the_gradient_of_trls_sdpo():
    sampler = STUDENT - np.log(np.array(TRL["ratio"]))
    (advantages,) = algorithm(PURE, 1, 8).advantages([[episode(i, sampler) for i in range(len(IDS))]])
    value, gradient = loss_and_gradient(PURE, sampler, advantages)
    assert value == pytest.approx(TRL["pure"]["loss"], rel=2e-6)
    np.testing.assert_allclose(gradient, TRL["pure"]["gradient"], rtol=0, atol=2e-7)
    assert not gradient[2].any(), "an answer without a teacher trains nothing"


def test_beside_rewards_it_has_the_gradient_of_trls_sdpo():
    """TRL weighs the two losses by 1/2 each."""
    rewarded = np.array(TRL["advantages"])[:, None] * MASK
    terms = [penalty(episode(i, STUDENT), MIXED.teacher_kl_coef) for i in range(len(IDS))]
    advantages = [np.concatenate([[0], row]) + term for row, term in zip(rewarded, terms, strict=True)]
    _, gradient = loss_and_gradient(MIXED, STUDENT, advantages)
    np.testing.assert_allclose(gradient / 2, TRL["mixed"]["gradient"], rtol=0, atol=2e-7)


def test_an_episode_that_lacked_information_has_no_term():
    group = [episode(0, STUDENT), episode(2, STUDENT)]
    alone = algorithm(PURE, 1, 8)
    assert [one.any() for one in alone.advantages([group])[0]] == [True, False]
    rewards = algorithm(MIXED, 1, 8)
    plain, both = (one.advantages([group])[0] for one in (rewards, taught(rewards, MIXED)))
    np.testing.assert_array_equal(both[1], plain[1])
    np.testing.assert_allclose(both[0], plain[0] + penalty(group[0], 1.0))


def view_of(one: Trajectory, version: str = VERSION) -> TeacherView:
    return TeacherView((TeacherPrompt(np.arange(9, dtype=np.int32), one.prompt_len, version),))


def shown(group: Group, version: str = VERSION) -> Group:
    """The group after all episodes but the last were shown to the teacher."""
    *most, last = group.trajectories
    told = [replace(t, teacher_logprobs=t.loss_mask * np.float32(-1), teacher_view=view_of(t, version)) for t in most]
    return replace(group, trajectories=(*told, replace(last, teacher_view=LACKS)))


def test_episodes_without_a_teacher_are_counted_and_trained_on():
    group = shown(support.group(1, VERSION, n=3))
    buffer = GroupBuffer(TicketProgress(), [(1, 0)], _rules())
    assert buffer.offer(StreamEntry("1-0", 1, group.encode(), 1)) is None
    found = of_teacher([group])
    assert found.pop("teacher_lacks/sibling") == 1
    assert found.keys() == {"teacher_kl"}


def test_a_group_whose_teacher_was_undone_is_dropped():
    group = shown(support.group(1, VERSION, n=2), "e000001-s000003")
    buffer = GroupBuffer(TicketProgress(), [(1, 0), (2, 2)], _rules())
    dropped = buffer.offer(StreamEntry("1-0", 1, group.encode(), 1))
    assert dropped is not None
    assert (dropped.reason, "e000001-s000003" in dropped.detail) == ("superseded", True)
    assert VersionSpan(VERSION, 4, 7) in group.trajectories[0].versions


def _rules() -> AdmissionRules:
    return AdmissionRules("arrival", max_staleness=9, longest=64, vocab_size=96, group_size=4, has_teacher=True)
