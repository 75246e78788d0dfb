"""A valid run is proven; every kind of violation, planted in a copy of it, is named."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from shared.errors import ConfigError
from shared.files.locks import lock_file, try_lock
from shared.queue.client import connect
from shared.queue.queue import TicketQueue
from shared.run import archive, checkpoint_files, commits, ledger, trust
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.run.mixture import MixtureChange
from shared.teacher_view import TeacherPrompt, TeacherView
from shared.types import Group, WeightVersion
from tests.support import small_run
from tests.support.redis import begun, configured
from tests.support.small_run import RUN, group
from tools.embedded_redis import embedded_server
from volley.printing import json_output
from volley_proof.verify import command, tickets
from volley_proof.verify.violation import ViolationKind

E2 = [WeightVersion(2, step) for step in range(6)]
HEAD = "checkpoints/e000002-s000005"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("valid") / RUN)


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(valid, tmp_path / RUN)
    return RunFolder(tmp_path / RUN)


def verify(run: RunFolder) -> dict[str, Any]:
    return command.verify(run)


def test_a_valid_run_is_proven(run: RunFolder, capsys: pytest.CaptureFixture[str]):
    result = verify(run)
    assert result["ok"]
    assert (result["tickets"], result["lost"], result["doubly_trained"], result["violations"]) == (12, 0, 0, [])
    assert result["by_disposition"] == {"trained": 10, "failed": 1, "stale": 1}
    assert command.main(run.path) == 0
    assert capsys.readouterr().out.endswith("\nproven: 10 groups, each trained exactly once\n")


def test_a_run_that_records_a_removed_key_without_an_effect_is_proven(run: RunFolder):
    settings = orjson.loads(run.record.read_bytes())["config"]
    edit_json(run.record, config={**settings, "orchestrator.generation.filters.custom": []})
    assert verify(run)["violations"] == []


# What is planted, and how: each takes the run's folder and breaks one thing.


def edit_ledger(run: RunFolder, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = [orjson.loads(line) for line in run.ledger.read_bytes().splitlines()]
    change(lines)
    run.ledger.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))


def edit_state(run: RunFolder, **changes: Any) -> None:
    """Of the newest checkpoint, whose manifest is told."""
    path = run.path / HEAD / "state.json"
    edit_json(path, **changes)
    edit_json(path.with_name(checkpoint_files.MANIFEST), state=checkpoint_files.digest(path))


def edit_archive(run: RunFolder, step: int, change: Callable[[list[Group]], object], *, told: bool = True) -> None:
    """Replaces the groups of a step of epoch 2; the ledger is `told` the new digests and versions."""
    groups = [Group.decode(payload) for payload in archive.read(run.archive, RUN, E2[step])]
    change(groups)
    digests = Archive(run.archive, RUN).write(E2[step], [g.encode() for g in groups])

    def tell(lines: list[dict[str, Any]]) -> None:
        mine = [line for line in lines if line["disposition"] == "trained" and line["step"] == step]
        for line, one, digest in zip(mine, groups, digests, strict=False):
            versions = sorted({s.version for t in one.trajectories for s in t.versions})
            line |= {"digest": digest, "versions": [versions[0], versions[-1]]}

    if told:
        edit_ledger(run, tell)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def of(ticket: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["ticket"] == ticket)


def lose_a_trained_line(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.remove(of(7, lines)))


def lose_a_void_line(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.remove(of(3, lines)))


def train_twice(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.append(of(7, lines) | {"step": 4, "version": str(E2[4])}))


def archive_twice(run: RunFolder) -> None:
    edit_archive(run, 4, lambda groups: groups.__setitem__(0, group(7, E2[3])))


def end_in_two_ways(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.append(ledger.line(7, "stale", E2[3])))


def end_twice_without_training(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.append(of(5, lines) | {"disposition": "failed"}))


def train_unknown_to_the_checkpoint(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.append(ledger.line(99, "trained", E2[3])))


def void_unknown_to_the_checkpoint(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.append(ledger.line(98, "failed", E2[3])))


def shrink_a_step(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: lines.remove(of(8, lines)))


def write_nonsense(run: RunFolder) -> None:
    run.ledger.write_bytes(run.ledger.read_bytes().replace(b'"stale"', b'"evaporated"'))


def lie_about_versions(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: of(9, lines).update(versions=[str(E2[2]), str(E2[3])]))


def miscount_voids(run: RunFolder) -> None:
    edit_state(run, void=1)


def forget_a_finished_ticket(run: RunFolder) -> None:
    edit_state(run, low=6)


def break_the_lineage(run: RunFolder) -> None:
    edit_state(run, lineage=[[1, 0], [2, 1]])


def lose_the_reference(run: RunFolder) -> None:
    edit_state(run, reference="e000001-s000000")


def flip_a_parameter(run: RunFolder) -> None:
    flip(run.path / "checkpoints" / str(E2[4]) / "params" / "w.npy")


def flip_the_optimizer(run: RunFolder) -> None:
    flip(run.path / HEAD / "optimizer" / "optimizer.count.npy")


def flip_the_state(run: RunFolder) -> None:
    edit_json(run.path / HEAD / "state.json", issued=13)


def take_a_manifest_of_another_run(run: RunFolder) -> None:
    edit_json(run.path / HEAD / checkpoint_files.MANIFEST, run="other")


def remove_an_archived_step(run: RunFolder) -> None:
    archive.path_of(run.archive, WeightVersion(1, 2)).unlink()


def flip_an_archived_step(run: RunFolder) -> None:
    flip(archive.path_of(run.archive, E2[3]))


def swap_archived_groups(run: RunFolder) -> None:
    edit_archive(run, 3, lambda groups: groups.reverse(), told=False)


def drop_an_archived_group(run: RunFolder) -> None:
    edit_archive(run, 3, lambda groups: groups.pop(), told=False)


def change_a_reward(run: RunFolder) -> None:
    edit_archive(run, 3, lambda groups: groups.__setitem__(1, group(8, E2[2], reward=5.0)), told=False)


def archive_an_invalid_group(run: RunFolder) -> None:
    def overlong(groups: list[Group]) -> None:
        groups[0] = replace(groups[0], trajectories=(replace(groups[0].trajectories[0], prompt_len=99),))

    edit_archive(run, 3, overlong)


def archive_too_large_a_group(run: RunFolder) -> None:
    edit_archive(
        run, 3, lambda groups: groups.__setitem__(0, replace(groups[0], trajectories=groups[0].trajectories * 2))
    )


def train_on_stale_tokens(run: RunFolder) -> None:
    edit_archive(run, 5, lambda groups: groups.__setitem__(0, group(11, E2[2])))


def train_on_undone_weights(run: RunFolder) -> None:
    edit_archive(run, 4, lambda groups: groups.__setitem__(1, group(10, WeightVersion(1, 3))))


def train_on_future_weights(run: RunFolder) -> None:
    edit_archive(run, 4, lambda groups: groups.__setitem__(1, group(10, E2[4])))


def learn_from_undone_weights(run: RunFolder) -> None:
    """The tokens are of this lineage, and those of the privileged teacher are not."""

    def taught(groups: list[Group]) -> None:
        one = groups[0].trajectories[0]
        view = TeacherView((TeacherPrompt(one.token_ids[:1], one.prompt_len, "e000001-s000003"),) * len(one.lengths()))
        branches = tuple(replace(branch, teacher_logprobs=branch.logprobs) for branch in one.branches)
        made = replace(one, teacher_logprobs=one.logprobs, teacher_view=view, branches=branches)
        groups[0] = replace(groups[0], trajectories=(made, *groups[0].trajectories[1:]))

    edit_archive(run, 4, taught)


def repeat_metrics(run: RunFolder) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes() + run.metrics.read_bytes().splitlines(keepends=True)[2])


def change_a_reward_everywhere(run: RunFolder) -> None:
    edit_archive(run, 3, lambda groups: groups.__setitem__(1, group(8, E2[2], reward=5.0)))


def change_a_loss(run: RunFolder) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes().replace(b'"loss":0.0', b'"loss":0.5', 1))


def train_a_token_of_a_branch_twice(run: RunFolder) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes().replace(b'"tokens":24', b'"tokens":25', 1))


def leave_out_a_token_of_a_branch(run: RunFolder) -> None:
    run.metrics.write_bytes(run.metrics.read_bytes().replace(b'"tokens":24', b'"tokens":23', 1))


def empty_the_metrics(run: RunFolder) -> None:
    run.metrics.write_bytes(b"")


def change_a_reason(run: RunFolder) -> None:
    edit_ledger(run, lambda lines: of(3, lines).update(reason="nobody's fault"))


def change_the_bound(run: RunFolder) -> None:
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    tree["grpo_config"]["off_policy_steps"] = 7
    run.config.write_text(yaml.safe_dump(tree), encoding="utf-8")


def change_the_record(run: RunFolder) -> None:
    edit_json(run.record, config=orjson.loads(run.record.read_bytes())["config"] | {"trainer.groups_per_step": 3})


def change_the_mixture(run: RunFolder) -> None:
    run.mixture.write_bytes(MixtureChange(9, {"adder@1": 1}).encode())


def damage_the_mixture(run: RunFolder) -> None:
    run.mixture.write_bytes(b'{"from_ticket": 3}\n')


def remove_the_last_checkpoint(run: RunFolder) -> None:
    shutil.rmtree(run.path / HEAD)


def remove_a_record(run: RunFolder) -> None:
    commits.path_of(run.archive, E2[4]).unlink()


def flip_a_record(run: RunFolder) -> None:
    flip(commits.path_of(run.archive, E2[5]))


def tell_another_state(run: RunFolder) -> None:
    """In a record that is as it was written."""
    record = commits.read(run.archive, E2[4])
    other = dataclasses.replace(record, state=dataclasses.replace(record.state, issued=99))
    commits.path_of(run.archive, E2[4]).write_bytes(other.to_json())


PLANTED = [
    (remove_a_record, ViolationKind.COMMIT, {"step": 4}),
    (flip_a_record, ViolationKind.COMMIT, {"file": "archive/e000002/s000005.json"}),
    (tell_another_state, ViolationKind.COMMIT, {"step": 4}),
    (change_a_reward_everywhere, ViolationKind.LEDGER, {"ticket": 8, "step": 3}),
    (change_a_reward_everywhere, ViolationKind.CHAIN, {"step": 3}),
    (change_a_loss, ViolationKind.CHAIN, {"step": 3}),
    (empty_the_metrics, ViolationKind.METRICS, {"step": 1}),
    (change_a_reason, ViolationKind.CHAIN, {"file": "ledger.jsonl"}),
    (change_the_bound, ViolationKind.CONFIG, {"file": "config.yaml"}),
    (change_the_record, ViolationKind.CONFIG, {"file": "run.json"}),
    (remove_the_last_checkpoint, ViolationKind.CHECKPOINT, {"file": "run.json"}),
    (lose_a_trained_line, ViolationKind.LOST, {"ticket": 7}),
    (lose_a_void_line, ViolationKind.LOST, {"ticket": 3}),
    (train_twice, ViolationKind.DOUBLY_TRAINED, {"ticket": 7}),
    (archive_twice, ViolationKind.DOUBLY_TRAINED, {"ticket": 7, "step": 4}),
    (end_in_two_ways, ViolationKind.TWO_DISPOSITIONS, {"ticket": 7, "step": 3}),
    (end_twice_without_training, ViolationKind.TWO_DISPOSITIONS, {"ticket": 5}),
    (train_unknown_to_the_checkpoint, ViolationKind.NOT_IN_CHECKPOINT, {"ticket": 99, "step": 3}),
    (void_unknown_to_the_checkpoint, ViolationKind.NOT_IN_CHECKPOINT, {"ticket": 98}),
    (shrink_a_step, ViolationKind.STEP, {"step": 3}),
    (write_nonsense, ViolationKind.LEDGER, {"file": "ledger.jsonl"}),
    (lie_about_versions, ViolationKind.LEDGER, {"ticket": 9, "step": 4}),
    (miscount_voids, ViolationKind.STATE, {"step": 5}),
    (forget_a_finished_ticket, ViolationKind.STATE, {"step": 5}),
    (break_the_lineage, ViolationKind.STATE, {"file": f"checkpoints/{E2[4]}/state.json"}),
    (lose_the_reference, ViolationKind.STATE, {"step": 5}),
    (flip_a_parameter, ViolationKind.CHECKPOINT, {"file": f"checkpoints/{E2[4]}"}),
    (flip_the_optimizer, ViolationKind.CHECKPOINT, {"file": HEAD}),
    (flip_the_state, ViolationKind.CHECKPOINT, {"file": HEAD}),
    (take_a_manifest_of_another_run, ViolationKind.CHECKPOINT, {"file": HEAD}),
    (remove_an_archived_step, ViolationKind.ARCHIVE, {"file": "archive/e000001/s000002.zst"}),
    (flip_an_archived_step, ViolationKind.ARCHIVE, {"file": "archive/e000002/s000003.zst"}),
    (swap_archived_groups, ViolationKind.ARCHIVE, {"step": 3}),
    (drop_an_archived_group, ViolationKind.ARCHIVE, {"step": 3}),
    (change_a_reward, ViolationKind.DIGEST, {"ticket": 8, "step": 3}),
    (archive_an_invalid_group, ViolationKind.GROUP, {"step": 3}),
    (archive_too_large_a_group, ViolationKind.GROUP, {"ticket": 7}),
    (change_the_mixture, ViolationKind.MIXTURE, {"ticket": 9, "step": 4}),
    (damage_the_mixture, ViolationKind.MIXTURE, {"file": "mixture.jsonl"}),
    (train_on_stale_tokens, ViolationKind.STALENESS, {"ticket": 11, "step": 5}),
    (train_on_undone_weights, ViolationKind.LINEAGE, {"ticket": 10, "step": 4}),
    (train_on_future_weights, ViolationKind.LINEAGE, {"ticket": 10, "step": 4}),
    (learn_from_undone_weights, ViolationKind.LINEAGE, {"step": 4}),
    (train_a_token_of_a_branch_twice, ViolationKind.DOUBLY_TRAINED, {"step": 1}),
    (leave_out_a_token_of_a_branch, ViolationKind.METRICS, {"step": 1, "file": "archive/e000001/s000001.zst"}),
    (repeat_metrics, ViolationKind.METRICS, {"file": "metrics.jsonl"}),
]


@pytest.mark.parametrize(
    ("plant", "kind", "named"), PLANTED, ids=[f"{plant.__name__}-{kind}" for plant, kind, _ in PLANTED]
)
def test_a_planted_violation_is_named(
    run: RunFolder,
    plant: Callable[[RunFolder], None],
    kind: ViolationKind,
    named: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
):
    plant(run)
    with json_output():
        assert command.main(run.path) == 1
    result = orjson.loads(capsys.readouterr().out)
    assert not result["ok"]
    fitting = [v for v in result["violations"] if v["kind"] == kind and named.items() <= v.items()]
    assert fitting, result["violations"]
    assert result["lost"] == len({v["ticket"] for v in result["violations"] if v["kind"] == "lost"})
    assert command.main(run.path) == 1
    assert f"VIOLATION {kind}: " in capsys.readouterr().out


def test_every_kind_is_planted():
    assert {kind for _, kind, _ in PLANTED} == set(ViolationKind) - {ViolationKind.QUEUE, ViolationKind.FOLDER}


def test_without_a_checkpoint_nothing_is_proven(run: RunFolder):
    shutil.rmtree(run.checkpoints)
    (violation,) = verify(run)["violations"]
    assert violation["kind"] == "checkpoint"


def test_lines_that_a_crash_kept_from_the_ledger_are_in_the_checkpoint(run: RunFolder):
    edit_ledger(run, lambda lines: lines.remove(of(12, lines)))
    assert verify(run)["ok"]


def test_a_torn_last_line_was_promised_to_nobody(run: RunFolder):
    run.ledger.write_bytes(run.ledger.read_bytes() + b'{"ticket": 13, "dispo')
    assert verify(run)["ok"]


def test_records_that_a_running_trainer_removes_meanwhile_are_missed_by_nobody(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    read, before = commits.read, commits.versions(run.archive)

    def then_forgotten(root: Path, version: WeightVersion) -> commits.CommitRecord:
        record = read(root, version)
        commits.CommitLog(root, RUN).forget(before[-1].step)
        return record

    monkeypatch.setattr(commits, "read", then_forgotten)
    result = verify(run)
    assert commits.versions(run.archive) == before[-1:]
    assert len(before) > 2
    assert result["ok"], result["violations"]


def test_a_step_whose_record_is_gone_is_named(run: RunFolder):
    shutil.rmtree(run.path / HEAD)
    commits.path_of(run.archive, E2[5]).unlink()
    edit_json(run.record, finished=False, final=None)
    result = verify(run)
    (violation,) = result["violations"]
    assert (violation["kind"], violation["step"]) == (ViolationKind.COMMIT, 5)
    assert "its record is gone" in violation["detail"]
    assert {line["step"] for line in result["undone"]} == {5}


def test_what_a_late_trainer_wrote_does_not_count(run: RunFolder):
    zombie = WeightVersion(1, 3)
    Archive(run.archive, RUN).write(zombie, [group(7, WeightVersion(1, 2)).encode()])
    edit_ledger(run, lambda lines: lines.extend([ledger.line(7, "trained", zombie), ledger.line(8, "stale", zombie)]))
    result = verify(run)
    assert result["ok"]
    assert result["by_disposition"] == {"trained": 10, "failed": 1, "stale": 1}
    assert result["superseded_archives"] == [str(zombie)]
    assert result["undone"] == [{"ticket": 7, "step": 3, "epoch": 1}]


def test_the_same_end_told_by_a_trainer_and_its_successor_is_one(run: RunFolder):
    edit_ledger(run, lambda lines: lines.extend([of(7, lines), of(8, lines), of(5, lines)]))
    result = verify(run)
    assert result["ok"], result["violations"]
    assert result["undone"] == []


def test_metrics_of_a_trainer_that_was_replaced_do_not_count(run: RunFolder):
    late = orjson.loads(run.metrics.read_bytes().splitlines()[2]) | {"version": "e000001-s000003"}
    run.metrics.write_bytes(run.metrics.read_bytes() + orjson.dumps(late) + b"\n")
    assert verify(run)["ok"]


def test_a_checkpoint_that_was_set_aside_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]):
    aside = run.checkpoints / checkpoint_files.BAD / "e000002-s000006"
    shutil.copytree(run.path / HEAD, aside)
    flip(aside / "params" / "w.npy")
    result = verify(run)
    assert result["ok"]
    assert "digest of params/w.npy differs" in result["set_aside"]["e000002-s000006"]
    assert command.main(run.path) == 0
    assert "set aside: e000002-s000006: " in capsys.readouterr().out


def test_a_rollback_undoes_what_was_trained_before_it(run: RunFolder):
    lines = [
        ledger.line(1, "trained", WeightVersion(1, 1)),
        ledger.line(2, "trained", WeightVersion(1, 1)),
        ledger.rollback(0, 2),
    ]
    edit_ledger(run, lambda old: old.__setitem__(slice(0, 0), lines))
    assert verify(run)["ok"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        command.main(tmp_path)


def test_a_missing_ledger_has_no_lines(tmp_path: Path):
    assert tickets.read(tmp_path / "ledger.jsonl") == ([], [])


@pytest.fixture
def redis(run: RunFolder, tmp_path: Path) -> Iterator[str]:
    """The run's Redis, in which a trainer has begun with the newest checkpoint."""
    with embedded_server(tmp_path / "redis") as spec:
        run.services.write_text(yaml.safe_dump({"services": configured(spec.url, tmp_path)}), encoding="utf-8")
        trust.accept(run)
        asyncio.run(begin(spec.url))
        yield spec.url


async def begin(url: str, *, low: int = 12, version: int = 5, issued: int = 12) -> None:
    async with connect(url) as client:
        await begun(TicketQueue(client, RUN), low, version, issued, 2, (), 2)


def test_a_redis_that_agrees(run: RunFolder, redis: str):
    result = verify(run)
    assert result["ok"]
    assert result["redis"] == "agrees"


def test_a_redis_that_finished_what_the_ledger_does_not_know(run: RunFolder, redis: str):
    asyncio.run(begin(redis, low=14, version=6, issued=14))
    result = verify(run)
    assert result["redis"] == "differs"
    assert result["lost"] == 2
    assert {v["kind"] for v in result["violations"]} == {"queue", "lost"}


def test_a_redis_that_lost_an_issued_ticket(run: RunFolder, redis: str):
    async def lose() -> None:
        async with connect(redis) as client:
            queue = TicketQueue(client, RUN)
            await client.hincrby(queue.keys.state, "issued", 3)

    asyncio.run(lose())
    (violation,) = verify(run)["violations"]
    assert violation["kind"] == "queue"
    assert violation["detail"].startswith("3 issued tickets")


def test_a_redis_that_is_down_is_told(run: RunFolder):
    run.services.write_text(yaml.safe_dump({"services": {"redis_url": "redis://127.0.0.1:1/0"}}), encoding="utf-8")
    trust.accept(run)
    result = verify(run)
    assert result["ok"]
    assert result["redis"] == "the run has stopped, so its queue was not read"
    lock = lock_file(run.path / ".lock")
    assert try_lock(lock)
    assert "did not answer" in verify(run)["redis"]
    os.close(lock)
    own = yaml.safe_load(run.config.read_bytes()) if run.config.exists() else {}
    services = {**own.get("services", {}), "redis_url": "redis://127.0.0.1:1/0"}  # of another host
    run.config.write_text(yaml.safe_dump({**own, "services": services}), encoding="utf-8")
    trust.accept(run)
    assert "did not answer" in verify(run)["redis"]
