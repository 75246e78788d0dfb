"""On-policy distillation: advantages against numpy float64, and its gradient against that of the exact reverse KL."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.registry import algorithm, taught
from services.trainer.algorithms.terms.algorithm import EpisodeTokens
from services.trainer.algorithms.terms.logprobs import TokenScores
from services.trainer.batches.batch import Batch
from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from shared import algorithm_schema as schema
from shared.queue.records import StreamEntry
from shared.run.progress import TicketProgress
from shared.types import Group
from tests.trainer import support
from volley_algorithms import sections
from volley_algorithms.teachers.distillation import of_teacher, reverse_kl

VERSION = "e000001-s000000"
ALONE = sections.OnPolicyDistillationSection(name="on_policy_distillation")


def shown(group: Group, seed: int = 0) -> Group:
    """The group after it was shown to a teacher."""
    rng = np.random.default_rng(seed)
    told = [-rng.exponential(2.0, len(t.token_ids)) * t.loss_mask for t in group.trajectories]
    pairs = zip(group.trajectories, told, strict=True)
    return replace(group, trajectories=tuple(replace(t, teacher_logprobs=one.astype(np.float32)) for t, one in pairs))


GROUP = shown(support.group(1, VERSION, n=4))
EPISODES = [EpisodeTokens(one) for one in GROUP.trajectories]


def kl_of(episode: EpisodeTokens) -> np.ndarray:
    one = episode.trajectory
    student = one.logprobs if episode.old is None else episode.old
    assert one.teacher_logprobs is not None
    return (student.astype(np.float64) - one.teacher_logprobs.astype(np.float64)) * one.loss_mask


@pytest.mark.parametrize(("coef", "gamma"), [(1.0, 0.0), (0.5, 1.0), (2.0, 0.9)])
def test_alone_a_token_answers_for_itself_and_for_later_ones_as_far_as_gamma_says(coef: float, gamma: float) -> None:
    section = ALONE.model_copy(update={"teacher_kl_coef": coef, "gamma": gamma})
    (found,) = algorithm(section, 1, 8).advantages([EPISODES])
    for episode, one in zip(EPISODES, found, strict=True):
        kl, wanted, after = kl_of(episode), np.zeros(len(one)), 0.0
        for t in np.flatnonzero(episode.trajectory.loss_mask)[::-1]:
            after = wanted[t] = -coef * kl[t] + gamma * after
        np.testing.assert_allclose(one, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "ppo"])
def test_beside_rewards_it_is_taken_from_each_advantage(name: str) -> None:
    made = {
        "grpo": schema.GrpoSection,
        "reinforce_plus_plus": sections.ReinforcePlusPlusSection,
        "ppo": schema.PpoSection,
    }
    section = made[name](name=name, teacher_kl_coef=0.3)
    episodes = [replace(e, values=np.zeros(len(e.trajectory.token_ids), np.float32)) for e in EPISODES]
    base = Ppo(section, 1, 8) if isinstance(section, schema.PpoSection) else algorithm(section, 1, 8)
    algorithm_, plain = taught(base, section), base.advantages([episodes])[0]
    assert algorithm_.needs == replace(base.needs, teacher=True)
    for episode, with_teacher, without in zip(episodes, algorithm_.advantages([episodes])[0], plain, strict=True):
        np.testing.assert_allclose(with_teacher, without - 0.3 * kl_of(episode), rtol=1e-12)


def test_without_a_coefficient_there_is_no_teacher() -> None:
    section = schema.GrpoSection()
    base = algorithm(section, 1, 8)
    assert taught(base, section) is base
    assert algorithm(ALONE, 1, 8).needs.teacher


def test_the_student_is_the_policy_at_the_steps_start_where_that_is_known() -> None:
    old = (EPISODES[0].trajectory.logprobs * 2).astype(np.float32)
    known = replace(EPISODES[0], old=old)
    (found,) = algorithm(ALONE, 2, 8).advantages([[known]])
    np.testing.assert_allclose(found[0], -kl_of(known), rtol=1e-12)


@given(st.floats(-1e30, 0), st.floats(-1e30, 0))
def test_no_token_decides_a_step(student: float, teacher: float) -> None:
    one = EPISODES[0].trajectory
    odd = replace(
        one,
        logprobs=np.where(one.loss_mask, student, 0).astype(np.float32),
        teacher_logprobs=np.where(one.loss_mask, teacher, 0).astype(np.float32),
    )
    found = reverse_kl(odd)
    assert np.abs(found).max() <= 20
    assert np.isfinite(found).all()
    assert not found[one.loss_mask == 0].any()


def test_its_gradient_is_that_of_the_exact_reverse_kl_in_expectation() -> None:
    """Over a vocabulary of 7, with every token in proportion to its probability."""
    rng = np.random.default_rng(3)
    logits, teacher = rng.standard_normal(7), rng.standard_normal(7)
    log_p, log_q = (x - np.log(np.exp(x).sum()) for x in (logits, teacher))
    p = np.exp(log_p)
    exact = p * ((log_p - log_q) - (p * (log_p - log_q)).sum())  # d KL(p || q) / d logits
    one = EPISODES[0].trajectory
    tokens = [replace(one, logprobs=one.loss_mask * np.float32(a), teacher_logprobs=one.loss_mask * np.float32(b))
              for a, b in zip(log_p, log_q, strict=True)]  # fmt: skip
    made = algorithm(ALONE, 1, 8)
    advantages = np.array([a[4] for a in made.advantages([[EpisodeTokens(t) for t in tokens]])[0]], np.float32)
    column = np.ones((7, 1), np.float32)
    batch = Batch(
        ids=column.astype(np.int32), targets=np.arange(7, dtype=np.int32)[:, None], mask=column,
        behaviour=log_p.astype(np.float32)[:, None], advantages=advantages[:, None], current=column,
        weight=p[:, None].astype(np.float32),
    )  # fmt: skip

    def loss(x: jax.Array) -> jax.Array:
        return made.loss(TokenScores(jax.nn.log_softmax(x)[:, None], jnp.zeros((7, 1))), batch)[0]

    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(logits, jnp.float32)), exact, atol=1e-6)


def test_a_step_tells_how_far_the_student_is() -> None:
    total = sum(kl_of(e).sum() for e in EPISODES)
    n_tokens = sum(e.trajectory.n_sampled for e in EPISODES)
    assert of_teacher([GROUP]) == {"teacher_kl": pytest.approx(total / n_tokens)}
    assert of_teacher([support.group(2, VERSION)]) == {}


def test_an_episode_that_no_teacher_has_seen_is_not_trained_on() -> None:
    rules = AdmissionRules("arrival", max_staleness=1, longest=64, vocab_size=96, group_size=4, has_teacher=True)
    buffer = GroupBuffer(TicketProgress(), [(1, 0)], rules)
    dropped = buffer.offer(StreamEntry("1-0", 1, support.group(1, VERSION).encode(), 1))
    assert dropped is not None
    assert (dropped.reason, "teacher" in dropped.detail) == ("poison", True)
    assert buffer.offer(StreamEntry("2-0", 2, replace(shown(support.group(2, VERSION))).encode(), 1)) is None
