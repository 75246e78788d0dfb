"""Forks of a small run: planned, begun, trained by the trainer's own loop without a model, and proven."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared import config
from shared.errors import ConfigError, DecodeError, StorageFull, VolleyError
from shared.run import archive, commits, pinned, trust
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.types import Group, Trajectory, WeightVersion
from tests.support import small_run
from tests.support.small_run import Incarnation
from volley.runs.record import claimed, mark_finished
from volley_proof.commands.fork import varied
from volley_proof.forks import fork_start, mending, training
from volley_proof.forks.mending import mended
from volley_proof.forks.plan import ForkPlan, Wanted, planned
from volley_proof.reverify.episodes import ReplayedRewards
from volley_proof.verify import command
from volley_python.folder import forks
from volley_python.folder.forks import Fork


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("runs") / small_run.RUN, max_to_keep=9)


@pytest.fixture
def source(made: Path, tmp_path: Path) -> RunFolder:
    """The small run; its configuration names the folder that it lies in now."""
    folder = RunFolder(Path(shutil.copytree(made, tmp_path / small_run.RUN)))
    trust.accept(folder)
    return folder


@pytest.fixture(scope="module")
def forked(made: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A valid fork of the small run."""
    source = RunFolder(Path(shutil.copytree(made, tmp_path_factory.mktemp("forked") / small_run.RUN)))
    trust.accept(source)
    plan = planned(source, wanted(1, 2), [])
    train(plan)
    assert command.verify(plan.folder)["violations"] == []
    return plan.folder


def wanted(first: int, steps: int | None = None, **more: Any) -> Wanted:
    return Wanted(first, steps, more.pop("least_share", 0.3), **more)


def train(plan: ForkPlan, *, share: float = 1.0, until: Callable[[Any], object] | None = None) -> Any:
    """Begin the fork if it has no folder, and train it as `volley fork` does. Returns the trainer's status."""
    if not plan.folder.path.exists():
        training.prepare(plan)
    with claimed(plan.loaded, free=forks.FREE) as claim, ThreadPoolExecutor(1) as executor:
        fork = Fork.read(claim.folder)
        assert fork is not None
        one = Incarnation(claim.folder.path, executor, fork=fork, max_to_keep=9)
        one.backend.share = share
        asyncio.run(one.run_until(until or (lambda status: status.phase in ("done", "refused"))))
        if one.status.step == plan.loaded.config.trainer.max_steps:
            mark_finished(claim.folder, claim.record)
    return one.status


def trained(folder: RunFolder) -> list[tuple[int, list[int]]]:
    """Tickets of each step, from the archive."""
    run = config.load([folder.config]).config.run.name
    return [
        (version.step, [Group.decode(payload).ticket for payload in archive.read(folder.archive, run, version)])
        for version in archive.versions(folder.archive)
    ]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_fork_trains_the_groups_of_the_log_and_is_proven_alone(source: RunFolder, first: int):
    plan = planned(source, wanted(first), ["algorithm.name=dppo", "trainer.optimizer_config.learning_rate=0.5"])
    before = {path: path.read_bytes() for path in source.path.rglob("*") if path.is_file()}
    assert train(plan).step == small_run.STEPS
    assert {path: path.read_bytes() for path in before} == before, "the run itself is only read"
    shutil.rmtree(source.path)
    result = command.verify(plan.folder)
    assert result["violations"] == []
    ends = result["by_disposition"]
    assert (ends["trained"], sum(ends.values())) == (10, 12), "the tickets that the run did not train end too"
    head = commits.newest(plan.folder)
    assert head is not None
    assert [fork.run for fork in head.forks] == [small_run.RUN]
    assert head.lineage[-1] == (3, first), "its epochs are later than those of the run"


def test_a_fork_trains_each_step_on_the_groups_of_that_step(source: RunFolder):
    expected = trained(source)
    plan = planned(source, wanted(1), [])
    train(plan)
    assert trained(plan.folder) == expected


def test_a_fork_trains_the_steps_since_the_newest_checkpoint_again(source: RunFolder):
    for path in source.checkpoints.glob("e*-s000002"):
        shutil.rmtree(path)
    plan = planned(source, wanted(2), ["algorithm.name=dppo"])
    assert plan.start is not None
    assert plan.start.checkpoint.step == 1
    assert train(plan).step == small_run.STEPS
    assert command.verify(plan.folder)["violations"] == []


def test_a_fork_ends_after_the_steps_that_were_asked_for_and_goes_on_from_there(source: RunFolder):
    plan = planned(source, wanted(1, 2), [])
    status = train(plan)
    assert (status.step, status.log_ended) == (3, "step 3 was asked for")
    assert command.verify(plan.folder)["violations"] == []
    again = train(replace(plan, fork=replace(plan.fork, last=3)))
    assert again.step == 3


def test_a_fork_that_was_stopped_in_the_middle_resumes(source: RunFolder):
    plan = planned(source, wanted(1), ["algorithm.name=cispo"])
    train(plan, until=lambda status: status.durable_step >= 2)
    assert train(plan).step == small_run.STEPS
    result = command.verify(plan.folder)
    assert (result["violations"], result["doubly_trained"], result["lost"]) == ([], 0, 0)


def test_a_fork_stops_before_a_step_with_too_low_an_effective_share(source: RunFolder):
    plan = planned(source, wanted(1, least_share=0.5), [])
    status = train(plan, share=0.4)
    assert status.step == 1
    assert "0.400, below 0.5" in str(status.log_ended)
    assert train(plan, share=0.6).step == small_run.STEPS
    lines = [orjson.loads(line) for line in plan.folder.metrics.read_bytes().splitlines()]
    assert [line.get("effective_share") for line in lines] == [None, 0.6, 0.6, 0.6, 0.6]


def test_filters_see_the_new_rewards_and_later_groups_fill_the_steps(source: RunFolder):
    """The groups of step 2 get equal rewards, so those of the next steps move up."""
    plan = planned(source, wanted(1, mended=True), ["trainer.filters.zero_variance=true"])
    training.prepare(plan)
    expected = list[int]()
    for step, version in enumerate(mending.versions(plan), start=2):
        groups = [Group.decode(one) for one in archive.read(source.archive, small_run.RUN, version)]
        if step == 2:
            groups = [mended(group, [judged(one, 1.0) for one in group.trajectories]) for group in groups]
        expected += [group.ticket for group in groups if step > 2]
        archive.path_of(plan.folder.mended, version).parent.mkdir(parents=True, exist_ok=True)
        Archive(plan.folder.mended, small_run.RUN).write(version, [group.encode() for group in groups])
    assert mending.is_complete(plan)
    status = train(plan)
    assert (status.step, status.log_ended) == (4, "the log has no more groups")
    assert [ticket for step, tickets in trained(plan.folder) for ticket in tickets if step > 1] == expected
    result = command.verify(plan.folder)
    assert result["violations"] == []
    assert result["by_disposition"]["filtered(zero_variance)"] == 2


def test_a_fork_of_a_fork_keeps_both_origins(source: RunFolder):
    first = planned(source, wanted(1, 2), ["run.name=one"])
    train(first)
    trust.accept(first.folder)
    second = planned(first.folder, wanted(2), ["run.name=two"])
    assert train(second).step == 3
    assert command.verify(second.folder)["violations"] == []
    head = commits.newest(second.folder)
    assert head is not None
    assert [(fork.run, fork.step) for fork in head.forks] == [(small_run.RUN, 1), ("one", 2)]


@pytest.mark.parametrize(
    ("steps", "overrides", "named"),
    [
        ((5, None), [], "has steps 1 to 5"),
        ((-1, None), [], "has steps 1 to 5"),
        ((2, 4), [], "3 steps after step 2"),
        ((2, 0), [], "3 steps after step 2"),
        ((1, None), [f"run.name={small_run.RUN}"], "is the run itself"),
        ((1, None), ["algorithm.nam=dppo"], "algorithm.nam"),
    ],
)
def test_steps_and_names_that_cannot_be_used_are_named(
    source: RunFolder, steps: tuple[int, int | None], overrides: list[str], named: str
):
    with pytest.raises(ConfigError, match=named):
        planned(source, wanted(*steps), overrides)


def test_the_first_weights_are_made_with_the_runs_rewards_and_a_fork_killed_meanwhile_resumes(source: RunFolder):
    plan = planned(source, wanted(0), ["algorithm.name=ppo", "data.env_config.holes=2"])
    found = pinned.changes(pinned.relevant(plan.base.config), pinned.relevant(plan.loaded.config))
    assert [one.key for one in found] == ["data.env_config.holes"]
    training.prepare(plan)
    with claimed(plan.base):
        training.check_existing(plan, Fork.read(plan.folder))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("override", ["model.path=other", "trainer.groups_per_step=3", "run.seed=3", "data.env=other"])
def test_settings_that_cannot_change_are_named_before_anything_is_made(source: RunFolder, override: str, first: int):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        planned(source, wanted(first), [override])


@pytest.mark.parametrize("override", ["algorithm.name=ppo", "algorithm.beta=0.1"])
def test_a_critic_or_a_reference_begins_with_the_first_weights(source: RunFolder, override: str):
    """The checkpoint of step 0, which is retained, has neither."""
    assert planned(source, wanted(0), []).start is not None
    plan = planned(source, wanted(0), [override])
    assert plan.start is None
    train(plan)
    assert command.verify(plan.folder)["violations"] == []
    with pytest.raises(ConfigError, match=r"algorithm\."):
        planned(source, wanted(1), [override])


def test_a_folder_that_is_no_run_or_has_trained_nothing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        planned(RunFolder(tmp_path), wanted(0), [])
    folder = RunFolder(small_run.write_config(tmp_path / "r"))
    with pytest.raises(ConfigError, match="trained nothing yet"):
        planned(folder, wanted(0), [])


def test_a_run_of_another_version_is_named(source: RunFolder):
    for path in source.archive.rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(b'"schema":2', b'"schema":3'))
    for path in source.checkpoints.glob("*/state.json"):
        path.write_bytes(path.read_bytes().replace(b'"schema": 2', b'"schema": 3'))
    with pytest.raises(ConfigError, match=r"trained nothing|cannot be forked"):
        planned(source, wanted(1), [])


def test_missing_and_damaged_groups_are_named(source: RunFolder):
    path = archive.path_of(source.archive, WeightVersion(2, 4))
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    with pytest.raises(DecodeError, match="s000004"):
        train(planned(source, wanted(1), []))
    path.unlink()
    with pytest.raises(ConfigError, match="e000002-s000004"):
        planned(source, wanted(1), ["run.name=other"])


def test_another_fork_does_not_take_a_name_that_exists(source: RunFolder):
    plan = planned(source, wanted(1, 2), [])
    train(plan)
    existing = Fork.read(plan.folder)
    training.check_existing(plan, existing)
    with pytest.raises(ConfigError, match="another last"):
        training.check_existing(planned(source, wanted(1, 3), []), existing)
    with pytest.raises(ConfigError, match=r"algorithm\.name"):
        training.check_existing(planned(source, wanted(1, 2), ["algorithm.name=cispo"]), existing)
    with pytest.raises(ConfigError, match="is not a fork"):
        training.check_existing(plan, None)


def test_a_full_disk_leaves_no_folder(source: RunFolder, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise StorageFull("no room")

    monkeypatch.setattr(fork_start, "copy_environments", full)
    plan = planned(source, wanted(1), [])
    with pytest.raises(VolleyError, match="no space is left"):
        training.prepare(plan)
    assert [path.name for path in source.path.parent.iterdir() if "fork" in path.name] == []


def test_two_processes_do_not_make_one_folder(source: RunFolder):
    plan = planned(source, wanted(1), [])
    with fork_start.draft(plan.folder) as hidden:
        with pytest.raises(ConfigError, match="another process is creating"):
            training.prepare(plan)
        assert hidden.path.exists(), "the other one's draft stays"
    with pytest.raises(ConfigError, match="another process has created"):
        training.prepare(plan)
    assert [path.name for path in source.path.parent.glob(".*")] == []


@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.1])
def test_a_bound_that_is_no_share_is_named(source: RunFolder, share: float):
    with pytest.raises(ConfigError, match="--least-share"):
        planned(source, wanted(1, least_share=share), [])


def test_an_environment_that_the_run_did_not_play_is_named(source: RunFolder):
    with pytest.raises(ConfigError, match=r"--env other.*toy"):
        planned(source, wanted(1, mended=True, judged_by={"other": "toy@2"}), [])


def _with(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda raw: raw | fields


def _with_point(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda raw: raw | {"points": [raw["points"][0] | fields]}


@pytest.mark.parametrize(
    "edit",
    [
        _with_point(run="other"),
        _with_point(lineage=[[1, 0], [2, 1]]),
        lambda raw: _with_point(step=2)(raw) | {"step": 2},
        _with(step=2),
        _with(step="1"),
        _with(last=None),
        _with(points=[]),
        _with(least_share=None),
        _with(source=5),
        _with(judged_by={"toy": 2}),
        _with(judged_by=[]),
        _with(version="x"),
        _with(version="e000009-s000009"),
        _with(source="/elsewhere"),
        _with(version="e000002-s000004"),
        _with(mended=True),
        _with(judged_by={"toy": "toy@2"}),
        _with(last=9),
        _with(rebuilt=1),
        _with(least_share=0.0),
        None,
    ],
)
def test_another_origin_than_that_of_the_checkpoints_is_reported(
    forked: RunFolder, edit: Callable[[dict[str, Any]], dict[str, Any]] | None
):
    valid = forked.fork.read_bytes()
    try:
        if edit is None:
            forked.fork.unlink()
        else:
            forked.fork.write_bytes(orjson.dumps(edit(orjson.loads(valid))))
        assert {one["file"] for one in command.verify(forked)["violations"]} == {"fork.json"}
        if (fork := forks.read(forked)) is not None:
            assert isinstance(fork.origin["log_end"], str)
    finally:
        forked.fork.write_bytes(valid)


@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (lambda groups: [*groups[:1], *groups], {"doubly_trained", "archive"}),
        (lambda groups: groups[::-1], {"archive"}),
        (lambda groups: [_sampled_by(groups[0], "e000001-s000003"), *groups[1:]], {"lineage", "ledger", "digest"}),
        (lambda groups: [_sampled_by(groups[0], "e000009-s000004"), *groups[1:]], {"lineage", "ledger", "digest"}),
        (lambda groups: [small_run.group(groups[0].ticket, WeightVersion(2, 3), reward=7), *groups[1:]], {"digest"}),
    ],
)
def test_other_groups_than_those_of_the_log_are_reported(
    source: RunFolder, edit: Callable[[list[Group]], list[Group]], kinds: set[str]
):
    """Also tokens of versions that the log's run undid, or never made."""
    plan = planned(source, wanted(1), [])
    train(plan)
    last = archive.versions(plan.folder.archive)[-1]
    name = plan.loaded.config.run.name
    groups = [Group.decode(one) for one in archive.read(plan.folder.archive, name, last)]
    archive.path_of(plan.folder.archive, last).unlink()
    Archive(plan.folder.archive, name).write(last, [group.encode() for group in edit(groups)])
    assert {str(one["kind"]) for one in command.verify(plan.folder)["violations"]} == kinds


def _sampled_by(group: Group, version: str) -> Group:
    return small_run.group(group.ticket, WeightVersion.parse(version))


def test_a_fork_that_has_not_begun_is_proven(source: RunFolder):
    plan = planned(source, wanted(1), [])
    training.prepare(plan)
    with claimed(plan.loaded, free=forks.FREE):
        pass
    result = command.verify(plan.folder)
    assert result["violations"] == []
    assert any(one.startswith("fork.json") for one in result["not_checked"])


def test_a_run_does_not_become_a_fork(source: RunFolder):
    """By the fork.json of a real one."""
    plan = planned(source, wanted(2), [])
    training.prepare(plan)
    shutil.copy(plan.folder.fork, source.fork)
    assert {one["file"] for one in command.verify(source)["violations"]} == {"fork.json"}


def test_each_variation_is_a_fork_with_its_own_name():
    assert varied("r", ["a.b=1"], [["algorithm.name", "grpo", "dppo"]]) == [
        (["a.b=1", "algorithm.name=grpo", "run.name=r-fork-grpo"], []),
        (["a.b=1", "algorithm.name=dppo", "run.name=r-fork-dppo"], []),
    ]
    assert varied("r", ["run.name=x"], [["config", "a/b.yaml"]]) == [
        (["run.name=x", "run.name=x-b"], [Path("a/b.yaml")]),
    ]


def judged(one: Trajectory, reward: float) -> ReplayedRewards:
    return ReplayedRewards(
        "toy", one.task, one.ticket, one.sample_index, one.reward, one.success, reward, True, rewards=(reward,)
    )


def test_new_rewards_replace_those_of_the_archive():
    group = small_run.group(1, WeightVersion(1, 0))
    found = [judged(one, 2.5) for one in group.trajectories]
    changed = mended(group, found)
    assert [(one.reward, one.success) for one in changed.trajectories] == [(2.5, True)] * len(found)
    assert Group.decode(changed.encode()).trajectories[0].token_ids.tolist() == group.trajectories[0].token_ids.tolist()
    broken = mended(group, [replace(found[0], reward=None, why="gone"), *found[1:]])
    assert broken.trajectories == ()
    assert "gone" in str(broken.failure)
