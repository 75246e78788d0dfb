"""Evaluation: greedy, exact at the ends, written once, failures are no zeros."""

import asyncio
import fcntl
import resource
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator import metrics
from services.orchestrator.episodes.dispatch import Dispatcher
from services.orchestrator.evaluation.evaluator import EvalPlan, Evaluator, HeldOutTasks
from services.orchestrator.evaluation.records import read_records
from services.orchestrator.mixture.members import Offer, offers_in
from services.orchestrator.schedule.run_schedule import wait_for_tasks
from services.orchestrator.servers.slots import Slots
from services.orchestrator.status import RunStatus
from shared.errors import ConfigError, DecodeError, NotFound, Unavailable
from shared.models.chat import ChatTokenizer
from shared.process.sinks import MetricsFanout, PrometheusSink
from shared.process.telemetry import REGISTRY
from shared.types import Branch, WeightVersion
from tests.orchestrator.fakes import Say, ScriptedEngine, ScriptedEnv, balancer_of, dispatcher_of, runner_of
from tests.orchestrator.mixtures import RowSource
from tests.support.sinks import KeepingSink, raising
from tests.support.tokenizer import tiny_tokenizer

PLAN = EvalPlan("demo", 6, 7, every=5, last_step=20)
EOS = tiny_tokenizer().eos_id
ARRAYS = "token_ids", "loss_mask", "logprobs"


def evaluator(folder, env=None, engine=None, plan=PLAN, other=None, others=tuple, offer=lambda env: None, sinks=None):
    balancer = balancer_of(engine or ScriptedEngine(), *filter(None, [other]))
    return Evaluator(
        dispatcher_of(env or ScriptedEnv(), balancer), RunStatus(), tiny_tokenizer(), plan, folder, others, offer, sinks
    )


async def measured(found, step):
    await found.run(step)
    return found.records[-1]


async def test_the_record_is_written_and_samples_beside_it(tmp_path):
    env = ScriptedEnv(n_turns=2)
    record = await measured(evaluator(tmp_path, env), 0)
    (line,) = (tmp_path / "evals.jsonl").read_text(encoding="utf-8").splitlines()
    assert orjson.loads(line)["n_tasks"] == 6
    assert (record.success, record.reward_mean, record.turns_mean, record.failed) == (1.0, 2.0, 2.0, 0)
    assert record.version_min == record.version_max == "e000001-s000000"
    assert sorted(env.created)[:2] == [("eval", 0, env.created[0][2]), ("eval", 1, env.created[1][2])]
    samples = [orjson.loads(row) for row in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 4
    assert "<|im_start|>assistant" in samples[0]["text"]


class Branching(Dispatcher):
    """Adds a second answer to each episode."""

    async def episode(self, spec, purpose):
        one = await super().episode(spec, purpose)
        branch = Branch(0, one.prompt_len, *(getattr(one, name)[one.prompt_len :] for name in ARRAYS), one.versions, ())
        return replace(one, branches=(branch,))


async def test_a_sample_shows_the_branches_of_its_episode(tmp_path):
    balancer = balancer_of(ScriptedEngine())
    dispatcher = Branching(runner_of(ScriptedEnv(), balancer), balancer, RunStatus(), slots=Slots(8), max_attempts=1)
    found = Evaluator(dispatcher, RunStatus(), tiny_tokenizer(), PLAN, tmp_path, tuple, lambda env: None, None)
    record = await measured(found, 0)
    sample = orjson.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    (branch,) = sample["branches"]
    assert (branch["parent"], branch["shared"] > 0) == (0, True)
    assert sample["text"].endswith(branch["text"])
    assert record.version_min == record.version_max == "e000001-s000000"


async def test_sinks_get_the_lines_of_the_file(tmp_path):
    kept, bad = KeepingSink(), KeepingSink("bad", raising(OSError("away")))
    with MetricsFanout.opened([bad, PrometheusSink(metrics.show), kept]) as sinks:
        found = evaluator(tmp_path, others=lambda: [HeldOutTasks("beside", 2)], sinks=sinks)
        await found.run(0)
    lines = [orjson.loads(line) for line in (tmp_path / "evals.jsonl").read_bytes().splitlines()]
    assert [line.get("env") for line in lines] == ["beside", None]
    assert kept.lines == [("evaluation", line) for line in lines]
    for name in ("step", "success", "reward_mean"):
        assert REGISTRY.get_sample_value(f"volley_evaluation_{name}") == lines[-1][name]


async def test_evaluations_of_other_data_end_the_run_with_path_and_digests(tmp_path):
    offered = {}
    found = evaluator(tmp_path, offer=offered.get)
    assert (await measured(found, 0)).data is None  # an older environment service
    assert b"data" not in (tmp_path / "evals.jsonl").read_bytes()
    offered["demo"] = Offer("demo", "active", 0, {"eval": "a" * 64, "train": "c" * 64}, {"eval": "/d/eval.jsonl"})
    assert (
        await measured(evaluator(tmp_path, engine=ScriptedEngine(version=WeightVersion(1, 5)), offer=offered.get), 5)
    ).data
    later = evaluator(tmp_path, engine=ScriptedEngine(version=WeightVersion(1, 10)), offer=offered.get)
    later.check_data("demo", offered["demo"])
    changed = offered["demo"] = replace(offered["demo"], digests={"eval": "b" * 64, "train": "c" * 64})
    wanted = r"demo: /d/eval\.jsonl has changed since the evaluation of step 5: its digest is b{16}, it was a{16}"
    for check in (lambda: later.run(10), lambda: asyncio.to_thread(evaluator(tmp_path).check_data, "demo", changed)):
        with pytest.raises(ConfigError, match=wanted):
            await check()
    later.check_data("demo", replace(changed, digests={"package": "1"}))  # nothing to compare


def test_offers_hold_the_digests_of_their_data():
    data = {"digests": {"eval": "a"}, "parts": {"eval": {"source": "/d", "digest": "a"}}}
    row = {"name": "demo", "base": "gsm8k", "data": data}
    assert offers_in({"environments": [row]})["demo"].sources == {"eval": "/d"}
    assert offers_in({"environments": [row | {"data": None}]})["demo"].digests == {}
    with pytest.raises(DecodeError):
        offers_in({"environments": [row | {"data": {"digests": 3}}]})


async def test_the_text_of_a_sample_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(ChatTokenizer, "decode", lambda self, ids: "word " * 60_000)
    await evaluator(tmp_path).run(0)
    sample = orjson.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert 2**18 <= len(sample["text"]) <= 2**18 + 100
    assert "characters left out" in sample["text"]


async def test_sampling_is_greedy(tmp_path):
    engine = ScriptedEngine()
    await evaluator(tmp_path, engine=engine).run(0)
    assert {(p["temperature"], p["top_k"]) for p in engine.params} == {(0.0, 1)}


async def test_a_restart_measures_no_step_twice_and_mends_a_torn_line(tmp_path):
    first = evaluator(tmp_path)
    await first.run(0)
    with (tmp_path / "evals.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "ver')
    again = evaluator(tmp_path, engine=ScriptedEngine(version=WeightVersion(1, 5)))
    assert not again.due(0)
    assert again.due(5)
    await again.run(5)
    assert [r.step for r in read_records(tmp_path / "evals.jsonl")] == [0, 5]


@pytest.mark.parametrize(
    ("step", "done", "due"),
    [
        (0, (), True),
        (0, (0,), False),
        (1, (0,), False),
        (5, (0,), True),
        (6, (0,), True),
        (6, (0, 5), False),
        (20, (0, 5, 19), True),
        (3, (), True),
    ],
)
def test_when_a_step_is_due(step, done, due):
    assert PLAN.due(step, frozenset(done)) is due


def test_without_a_period_only_the_ends_are_measured():
    plan = EvalPlan("demo", 6, 7, every=None, last_step=20)
    assert [step for step in range(21) if plan.due(step, frozenset({0}))] == [20]


@pytest.mark.parametrize(("size", "found"), [((9, None), (9, 0)), ((9, 0), (9, 0)), ((9, 3), (9, 3))])
async def test_an_environment_without_held_out_tasks_is_not_measured(size, found):
    source = RowSource([{"name": "demo"}], {"demo": size})
    assert await wait_for_tasks(source, "demo", RunStatus()) == found
    plan = EvalPlan("demo", found[1], 7, every=5, last_step=20)
    assert [step for step in range(21) if plan.due(step, frozenset())] == (list(range(21)) if found[1] else [])
    assert plan.last_admitted(0, frozenset()) == (0 if found[1] else 20)
    with pytest.raises(NotFound, match="no environment 'other'"):
        await wait_for_tasks(source, "other", RunStatus())


def test_if_the_first_weights_were_missed_the_next_ones_are_measured():
    plan = EvalPlan("demo", 6, 7, every=None, last_step=20)
    assert plan.due(0, frozenset())
    assert plan.due(3, frozenset())
    assert plan.due(3, frozenset({4}))


async def test_failed_tasks_are_counted_and_not_averaged(tmp_path):
    record = await measured(evaluator(tmp_path, ScriptedEnv(n_turns=1, broken={1, 4})), 0)
    assert (record.success, record.reward_mean, record.failed, record.n_tasks) == (1.0, 1.0, 2, 6)


async def test_tokens_of_another_version_do_not_count_at_the_ends(tmp_path):
    engine = ScriptedEngine([Say([60, EOS], versions=("e000001-s000001",))])
    record = await measured(evaluator(tmp_path, ScriptedEnv(n_turns=1), engine, other=ScriptedEngine()), 0)
    assert (record.failed, record.version_max) == (0, "e000001-s000000")


async def test_an_evaluation_in_between_takes_no_newer_weights(tmp_path):
    engine = ScriptedEngine([Say([60, EOS], versions=("e000001-s000006",))], version=WeightVersion(1, 5))
    other = ScriptedEngine(version=WeightVersion(1, 5))
    record = await measured(evaluator(tmp_path, ScriptedEnv(n_turns=1), engine, other=other), 5)
    assert (record.failed, record.version_min, record.version_max) == (0, "e000001-s000005", "e000001-s000005")


@given(
    every=st.integers(1, 7),
    last_step=st.integers(1, 40),
)
def test_groups_are_made_up_to_the_next_step_that_is_measured(every, last_step):
    plan, step, done = EvalPlan("demo", 6, 7, every, last_step), 0, set[int]()
    while True:
        if plan.due(step, frozenset(done)):
            done.add(step)
        admitted = plan.last_admitted(step, frozenset(done))
        if step == last_step:
            break
        assert admitted > step, "the trainer gets groups for another step"
        step += 1
    assert {0, last_step} <= done
    assert all(b - a <= every for a, b in pairwise(sorted(done)))


async def test_two_orchestrators_measure_a_step_once(tmp_path):
    both = evaluator(tmp_path, ScriptedEnv(delay_s=0.05)), evaluator(tmp_path, ScriptedEnv(delay_s=0.05))
    async with asyncio.TaskGroup() as group:
        for one in both:
            group.create_task(one.run(0))
    assert [r.step for r in read_records(tmp_path / "evals.jsonl")] == [0]
    assert both[0].records == both[1].records


async def test_who_waits_for_another_orchestrators_evaluation_says_so(tmp_path):
    found = evaluator(tmp_path)
    with (tmp_path / "evals.lock").open("w", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        task = asyncio.ensure_future(found.run(0))
        async with asyncio.timeout(60):
            while found._status.waits != {"peer": 1}:
                await asyncio.sleep(0.01)
    await task
    assert found._status.waits == {}


@pytest.mark.parametrize(
    "damage", [(b'"failed"', b'"fai\xffed"'), (b'"step":0', b'"step":"x"'), (b"e000001-", b"e00\x00001-"), (b"{", b"[")]
)
async def test_a_damaged_record_is_skipped_and_its_step_measured_again(tmp_path, damage):
    await evaluator(tmp_path).run(0)
    path = tmp_path / "evals.jsonl"
    path.write_bytes(path.read_bytes().replace(*damage))
    again = evaluator(tmp_path)
    assert again.due(0)
    await again.run(0)
    assert [r.step for r in read_records(path)] == [0]


async def test_a_step_whose_weights_were_undone_is_measured_again_and_its_last_record_counts(tmp_path):
    first = evaluator(tmp_path, engine=ScriptedEngine(version=WeightVersion(1, 5)))
    await first.run(5)
    again = evaluator(tmp_path, engine=ScriptedEngine(version=WeightVersion(2, 5)))
    again.follow(((1, 0), (2, 5)))
    assert not again.due(5)
    again.follow(((1, 0), (2, 4)))
    assert again.due(5)
    await again.run(5)
    assert [(r.step, r.version_min) for r in again.records] == [(5, "e000002-s000005")]
    assert [r.version_min for r in read_records(tmp_path / "evals.jsonl")] == ["e000001-s000005", "e000002-s000005"]
    again.follow(((1, 0), (3, 5)))
    assert [r.version_min for r in again.records] == ["e000001-s000005"]


async def test_a_full_disk_delays_the_record_and_loses_nothing(tmp_path):
    found, status = evaluator(tmp_path), RunStatus()
    found._status = status
    with full_disk():
        task = asyncio.ensure_future(found.run(0))
        async with asyncio.timeout(60):
            while status.disk is None:
                await asyncio.sleep(0.01)
    await task
    assert status.disk is None
    assert [r.step for r in read_records(tmp_path / "evals.jsonl")] == [0]
    assert len((tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()) == 4


@contextmanager
def full_disk():
    """Files cannot grow beyond 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_each_environment_has_a_record_and_the_main_ones_makes_the_step_done(tmp_path):
    others = [HeldOutTasks("adder@2", 3), HeldOutTasks("empty@1", 0)]
    found = evaluator(tmp_path, others=lambda: others)
    await found.run(0)
    lines = [orjson.loads(line) for line in (tmp_path / "evals.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line.get("env"), line["n_tasks"]) for line in lines] == [("adder@2", 3), (None, 6)]
    assert "env" not in lines[1]
    assert [(r.env, r.step) for r in found.records] == [("adder@2", 0), (None, 0)]
    samples = [
        orjson.loads(row).get("env") for row in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert samples == ["adder@2"] * 3 + [None] * 4
    others.append(HeldOutTasks("words@1", 2))
    assert not evaluator(tmp_path, others=lambda: others).due(0)


async def test_a_restart_between_two_environments_measures_only_the_one_that_is_left(tmp_path):
    first = evaluator(tmp_path, others=lambda: [HeldOutTasks("adder@2", 3)])
    await first.run(0)
    path = tmp_path / "evals.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    env = ScriptedEnv()
    again = evaluator(tmp_path, env, others=lambda: [HeldOutTasks("adder@2", 3)])
    assert again.due(0)
    await again.run(0)
    assert len(env.created) == 6
    assert [r.env for r in read_records(path)] == ["adder@2", None]


async def test_another_environment_that_only_fails_holds_nothing_up(tmp_path):
    class Partly(ScriptedEnv):
        async def create(self, request_id, env, split, index, *, seed, snapshot=None):
            if env == "gone@1":
                raise NotFound("there is no environment 'gone@1'")
            return await super().create(request_id, env, split, index, seed=seed)

    found = evaluator(tmp_path, Partly(), others=lambda: [HeldOutTasks("gone@1", 3)])
    await found.run(0)
    assert [r.env for r in found.records] == [None]


async def test_no_task_at_all_is_no_record(tmp_path):
    with pytest.raises(Unavailable, match="all 6 held-out tasks failed"):
        await evaluator(tmp_path, ScriptedEnv(broken=set(range(6)))).run(0)
    assert not (tmp_path / "evals.jsonl").exists()
