"""Spot checks name servers that compute something else, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.trainer.batches.batch import BatchLayout
from services.trainer.groups.group_buffer import ReadyGroup, ready_group
from services.trainer.learner.policy import Policy
from services.trainer.status import TrainerStatus
from shared.types import Trajectory, VersionSpan, WeightVersion
from tests.support import decoder_reference
from tests.trainer.support import group, model_of
from tests.trainer.test_policy import CONFIG_1, OPTIONS, START, WEIGHTS
from volley_dashboard.page.advice import advise
from volley_proof.spot_checks.checks import SpotChecks
from volley_proof.spot_checks.servers import ServerRecords, ServerTokens

A, B = "http://a:8102", "http://b:8102"
EVERY = replace(OPTIONS, spot_checks=1.0)


def episodes(
    server: str, n: int, *, seed: int, off: float = 1.0, excess: float = 0.0, noise: float = 0.02
) -> list[ServerTokens]:
    """Episodes of unequal lengths, whose noise differs between tokens by an order of magnitude."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        length = int(rng.integers(5, 200))
        scale = noise * np.exp(rng.standard_normal(length))
        own, theirs = np.abs(rng.standard_normal((2, length)) * scale)
        entropy = np.exp(rng.standard_normal(length) - 0.5)
        surprise = entropy * (rng.exponential(1.0, length) + excess)
        sums = off * theirs.sum(), own.sum(), surprise.sum(), entropy.sum()
        made.append(ServerTokens(server, "e000001-s000004", length, *map(float, sums)))
    return made


def records(*found: Sequence[ServerTokens]) -> ServerRecords:
    made = ServerRecords()
    for one in found:
        made.add(one)
    return made


def test_right_weights_are_never_suspected_at_any_noise():
    for seed in range(200):
        made = ServerRecords()
        for i in range(12):
            made.add(episodes(A, 3, seed=2 * (20 * seed + i)) + episodes(B, 2, seed=2 * (20 * seed + i) + 1, off=1.3))
            assert not made.suspected, (seed, i)


@pytest.mark.parametrize("off", [4.0, 30.0])
def test_a_server_that_is_off_is_named_with_the_version_and_cleared_when_it_is_right_again(off: float):
    made = records(episodes(A, 40, seed=1) + episodes(B, 40, seed=2))
    assert not made.suspected
    wrong = [replace(one, version="e000001-s000007") for one in episodes(B, 32, seed=3, off=off)]
    made.add(wrong + episodes(A, 32, seed=4))
    assert {server: one.fault for server, one in made.suspected.items()} == {B: "log-probabilities"}
    assert made.describe(B)["since"] == "e000001-s000007"
    assert made.of_line()["spot_check_ratio"] == made.describe(B)["ratio"] > 2.5
    made.add(episodes(B, 32, seed=5))
    assert not made.suspected
    made.add(episodes(B, 32, seed=6, off=off))
    for i in range(50):
        assert made.suspected, i
        made.add([])
    assert not made.suspected  # it has left


def test_exact_arithmetic_has_a_floor_of_noise():
    """As float32 on CPUs, where the trainer's own noise is 0."""
    exact = [replace(one, noise=0.0, difference=5e-6 * one.n) for one in episodes(A, 20, seed=1)]
    stale = [replace(one, server=B, difference=3e-4 * one.n) for one in exact]
    assert records(exact + stale).suspected.keys() == {B}


@pytest.mark.parametrize("excess", [-0.7, 0.5])
def test_a_server_that_samples_otherwise_is_named(excess: float):
    """Truncation and filters shift the surprise of all servers alike, and name none."""
    found = [episodes(A, 120, seed=1), episodes(B, 120, seed=2, excess=excess)]
    assert {server: one.fault for server, one in records(*found).suspected.items()} == {B: "sampling"}
    alike = [episodes(A, 120, seed=1, excess=-0.3), episodes(B, 120, seed=2, excess=-0.3)]
    assert not records(*alike).suspected


def test_with_truncated_sampling_the_server_that_differs_from_most_is_named():
    """One that ignores top_p has no excess, unlike the right ones. Of two, either may be wrong."""
    right = [replace(one, server=f"http://{i}") for i in range(3) for one in episodes(A, 120, seed=i, excess=-0.4)]
    plain = episodes(B, 120, seed=9)
    for n in (2, 3):
        made = ServerRecords(truncated=True)
        made.add([*right[: 120 * n], *plain])
        assert made.suspected.keys() == {B}, n
    made = ServerRecords(truncated=True)
    made.add([*right[:120], *plain])
    assert not made.suspected


def test_one_wild_number_does_not_hide_a_server_that_is_off():
    off = episodes(B, 32, seed=1, off=10.0)
    off[5] = replace(off[5], difference=1e30)
    assert records(off).suspected.keys() == {B}
    once = episodes(A, 32, seed=1)
    once[5] = replace(once[5], difference=1e30)
    assert not records(once).suspected


def policy(options=EVERY, **model: str) -> Policy:
    return Policy(model_of(WEIGHTS, CONFIG_1, **model), options, CONFIG_1, None)


def sampled(one: Trajectory, first: str, second: str, off: np.ndarray | float = 0.0, keep=None, weights=WEIGHTS):
    """The episode with a reference's log-probabilities; its two turns come from two servers."""
    kept = {} if keep is None else {"keep": keep}
    logits = decoder_reference.logits(weights, CONFIG_1, one.token_ids, **kept)
    table = decoder_reference.log_softmax(logits, OPTIONS.temperature)
    logprobs = np.concatenate([[0.0], table[np.arange(len(table) - 1), one.token_ids[1:]]]) + off
    spans = tuple(replace(span, server=server) for span, server in zip(one.versions, (first, second), strict=True))
    return replace(one, logprobs=(logprobs * one.loss_mask).astype(np.float32), versions=spans)


def held(*tickets: int, version: WeightVersion = START, **given) -> list[ReadyGroup]:
    made = [group(ticket, str(version), seed=5) for ticket in tickets]
    made = [replace(g, trajectories=tuple(sampled(t, A, B, **given) for t in g.trajectories)) for g in made]
    return [ready_group(g, b"", f"{g.ticket}-0") for g in made]


def of(server: str, found: Sequence[ServerTokens]) -> Iterator[ServerTokens]:
    return (one for one in found if one.server == server)


@pytest.mark.parametrize("layout", [EVERY.layout, BatchLayout((64,), 1, 0, tokens=64)])
def test_tokens_are_compared_with_exact_ones_by_the_server_that_sampled_them(layout: BatchLayout):
    off = np.zeros(16)
    off[9:] = 1e-3
    found = policy(replace(EVERY, layout=layout)).spot_check(held(*range(1, 9), off=off), START)
    assert [one.n for one in found] == [3, 7] * 16
    assert {one.version for one in found} == {str(START)}
    assert all(one.difference / one.n < 1e-5 for one in of(A, found))
    assert all(one.difference / one.n == pytest.approx(1e-3, rel=0.02) for one in of(B, found))
    one = held(1)[0].group.trajectories[0]
    logits = decoder_reference.logits(WEIGHTS, CONFIG_1, one.token_ids)
    table = decoder_reference.log_softmax(logits, OPTIONS.temperature)
    entropy = -(np.exp(table) * table).sum(-1)
    assert found[0].entropy == pytest.approx(entropy[3:5].sum(), rel=1e-5)  # without the last token of the turn
    assert found[0].surprise == pytest.approx(-one.logprobs[4:6].sum(), rel=1e-5)
    assert records(found).suspected.keys() == {B}


def test_a_share_of_the_episodes_is_chosen_and_unknown_servers_and_older_tokens_are_left_out():
    groups = held(*range(1, 41))
    assert len(policy(replace(OPTIONS, spot_checks=0.25)).spot_check(groups, START)) == 2 * 20
    few = policy(replace(OPTIONS, spot_checks=0.02))
    assert [len(few.spot_check(groups, START)) // 2 for _ in range(5)] == [0, 0, 4, 0, 4]  # whole micro-batches
    unknown = [ready_group(group(1, str(START), seed=5), b"", "1-0")]
    assert policy().spot_check(unknown, START) == []
    assert policy().spot_check(groups[:4], WeightVersion(1, 3)) == []
    one = groups[0].group.trajectories[0]
    spans = one.versions[0], VersionSpan("e000001-s000009", 9, 12, B), replace(one.versions[1], start=12)
    updated = replace(groups[0].group, trajectories=(replace(one, versions=spans),))
    found = policy().spot_check([ready_group(updated, b"", "1-0")], START)
    assert [its.server for its in found] == [A]  # the second turn's weights changed while it was sampled


def test_tokens_of_the_weights_before_the_newest_step_are_scored_with_those():
    one, after = policy(), WeightVersion(1, 1)
    one.step(held(1, 2, 3, 4), START)
    found = one.spot_check(held(5, 6), after)
    assert {its.version for its in found} == {str(START)}
    assert all(its.difference / its.n < 1e-5 for its in found)
    moved = one.spot_check(held(*range(5, 21), version=after), after)
    assert records(moved).suspected.keys() == {A, B}  # a server with stale weights


def test_restored_weights_are_not_compared_with_tokens_of_the_weights_that_they_replace():
    one, after = policy(), WeightVersion(1, 1)
    one.step(held(1, 2, 3, 4), START)
    kept = one.contents()
    one.load(*({name: np.asarray(x) for name, x in part.items()} for part in (kept.params, kept.optimizer)))
    assert one.spot_check(held(5, 6), after) == []


def test_in_bfloat16_rounding_is_no_fault_but_scaled_weights_are():
    one = policy(replace(EVERY, published_dtype="bfloat16"), dtype="bfloat16")
    rounded = one.spot_check(held(*range(1, 9), keep=decoder_reference.bfloat16), START)
    made = records(rounded)
    assert not made.suspected
    assert 0.3 < made.ratio(A).value < 2.0
    assert made.describe(A)["noise"] > 1e-3
    name = next(name for name in WEIGHTS if name.endswith("mlp.down_proj.weight"))
    scaled = WEIGHTS | {name: WEIGHTS[name] * np.float32(1.1)}
    wrong = one.spot_check(held(*range(1, 17), keep=decoder_reference.bfloat16, weights=scaled), START)
    assert records(wrong).suspected.keys() == {A, B}


class Checked:
    """A backend that finds what it is given."""

    def __init__(self, *found: Sequence[ServerTokens]) -> None:
        self.found, self.asked = list(found), list[list[int]]()

    def spot_check(self, new: Sequence[ReadyGroup], present: WeightVersion) -> Sequence[ServerTokens]:
        self.asked.append([one.group.ticket for one in new])
        return self.found.pop(0)


class Blocking:
    async def blocking(self, call, *arguments):
        return call(*arguments)


async def test_groups_are_checked_once_and_a_named_server_is_in_status_line_and_advice():
    backend = Checked(episodes(A, 32, seed=1), episodes(B, 32, seed=2, off=20.0), [], episodes(B, 32, seed=3))
    status = TrainerStatus("run", 5)
    checks = SpotChecks(backend, status, Blocking(), truncated=False)
    line = await checks.check(held(1, 2), START)
    assert [one["url"] for one in line["spot_checks"]] == [A]
    assert status.warnings == []
    line = await checks.check(held(2, 3), START)
    (named,) = line["spot_checks"]
    assert named.keys() == {"url", "tokens", "difference", "noise", "ratio", "excess", "fault", "since"}
    assert [one["url"] for one in status.spot_checks] == [A, B]
    assert [B in one for one in status.warnings] == [True]
    (advice,) = [one for one in advise([{"step": 1, **line}], []) if one.metric == "spot_check_ratio"]
    assert advice.level == "warning"
    assert B in advice.text
    assert [one["url"] for one in (await checks.check(held(3), START))["spot_checks"]] == [B]
    await checks.check(held(4), START)
    assert status.warnings == []
    assert backend.asked == [[1, 2], [3], [], [4]]
