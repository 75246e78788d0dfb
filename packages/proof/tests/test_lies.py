"""Lies that change several files and re-make digests: every one is named, unless all that could contradict it was
re-made.
"""

from __future__ import annotations

import asyncio
import filecmp
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.engines import DeclaredEngine
from shared.run import checkpoint_files, commits, ledger
from shared.run.folder import RunFolder
from shared.types import WeightVersion
from tests.support import lies
from tests.support.lies import DESCRIPTIONS, LIES, PARTS, REMOVALS, SETTINGS, Lie, Part, Remake, Removal
from tests.support.small_run import RUN, Incarnation
from volley_dashboard.report import report
from volley_proof.verify import command

_OF_A_LIE = 6


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lies.make(tmp_path_factory.mktemp("valid") / RUN)


def copied(valid: Path, place: Path) -> RunFolder:
    shutil.copytree(valid, place / RUN)
    return RunFolder(place / RUN)


def same(a: Path, b: Path) -> bool:
    names = {str(p.relative_to(x)) for x in (a, b) for p in x.rglob("*") if p.is_file() and ".lock" not in p.name}
    return len(filecmp.cmpfiles(a, b, names, shallow=False)[0]) == len(names)


def test_the_run_itself_is_proven(valid: Path):
    result = command.verify(RunFolder(valid))
    assert result["violations"] == []
    assert [one for one in result["not_checked"] if "checkpoints.jsonl" in one] == []
    assert result["reported"] == []


def test_an_engine_that_cannot_prove_its_weights_is_named(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    line = lies.lines(run.handovers)[-1]
    for engine in (DeclaredEngine("sglang_jax"), DeclaredEngine("plain", ("exact_ids", "spans", "probe"))):
        servers = [{"url": "a", "engine": engine.to_json()}, {"url": "b"}, {"engine": 7}, 7]
        append(run.handovers, line | {"servers": servers})
    result = command.verify(run)
    assert result["violations"] == []
    assert command.format_result(result).endswith("with weights as reported by the server")
    assert result["reported"] == ["weights as reported by the server: engine plain has no audit"]


def test_hand_overs_do_not_promote_the_engine_of_the_settings(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    for key, value in (("rollout.engine.url", "http://127.0.0.1:1"), ("rollout.engine.kind", "vllm")):
        Remake(run, change=lies.set_everywhere(run, key, value))()
    for capabilities in (["audit", "probe"], []):
        engine = {"kind": "vllm", "capabilities": capabilities}
        append(run.handovers, lies.lines(run.handovers)[-1] | {"servers": [{"url": "a", "engine": engine}]})
        result = command.verify(run)
        assert result["reported"][0] == "weights as reported by the server: engine vllm has no audit"
        assert report.make(run)["engines"][0] == {
            "kind": "vllm",
            "lacks": ["audit", "routing"],
            "proves_weights": False,
        }


def test_remaking_an_honest_run_changes_nothing_that_is_named(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    Remake(run)()
    assert command.verify(run)["violations"] == []


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_lie_is_named_unless_everything_is_remade(valid: Path, tmp_path: Path, lie: Lie):
    rng = random.Random(f"1 {lie.__name__}")
    seed = rng.random()
    whole = copied(valid, tmp_path / "whole")
    lie(whole, random.Random(seed))
    Remake(whole)()
    assert command.verify(whole)["violations"] == []  # as docs/security.md says: only a signature would tell
    chosen: list[frozenset[Part]] = [frozenset(PARTS), *lies.partly(rng, _OF_A_LIE)]
    for n, left in enumerate(chosen):
        run = copied(valid, tmp_path / str(n))
        lie(run, random.Random(seed))
        Remake(run, left)()
        if not same(run.path, whole.path):
            assert command.verify(run)["violations"], sorted(left)


@pytest.mark.parametrize("key", DESCRIPTIONS)
@pytest.mark.parametrize("is_alone", [False, True])
def test_the_newest_checkpoint_cannot_describe_its_weights_otherwise(
    valid: Path, tmp_path: Path, key: str, is_alone: bool
):
    """Its digests, and its line of checkpoints.jsonl, are made again; nothing is written after it."""
    run = copied(valid, tmp_path)
    lies.describe(run, key, lies.NEWEST)
    Remake(run, frozenset(["described", "records", "lines", "beginnings"]))()
    for version in checkpoint_files.versions(run.checkpoints) if is_alone else ():
        if version != lies.NEWEST:
            shutil.rmtree(run.checkpoints / str(version))
    assert command.verify(run)["violations"]


def lost_records(run: RunFolder) -> None:
    for path in run.archive.glob("e*/*.json"):
        path.unlink()


def archived_steps_beyond(run: RunFolder) -> None:
    """Rolled back by two steps, whose groups are left."""
    lost, kept = (WeightVersion(2, 4), lies.NEWEST), WeightVersion(2, 3)
    for version in lost:
        shutil.rmtree(run.checkpoints / str(version))
        commits.path_of(run.archive, version).unlink()
    for path in (run.ledger, run.metrics, run.handovers, run.evals, run.samples, run.saved):
        lies.rewrite(path, [line for line in lies.lines(path) if line["step"] <= kept.step])
    record = orjson.loads(run.record.read_bytes())
    run.record.write_bytes(orjson.dumps(record | {"finished": False, "final": None}))


@pytest.mark.parametrize("key", SETTINGS)
def test_a_lie_about_a_setting_is_named_unless_everything_is_remade(valid: Path, tmp_path: Path, key: str):
    whole = copied(valid, tmp_path / "whole")
    lies.lie_about_setting(whole, key, frozenset())
    assert command.verify(whole)["violations"] == []
    for n, left in enumerate(lies.partly(random.Random(key), _OF_A_LIE)):
        run = copied(valid, tmp_path / str(n))
        lies.lie_about_setting(run, key, left)
        if not same(run.path, whole.path):
            assert command.verify(run)["violations"], sorted(left)


@pytest.mark.parametrize("left", [*(frozenset([one]) for one in REMOVALS), frozenset(REMOVALS)])
def test_a_run_that_was_rolled_back_is_named_by_whatever_tells_of_later_steps(
    valid: Path, tmp_path: Path, left: frozenset[Removal]
):
    run = copied(valid, tmp_path)
    lies.roll_back(run, left)
    assert command.verify(run)["violations"]


def test_a_run_of_which_everything_was_rolled_back_is_an_earlier_one(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    lies.roll_back(run)
    assert command.verify(run)["violations"] == []


# Single lies about lines that do not count.


def append(path: Path, *found: dict[str, Any] | bytes) -> None:
    with path.open("ab") as file:
        for line in found:
            file.write((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n")


def steps_beyond(run: RunFolder) -> None:
    """8 steps that become 13."""
    last = lies.lines(run.metrics)[-1]
    append(run.metrics, *(last | {"step": n, "version": f"e000002-s{n:06d}"} for n in range(6, 11)))


def evaluations_beyond(run: RunFolder) -> None:
    last, version = lies.lines(run.evals)[-1], "e000002-s000009"
    append(run.evals, last | {"step": 9, "version_min": version, "version_max": version, "success": 1.0})


def evaluations_of_another_epoch(run: RunFolder) -> None:
    last, version = lies.lines(run.evals)[-1], "e000007-s000005"
    append(run.evals, last | {"step": 5, "version_min": version, "version_max": version, "success": 1.0})


def handovers_beyond(run: RunFolder) -> None:
    append(run.handovers, lies.lines(run.handovers)[-1] | {"step": 9, "version": "e000002-s000009"})


def samples_beyond(run: RunFolder) -> None:
    append(run.samples, lies.lines(run.samples)[-1] | {"step": 9})


def undone_without_groups(run: RunFolder) -> None:
    append(run.ledger, ledger.line(7, "trained", WeightVersion(1, 3), digest="0" * 64))


def undone_with_other_groups(run: RunFolder) -> None:
    """Of a step that was trained, by a ticket that was not."""
    append(run.ledger, ledger.rollback(1, 2), ledger.line(9, "trained", WeightVersion(1, 4), digest="0" * 64))


def void_of_a_step_that_was_not_made(run: RunFolder) -> None:
    append(run.ledger, ledger.line(7, "stale", WeightVersion(1, 4)))


def one_key_twice(run: RunFolder) -> None:
    """The first one lies; readers take the last."""
    found = run.ledger.read_bytes()
    run.ledger.write_bytes(found.replace(b'{"ticket":7,', b'{"ticket":99,"ticket":7,', 1))


def one_key_of_metrics_twice(run: RunFolder) -> None:
    found = run.metrics.read_bytes()
    run.metrics.write_bytes(found.replace(b'{"step":1,', b'{"loss":-9.0,"step":1,', 1))


def one_key_of_evaluations_twice(run: RunFolder) -> None:
    append(run.evals, b'{"success":1.0,' + orjson.dumps(lies.lines(run.evals)[-1])[1:])


def one_key_of_a_state_twice(run: RunFolder) -> None:
    path = commits.path_of(run.archive, lies.NEWEST)
    path.write_bytes(b'{"checksum":"0",' + path.read_bytes()[1:])


def lost_checkpoints(run: RunFolder) -> None:
    run.saved.unlink()


def _added(run: RunFolder, n: int = -1, without: Sequence[str] = (), **change: Any) -> None:
    line = lies.lines(run.evals)[n] | change
    append(run.evals, {key: value for key, value in line.items() if key not in without})


def evaluation_without_versions(run: RunFolder) -> None:
    _added(run, without=("version_min", "version_max"), success=1.0)


def only_evaluations_without_versions(run: RunFolder) -> None:
    run.evals.write_bytes(b"")
    append(run.evals, {"step": 500, "n_tasks": 100, "success": 1.0, "reward_mean": 1.0, "failed": 0})


def evaluation_of_more_than_all(run: RunFolder) -> None:
    _added(run, success=9.0)


def evaluation_of_fewer_than_none(run: RunFolder) -> None:
    _added(run, failed=-5)


def evaluation_of_many_tasks(run: RunFolder) -> None:
    _added(run, n_tasks="many")


def evaluation_with_a_reward_in_words(run: RunFolder) -> None:
    _added(run, reward_mean="good")


def evaluation_of_two_steps(run: RunFolder) -> None:
    _added(run, version_min="e000002-s000003")


def another_result_of_an_older_version(run: RunFolder) -> None:
    _added(run, 2, success=1.0)


def evaluation_that_is_cut(run: RunFolder) -> None:
    append(run.evals, b'{"step":5,"version_min":"e000002-s000005"')


def one_key_of_samples_twice(run: RunFolder) -> None:
    append(run.samples, b'{"step":5,"step":5,"task":"eval/0","success":false,"success":true,"text":"a"}')


def reversed_evaluations(run: RunFolder) -> None:
    lies.rewrite(run.evals, lies.lines(run.evals)[::-1])


def emptied_evaluations(run: RunFolder) -> None:
    run.evals.write_bytes(b"")


def test_evaluations_that_an_honest_run_repeats_are_not_named(valid: Path, tmp_path: Path):
    """One that is handed over twice, and the newest version measured again after its line was lost."""
    run = copied(valid, tmp_path)
    _added(run, 2)
    _added(run, 4, success=0.25)
    append(run.evals, b" " * 30)
    assert command.verify(run)["violations"] == []


@pytest.mark.parametrize(
    "lie",
    [
        steps_beyond,
        evaluations_beyond,
        evaluations_of_another_epoch,
        handovers_beyond,
        samples_beyond,
        undone_without_groups,
        undone_with_other_groups,
        void_of_a_step_that_was_not_made,
        one_key_twice,
        one_key_of_metrics_twice,
        one_key_of_evaluations_twice,
        one_key_of_a_state_twice,
        lost_checkpoints,
        lost_records,
        archived_steps_beyond,
        evaluation_without_versions,
        only_evaluations_without_versions,
        evaluation_of_more_than_all,
        evaluation_of_fewer_than_none,
        evaluation_of_many_tasks,
        evaluation_with_a_reward_in_words,
        evaluation_of_two_steps,
        another_result_of_an_older_version,
        evaluation_that_is_cut,
        one_key_of_samples_twice,
        reversed_evaluations,
        emptied_evaluations,
    ],
    ids=lambda lie: lie.__name__,
)
def test_a_line_that_nobody_can_have_written_is_named(valid: Path, tmp_path: Path, lie: Callable[[RunFolder], None]):
    run = copied(valid, tmp_path)
    lie(run)
    assert command.verify(run)["violations"]


def test_what_is_named_does_not_count_in_the_report_either(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    before = report.make(run)
    for lie in (steps_beyond, evaluations_beyond, evaluations_of_another_epoch, undone_without_groups):
        lie(run)
    after = report.make(run)
    assert before["steps"] == 5
    assert {key: after[key] for key in before if key != "elapsed_sec"} == {
        key: before[key] for key in before if key != "elapsed_sec"
    }


def test_a_key_of_the_runs_own_record_twice_is_named(valid: Path, tmp_path: Path):
    run = copied(valid, tmp_path)
    run.record.write_bytes(b'{"final":"e000009-s000009",' + run.record.read_bytes().lstrip()[1:])
    assert command.verify(run)["violations"]


def begun_again(run: RunFolder) -> None:
    """A new epoch, which begins with the files as it finds them."""

    async def script(trainer: Incarnation) -> None:
        await trainer.until(lambda status: status.phase == "done")

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(Incarnation(run.path, executor).run(script))


def rewritten_evaluations(run: RunFolder) -> None:
    found = lies.lines(run.evals)
    found[2]["success"] = 0.99
    lies.rewrite(run.evals, found)


def rewritten_samples(run: RunFolder) -> None:
    found = lies.lines(run.samples)
    found[1]["text"] = "9"
    lies.rewrite(run.samples, found)


@pytest.mark.parametrize("lie", [rewritten_evaluations, rewritten_samples], ids=lambda lie: lie.__name__)
def test_a_lie_that_was_told_before_a_new_epoch_is_named(valid: Path, tmp_path: Path, lie: Callable[[RunFolder], None]):
    run = copied(valid, tmp_path)
    lie(run)
    begun_again(run)
    assert "differ from those recorded by" in str(command.verify(run)["violations"])


@pytest.mark.parametrize("kept", [0, 1])
def test_a_file_that_was_lost_before_a_new_epoch_is_told(valid: Path, tmp_path: Path, kept: int):
    """And filled again later, with its own lines or with others."""
    run = copied(valid, tmp_path)
    found = lies.lines(run.evals)
    lies.rewrite(run.evals, found[:kept])
    begun_again(run)
    left = run.evals.read_bytes()
    append(run.evals, *[line | {"success": 0.25} for line in found[kept:]])
    assert {one["file"] for one in command.verify(run)["violations"]} == {"evals.jsonl"}
    run.evals.write_bytes(left)
    append(run.evals, *found[kept:])
    for _ in range(2):
        result = command.verify(run)
        assert result["violations"] == []
        assert any("evals.jsonl" in one for one in result["not_checked"])
        begun_again(run)
