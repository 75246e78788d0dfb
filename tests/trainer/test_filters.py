"""Groups that are not trained on: by which rule, on record, replaced, and never without an end."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.trainer.groups.filters import FilterOptions, has_variance, shares_without_variance
from services.trainer.groups.group_buffer import AdmissionRules, GroupBuffer
from services.trainer.loop.ledger import LedgerFile
from shared import own_rules, rule_code
from shared.errors import RuleFailed
from shared.queue.records import StreamEntry
from shared.run import ledger, rule_files
from shared.run.folder import RunFolder
from shared.run.progress import TicketProgress
from shared.types import Group, WeightVersion
from tests.trainer.fakes import Bench, stopped
from tests.trainer.process import BATCH, SIMULATED, producing, trainer
from tests.trainer.support import group
from tools.chaos.lineage import difference
from tools.embedded_redis import embedded_server

VERSION = "e000001-s000000"
ZERO_VARIANCE = FilterOptions(("zero_variance",))
REWARDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=8)


def rewarded(ticket: int, rewards: Sequence[float], version: str = VERSION) -> Group:
    made = group(ticket, version, n=len(rewards))
    changed = [replace(t, reward=float(r), success=r > 0) for t, r in zip(made.trajectories, rewards, strict=True)]
    return replace(made, trajectories=tuple(changed))


def flat(ticket: int, version: str = VERSION) -> Group:
    return rewarded(ticket, [1, 1], version)


def mixed(ticket: int, version: str = VERSION) -> Group:
    return rewarded(ticket, [0, 1], version)


def spoilt(ticket: int, **changed: object) -> Group:
    made = mixed(ticket)
    return replace(made, trajectories=(made.trajectories[0], replace(made.trajectories[1], **changed)))


def without_tokens(ticket: int) -> Group:
    one = mixed(ticket).trajectories[0]
    nothing = np.zeros_like(one.loss_mask)
    return spoilt(ticket, loss_mask=nothing, logprobs=nothing.astype(np.float32), versions=())


def with_logprob(ticket: int, value: float) -> Group:
    logprobs = mixed(ticket).trajectories[1].logprobs.copy()
    logprobs[5] = value
    return spoilt(ticket, logprobs=logprobs)


def entry(made: Group) -> StreamEntry:
    return StreamEntry(f"{made.ticket}-0", made.ticket, made.encode(), 1)


def buffer(filters: FilterOptions) -> GroupBuffer:
    return GroupBuffer(TicketProgress(), ((1, 0),), AdmissionRules("ticket", 1, 32, 96, 8, filters))


@given(REWARDS)
def test_rewards_have_variance_if_they_differ_by_more_than_rounding(rewards: list[float]):
    exact = [Fraction(r) for r in rewards]
    apart, bound = max(exact) - min(exact), max(map(abs, exact)) / 10**12
    assume(not bound * 999 <= apart * 1000 <= bound * 1001 or not apart)
    assert has_variance(rewarded(1, rewards)) == (apart > bound)


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3], [0.0, -0.0], [1e308, 1e308], [sum([0.1] * 10), 1.0]])
def test_rounding_is_no_variance(rewards: list[float]):
    assert not has_variance(rewarded(1, rewards))


def test_shares_are_of_groups_and_of_sampled_tokens():
    short, long = replace(flat(1)), mixed(2)
    short = replace(short, trajectories=(short.trajectories[0],))
    n_short, n_long = (sum(t.n_sampled for t in g.trajectories) for g in (short, long))
    found = shares_without_variance([short, long], mask_truncated=False)
    assert found == {"zero_variance_groups": 0.5, "zero_variance_tokens": n_short / (n_short + n_long)}
    assert 0 < found["zero_variance_tokens"] < 0.5


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (without_tokens(1), "no_tokens"),
        (spoilt(1, reward=math.nan), "nonfinite_reward"),
        (spoilt(1, reward_components={"style": math.inf}), "nonfinite_reward"),
        (with_logprob(1, math.nan), "nonfinite_logprob"),
        (with_logprob(1, -math.inf), "nonfinite_logprob"),
    ],
)
def test_what_can_never_be_trained_on_is_filtered_by_its_rule(made: Group, rule: str):
    one = buffer(FilterOptions())
    dropped = one.offer(entry(made))
    assert dropped is not None
    assert (dropped.reason, dropped.rule, dropped.is_defect) == ("filtered", rule, True)
    assert (one.progress.low, one.progress.void, one.n_filtered) == (1, 1, {rule: 1})


def test_groups_without_variance_are_trained_on_unless_the_run_says_otherwise():
    assert buffer(FilterOptions()).offer(entry(flat(1))) is None
    dropped = buffer(ZERO_VARIANCE).offer(entry(flat(1)))
    assert dropped is not None
    assert (dropped.rule, dropped.detail, dropped.is_defect) == ("zero_variance", "all 2 rewards are 1", False)
    assert buffer(ZERO_VARIANCE).offer(entry(mixed(1))) is None


def test_variance_is_that_of_the_episodes_in_the_loss():
    """The only other reward is of a truncated episode; or all are truncated."""
    one, all_of_it = spoilt(1, status="truncated"), replace(mixed(2))
    cut = tuple(replace(t, status="truncated") for t in all_of_it.trajectories)
    for made in (one, replace(all_of_it, trajectories=cut)):
        assert buffer(ZERO_VARIANCE).offer(entry(made)) is None
        dropped = buffer(replace(ZERO_VARIANCE, mask_truncated=True)).offer(entry(made))
        assert dropped is not None
        assert dropped.rule == "zero_variance"
        shares = [
            shares_without_variance([made], mask_truncated=mask)["zero_variance_groups"] for mask in (False, True)
        ]
        assert shares == [0.0, 1.0]


@given(st.lists(st.booleans(), min_size=8, max_size=16), st.randoms())
def test_the_steps_do_not_depend_on_the_order_of_arrival(is_flat: list[bool], random):
    """In the order of the tickets: the first that pass, wherever the others are when they are filtered."""
    entries = [entry(flat(i) if is_flat[i - 1] else mixed(i)) for i in range(1, len(is_flat) + 1)]
    random.shuffle(entries)
    one, steps = buffer(ZERO_VARIANCE), []
    for each in entries:
        one.offer(each)
        while taken := one.take(2):
            steps.append([held.group.ticket for held in taken])
    passed = [i for i, flat_one in enumerate(is_flat, start=1) if not flat_one]
    assert steps == [passed[i : i + 2] for i in range(0, len(passed) - 1, 2)]
    assert one.progress.void == sum(is_flat)


def test_a_filtered_line_names_its_rule_and_is_read_by_who_does_not_know_it():
    dropped = buffer(ZERO_VARIANCE).offer(entry(flat(3)))
    assert dropped is not None
    at = dropped.versions[1]
    line = ledger.line(3, dropped.reason, at, versions=dropped.versions, reason=dropped.detail, rule=dropped.rule)
    assert line["reason"] == "zero_variance: all 2 rewards are 1"
    assert ledger.parse(orjson.dumps(line)) == line
    assert ledger.disposition_label(line) == "filtered(zero_variance)"
    assert ledger.disposition_label(line | {"reason": "new_rule: whatever"}) == "filtered"
    assert ledger.disposition_label(line | {"reason": None}) == "filtered"
    assert ledger.disposition_label(line | {"disposition": "stale"}) == "stale"


async def test_filtered_groups_are_on_record_void_and_replaced(bench: Bench):
    bench.filters = ZERO_VARIANCE
    for made in (flat(1), mixed(2), spoilt(3, reward=math.nan), mixed(4), mixed(5), flat(6), mixed(7)):
        bench.queue.put(made)
    await bench.run_to_the_end()
    assert [e for e in bench.events if e.startswith(("step", "dead"))] == ["dead 3", "step [2, 4]", "step [5, 7]"]
    ends = {
        t: ledger.disposition_label(line) for t, line in LedgerFile(bench.folder / "ledger.jsonl").settled().items()
    }
    assert {t: end for t, end in ends.items() if end != "trained"} == {
        1: "filtered(zero_variance)",
        3: "filtered(nonfinite_reward)",
        6: "filtered(zero_variance)",
    }
    assert bench.status.tickets == {"trained": 4, "filtered": 3}
    assert bench.status.filtered == {"zero_variance": 2, "nonfinite_reward": 1}
    assert bench.backend.checkpoint is not None
    assert bench.backend.checkpoint.void == 3


async def test_a_step_tells_what_of_it_had_no_variance(bench: Bench):
    for made in (flat(1), mixed(2), mixed(3), mixed(4)):
        bench.queue.put(made)
    await bench.run_to_the_end()
    lines = [orjson.loads(line) for line in (bench.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["zero_variance_groups"] for line in lines] == [0.5, 0.0]
    assert [line["zero_variance_tokens"] > 0 for line in lines] == [True, False]


async def test_a_run_that_filters_everything_stops_and_says_why(bench: Bench):
    bench.filters = replace(ZERO_VARIANCE, max_num_gen_batches=2)
    running = asyncio.ensure_future(bench.worker().run())
    for ticket in range(1, 4):
        bench.queue.put(flat(ticket))
    await bench.until(lambda: bench.status.filtered.get("zero_variance") == 3)
    assert bench.status.refused is None
    bench.queue.put(flat(4))
    await bench.until(lambda: bench.status.phase == "refused")
    await stopped(running)
    assert bench.status.refused is not None
    assert "step 1 has no groups: 4 were filtered since the last step, 4 by zero_variance" in bench.status.refused
    assert "trainer.filters.zero_variance=false" in bench.status.refused
    assert "leave refused" in bench.events
    assert not [e for e in bench.events if e.startswith("step")]


async def test_every_step_begins_the_count_anew(bench: Bench):
    bench.filters = replace(ZERO_VARIANCE, max_num_gen_batches=2)
    for made in (flat(1), flat(2), flat(3), mixed(4), mixed(5), flat(6), flat(7), flat(8), mixed(9), mixed(10)):
        bench.queue.put(made)
    await bench.run_to_the_end()
    assert bench.status.refused is None
    assert bench.status.tickets == {"trained": 4, "filtered": 6}


def some_flat(ticket: int, version: str) -> Group:
    return flat(ticket, version) if ticket % 3 == 1 else mixed(ticket, version)


def run_of(folder: Path, filters: Mapping[str, object], *, kills: int) -> RunFolder:
    """Five synchronous steps over a real queue, the trainer killed so many times on the way."""
    folder.mkdir()
    with (
        embedded_server(folder / "redis") as spec,
        trainer(folder, spec.url, SIMULATED, trainer__filters=filters) as process,
        producing(spec.url, 5 * BATCH, some_flat),
    ):
        for step in range(1, kills + 1):
            process.wait(lambda s, step=step: s["step"] >= step)
            process.kill()
            process.start()
        process.wait(lambda s: s["phase"] == "done")
        assert process.terminate() == 0
    return RunFolder(folder / "r")


@pytest.mark.parametrize("rule", ["zero_variance", "custom"])
def test_a_trainer_that_is_killed_while_it_filters_ends_with_the_same_weights(tmp_path: Path, rule: str):
    own = own_filter(tmp_path, "return group.rewards.std() > 0").custom
    filters = {"custom": own} if rule == "custom" else {rule: True}
    calm, killed = (run_of(tmp_path / f"killed {n}", filters, kills=n) for n in (0, 2))
    assert difference(killed, calm) is None
    ends = [
        {t: ledger.disposition_label(x) for t, x in LedgerFile(run.ledger).settled().items()} for run in (calm, killed)
    ]
    assert ends[0] == ends[1]
    assert [t for t, end in ends[0].items() if end == f"filtered({rule})"] == [1, 4, 7, 10, 13]
    assert len(ends[0]) == 15


DISAGREEING = FilterOptions(max_logprob_diff=0.5)


async def test_groups_that_engine_and_trainer_disagree_on_are_filtered_before_the_step(bench: Bench):
    bench.filters, bench.order = DISAGREEING, "ticket"
    bench.backend.diffs = {2: 0.51, 3: 0.5, 4: math.nan, 6: 9.0}
    for ticket in range(1, 7):
        bench.queue.put(mixed(ticket))
    running = asyncio.ensure_future(bench.worker().run())
    await bench.until(lambda: bench.status.durable_step == 1)
    for ticket in (7, 8):
        bench.queue.put(mixed(ticket))
    await bench.until(lambda: bench.status.phase == "done")
    await stopped(running)
    told = [e for e in bench.events if e.startswith(("compare", "step", "dead"))]
    assert told == ["compare [1, 2]", "dead 2", "compare [3]", "step [1, 3]", "compare [4, 5]", "step [4, 5]"]
    settled = LedgerFile(bench.folder / "ledger.jsonl").settled()
    assert ledger.disposition_label(settled[2]) == "filtered(logprob)"
    assert (
        "mean |Δ log p| 0.51 nats on tokens of e000001-s000000, above trainer.filters.logprob=0.5"
        in (settled[2]["reason"])
    )


async def test_nothing_is_compared_unless_the_run_asks_for_it(bench: Bench):
    bench.feed(1, 2, 3, 4)
    await bench.run_to_the_end()
    assert not [e for e in bench.events if e.startswith("compare")]


async def test_a_group_whose_log_probabilities_are_no_numbers_is_filtered(bench: Bench):
    bench.filters = DISAGREEING
    bench.max_steps = 1
    bench.backend.diffs = {1: math.nan}
    bench.feed(1, 2, 3)
    await bench.run_to_the_end()
    assert "step [2, 3]" in bench.events


async def test_an_engine_that_always_disagrees_stops_the_run(bench: Bench):
    """After more groups than can be under way at once: so many may be left from before it was set right."""
    bench.filters = DISAGREEING
    bench.backend.diffs = dict.fromkeys(range(1, 100), 2.0)
    running = asyncio.ensure_future(bench.worker().run())
    bench.feed(1, 2, 3, 4)
    await bench.until(lambda: bench.status.filtered.get("logprob") == 4)
    assert bench.status.refused is None
    bench.feed(5, 6)
    await bench.until(lambda: bench.status.phase == "refused")
    await stopped(running)
    assert bench.status.refused is not None
    assert "a rollout server has other weights" in bench.status.refused
    assert bench.status.tickets == {"filtered": 6}


@pytest.mark.parametrize("rule", ["custom", "straggler", "zero_variance"])
def test_a_group_that_the_orchestrator_filtered_ends_under_its_rule_and_is_no_defect(rule: str):
    one = buffer(FilterOptions())
    dropped = one.offer(entry(Group(1, "toy", "t", (), failure="why", rule=rule)))
    assert dropped is not None
    assert (dropped.reason, dropped.rule, dropped.detail, dropped.is_defect) == ("filtered", rule, "why", False)
    line = ledger.line(1, dropped.reason, WeightVersion(1, 0), reason=dropped.detail, rule=dropped.rule)
    assert ledger.disposition_label(line) == f"filtered({rule})"
    assert one.n_filtered == {rule: 1}


def own_filter(folder: Path, body: str) -> FilterOptions:
    (folder / "rule.py").write_text(f"def keeps(group):\n    {body}\n", encoding="utf-8")
    named = {"trainer": {"filters": {"custom": f"{folder}/rule.py:keeps"}}}
    return FilterOptions(custom=rule_files.resolved(named, folder)[own_rules.FILTER])


async def test_a_filter_of_ones_own_decides_in_order_beside_the_event_loop(tmp_path: Path):
    body = "import threading\n    return group.rewards[0] > 0 and threading.current_thread().name == 'rule'"
    one = buffer(own_filter(tmp_path, body))
    groups = [rewarded(i, [reward, 0.0]) for i, reward in enumerate((1.0, 0.0, 2.0, 0.0), 1)]
    dropped = await one.receive([entry(made) for made in groups])
    assert [(each.entry.ticket, each.rule) for each in dropped] == [(2, "custom"), (4, "custom")]
    assert [held.group.ticket for held in one.waiting] == [1, 3]


async def test_a_filter_that_takes_too_long_fails_by_its_name_and_adds_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rule_code, "LONGEST_S", 0.2)
    body = "import threading\n    return not threading.Event().wait(2 * (group.rewards[0] == 7))"
    one = buffer(own_filter(tmp_path, body))
    receiving = asyncio.ensure_future(one.receive([entry(rewarded(1, [1.0])), entry(rewarded(2, [7.0]))]))
    await asyncio.sleep(0.01)
    assert not receiving.done()
    with pytest.raises(RuleFailed, match=r"the rule of trainer.filters.custom took more than 0.2 s"):
        await receiving
    assert (one.n_waiting, one.progress.low) == (0, 0)


async def test_a_filter_of_ones_own_is_on_record_by_its_name(bench: Bench, tmp_path: Path):
    bench.filters = own_filter(tmp_path, "return group.task != 'train/3'")
    for ticket in range(1, 6):
        bench.queue.put(mixed(ticket))
    await bench.run_to_the_end()
    assert [e for e in bench.events if e.startswith("step")] == ["step [1, 2]", "step [4, 5]"]
    line = LedgerFile(bench.folder / "ledger.jsonl").settled()[3]
    assert ledger.disposition_label(line) == "filtered(custom)"
    assert re.fullmatch(r"custom: rule.py:keeps \(sha256 \w{12}…\) rejected it", line["reason"])


async def test_a_filter_that_fails_stops_the_run_after_the_steps_before(bench: Bench, tmp_path: Path):
    bench.filters = own_filter(tmp_path, "return True if group.task != 'train/3' else None")
    running = asyncio.ensure_future(bench.worker().run())
    for ticket in range(1, 5):
        bench.queue.put(mixed(ticket))
    await bench.until(lambda: bench.status.phase == "refused")
    assert re.match(
        r"rule.py:keeps \(sha256 \w{12}…\) returned NoneType \(return True to keep the group, and False to drop it\);"
        " the run keeps its rules: mend the file, and go on with `volley fork",
        bench.status.refused or "",
    )
    await stopped(running)
