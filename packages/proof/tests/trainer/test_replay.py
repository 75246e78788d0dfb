"""A real asynchronous run, killed and resumed: proven, replayed bit by bit, and what differs is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from shared.config import load, validate
from shared.run import archive, checkpoint_files, commits, pinned, token_values
from shared.run import state as states
from shared.run.archive import Archive
from shared.run.folder import RunFolder
from shared.types import Group, WeightVersion
from tests.trainer.process import BATCH, ROOT, in_use, producing, trainer
from tools.embedded_redis import embedded_server
from volley.runs import record
from volley_proof.replay.recorded import RecordedStep
from volley_proof.replay.steps import StepDifference, of_tensors

STEPS = 5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: a checkpoint every second step, groups up to two steps old; stopped, extended and retuned in
    between.
    """
    folder = tmp_path_factory.mktemp("recorded")
    options = {"grpo_config__off_policy_steps": 2, "trainer__checkpointing_options": {"save_interval_steps": 2}}
    options |= {
        "trainer__max_steps": STEPS - 1,
        "trainer__optimizer_config": {"learning_rate": 1e-3, "schedule_type": "linear"},
    }
    with (
        embedded_server(folder / "redis") as spec,
        trainer(folder, spec.url, trainer__order="arrival", **options) as process,
        producing(spec.url, STEPS * BATCH, max_staleness=2),
    ):
        process.wait(lambda status: status["step"] >= 3)
        assert process.terminate() == 0
        process.tree["trainer"] |= {
            "max_steps": STEPS,
            "optimizer_config": {"learning_rate": 1e-4, "schedule_type": "cosine"},
        }
        process.tree["algorithm"] |= {"epsilon": 0.1}
        process.start()
        process.wait(lambda status: status["phase"] == "done")
        assert process.terminate() == 0
    with record.claimed(load([folder / "config.yaml"])) as claim:
        record.mark_finished(claim.folder, claim.record)
    return claim.folder.path


def volley(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "volley", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=200, check=False, env=in_use()
    )


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_with_other_settings_and_nothing_is_undone(tmp_path: Path):
    """The steps after the checkpoint are made again under the settings that they were made with."""
    rates = [{"learning_rate": 1e-3}, {"learning_rate": 1e-4, "schedule_type": "cosine"}]
    options = {"trainer__checkpointing_options": {"save_interval_steps": 99}, "trainer__max_steps": 4}
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path, spec.url, trainer__optimizer_config=rates[0], **options) as process,
        producing(spec.url, 4 * BATCH),
    ):
        process.wait(lambda status: status["durable_step"] >= 2)
        process.kill()
        process.tree["trainer"]["optimizer_config"] = rates[1]
        process.tree["algorithm"]["epsilon"] = 0.1
        with record.claimed(validate(process.tree)):
            process.start()
        status = process.wait(lambda status: status["phase"] == "done")
        assert status["branched"] is None
        assert process.terminate() == 0
    with record.claimed(load([tmp_path / "config.yaml"])) as claim:
        known = record.mark_finished(claim.folder, claim.record)
    state = commits.newest(claim.folder)
    assert state is not None
    began = dict(state.lineage)
    assert [changed["trainer.optimizer_config.learning_rate"] for _, changed in state.settings] == [1e-3, 1e-4]
    assert [one.from_step for one in known.amendments] == [began[2]]
    assert began[2] >= 2
    verified = result_of(volley("verify", claim.folder.path, "--json"))
    assert (verified["ok"], verified["by_disposition"], verified["undone"]) == (True, {"trained": 4 * BATCH}, [])
    replayed = result_of(volley("replay", claim.folder.path, "--from-step", "0", "--json"))
    assert (replayed["ok"], replayed["steps"], replayed["compared_checkpoints"]) == (True, 4, 1)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    return orjson.loads(done.stdout)


def test_the_checkpoints_tell_what_was_changed(recorded: Path):
    folder = checkpoint_files.newest(recorded / "checkpoints")
    assert folder is not None
    state = states.verify(folder)[1]
    (first, began), (second, changed) = state.settings
    assert [first, second] == [epoch for epoch, _ in state.lineage]
    assert began["trainer.optimizer_config.learning_rate"] == 1e-3
    assert changed == {
        "algorithm.epsilon": 0.1,
        "trainer.max_steps": STEPS,
        "trainer.optimizer_config.learning_rate": 1e-4,
        "trainer.optimizer_config.schedule_type": "cosine",
    }


def test_the_run_is_proven(recorded: Path):
    result = result_of(volley("verify", recorded, "--json"))
    assert result["ok"], result
    assert result["by_disposition"] == {"trained": STEPS * BATCH}
    payloads = [p for v in archive.versions(recorded / "archive") for p in archive.read(recorded / "archive", "r", v)]
    trees = [len(t.branches) for payload in payloads for t in Group.decode(payload).trajectories]
    assert {0, 1} == set(trees), "episodes of one sequence and of two were trained"


@pytest.fixture(scope="module")
def replayed(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A copy of the run, and what its replay says, which keeps the values of tokens there."""
    run = Path(shutil.copytree(recorded, tmp_path_factory.mktemp("replayed") / "r"))
    return run, volley("replay", run, "--from-step", "0", "--tokens", "--json")


def test_it_replays_bit_identically_from_its_first_checkpoint(
    replayed: tuple[Path, subprocess.CompletedProcess[str]],
):
    _, done = replayed
    assert done.returncode == 0, done.stdout + done.stderr
    result = result_of(done)
    assert (result["ok"], result["steps"], result["first_divergence"]) == (True, STEPS, None)
    assert result["compared_checkpoints"] >= 2
    assert result["compared_metrics"] == STEPS


def test_values_of_tokens_are_those_that_the_step_started_from(
    replayed: tuple[Path, subprocess.CompletedProcess[str]],
):
    run, _ = replayed
    version = next(v for v in archive.versions(run / "archive") if v.step == 1)
    values = token_values.read(run / "tokens", "r", version)
    groups = [Group.decode(payload) for payload in archive.read(run / "archive", "r", version)]
    assert len(values) == sum(len(group.trajectories) for group in groups)
    for group in groups:
        rewards = np.array([one.reward for one in group.trajectories])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for one, advantage in zip(group.trajectories, expected, strict=True):
            of, sampled = values[one.ticket, one.sample_index], one.stored("loss_mask") > 0
            assert np.isfinite(of.logprobs[sampled]).all()
            assert (of.logprobs[sampled] < 0).all()
            np.testing.assert_allclose(of.advantages[sampled], advantage, atol=1e-5)
            assert not of.advantages[~sampled].any()
    every = [one for group in groups for one in group.trajectories]
    masks = [one.stored("loss_mask") > 0 for one in every]
    differences = [
        np.abs(values[one.ticket, one.sample_index].logprobs - one.stored("logprobs"))[sampled]
        for one, sampled in zip(every, masks, strict=True)
    ]
    line = orjson.loads((run / "metrics.jsonl").read_bytes().splitlines()[0])
    assert (line["step"], line["version"]) == (1, str(version))
    np.testing.assert_allclose(np.concatenate(differences).mean(), line["logprob_abs_diff"], rtol=1e-5)
    wrong = volley("replay", run, "--refused", str(version), "--tokens")
    assert wrong.returncode == 2


def test_a_changed_reward_diverges_at_its_step(recorded: Path, tmp_path: Path):
    run = Path(shutil.copytree(recorded, tmp_path / "r"))
    version = WeightVersion(next(v.epoch for v in archive.versions(run / "archive") if v.step == 2), 2)
    groups = [Group.decode(payload) for payload in archive.read(run / "archive", "r", version)]
    first = groups[0].trajectories[0]
    changed = replace(first, reward=first.reward + 0.5)
    groups[0] = replace(groups[0], trajectories=(changed, *groups[0].trajectories[1:]))
    Archive(run / "archive", "r").write(version, [group.encode() for group in groups])
    done = volley("replay", run, "--from-step", "0", "--to-step", "2")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert "DIVERGED at step 2" in last
    assert "max |Δ|" in last
    assert result_of(volley("verify", run, "--json"))["violations"][0]["kind"] == "digest"


def test_a_checkpoint_that_is_gone_is_an_error_that_lists_the_others(recorded: Path):
    done = volley("replay", recorded, "--from-step", "77")
    assert done.returncode == 2
    kept = sorted({version.step for version in checkpoint_files.versions(recorded / "checkpoints")})
    assert (
        done.stderr.strip().splitlines()[-1].endswith(f"checkpoints are retained of steps {', '.join(map(str, kept))}")
    )


def test_the_first_differing_tensor_is_named_with_its_largest_difference(recorded: Path):
    from services.trainer.checkpoints.orbax_arrays import OrbaxArrays
    from services.trainer.checkpoints.store import restore

    folder = checkpoint_files.newest(recorded / "checkpoints")
    assert folder is not None
    restored = restore(folder, OrbaxArrays())
    ours = {"params": dict(restored.params), "optimizer": dict(restored.optimizer)}
    assert of_tensors(STEPS, ours, folder) is None
    name = sorted(ours["params"])[1]
    ours["params"][name] = np.array(ours["params"][name])
    ours["params"][name].flat[3] += 0.25
    found = of_tensors(STEPS, ours, folder)
    assert found == StepDifference(STEPS, "params", name, pytest.approx(0.25, rel=1e-3))


@pytest.mark.long
def test_a_refused_step_replays_and_comes_out_the_same(tmp_path: Path):
    """A learning rate of 1e30: the step that moves the parameters so far, or the one after it, is refused. Nothing of
    it is saved.
    """
    with (
        embedded_server(tmp_path / "redis") as spec,
        trainer(tmp_path, spec.url, trainer__optimizer_config={"learning_rate": 1e30}) as process,
        producing(spec.url, STEPS * BATCH),
    ):
        status = process.wait(lambda status: status["phase"] == "refused")
        good = status["step"]
        assert status["durable_step"] == good < 2
        assert str(WeightVersion(1, good + 1)) in status["refused"]
        process.kill()
        process.start()
        status = process.wait(lambda status: status["phase"] == "refused")
        refused = str(WeightVersion(2, good + 1))
        assert refused in status["refused"]
        assert status["tickets"] == {}
        assert process.terminate() == 0
    with record.claimed(load([tmp_path / "config.yaml"])):
        assert max(version.step for version in checkpoint_files.versions(tmp_path / "r" / "checkpoints")) == good
    assert result_of(volley("verify", tmp_path / "r", "--json"))["ok"]
    done = volley("replay", tmp_path / "r", "--refused", refused, "--json")
    result = result_of(done)
    assert (done.returncode, result["ok"], result["refused"]) == (0, True, result["recorded"])
    assert result["refused"]
    other = volley("replay", tmp_path / "r", "--refused", "e000002-s000004")
    assert other.returncode == 2
    assert "e000002-s000004 was never refused" in other.stderr


@pytest.mark.parametrize(
    "other", [{"name": "on_policy_distillation", "gamma": 0.5}, {"name": "reinforce_plus_plus", "gamma": 0.5}]
)
def test_an_epoch_under_another_algorithm_is_replayed_under_that_one(other: dict[str, Any]):
    """Whichever of both is the stored one, and back again."""
    rest = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"env": "e"}}
    rest["services"] = {"orchestrator": {"teacher": {"url": "http://t"}}}
    taught = {"teacher_kl_coef": 0.5}
    stored = [validate(rest | {"algorithm": one}) for one in (taught, other | taught, taught)]
    flats, settings = [pinned.relevant(one.config) for one in stored], ()
    for epoch, flat in enumerate(flats, start=1):
        settings = pinned.amended(settings, epoch, flat)
    head = states.initial_state(0).starting_epoch(3, keep_reference=False)
    recorded = RecordedStep(Path(), "r", replace(head, settings=settings), {}, {}, {})
    for epoch in (1, 2, 3):
        found = [pinned.relevant(recorded.config_of(epoch, one)) for one in stored]
        assert found == [flats[epoch - 1]] * 3


def test_a_fork_without_settings_repeats_the_run_bit_for_bit(recorded: Path, tmp_path: Path):
    """From the step on at which the run's present settings began."""
    head = commits.newest(RunFolder(recorded))
    assert head is not None
    first = head.lineage[-1][1]
    done = volley("fork", recorded, "--from", str(first), f"run.dir={tmp_path}", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = orjson.loads(done.stdout)
    assert (result["run"], result["step"]) == ("r-fork", STEPS)
    ours, theirs = (checksums_of(folder) for folder in (tmp_path / "r-fork", recorded))
    assert ours == theirs
    assert len(ours) == STEPS
    assert result_of(volley("verify", tmp_path / "r-fork", "--json"))["ok"]


@pytest.mark.long
def test_a_fork_with_a_critic_begins_with_the_first_weights(recorded: Path, tmp_path: Path):
    done = volley("fork", recorded, "--steps", "1", "algorithm.name=ppo", f"run.dir={tmp_path}", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = orjson.loads(done.stdout)
    assert (result["run"], result["step"]) == ("r-fork", 1)
    assert result_of(volley("verify", tmp_path / "r-fork", "--json"))["ok"]


@pytest.mark.long
def test_a_fork_with_another_loss_survives_a_kill_and_is_replayed(recorded: Path, tmp_path: Path):
    """No group is filtered because the fork's weights are not those that sampled it."""
    settings = ["algorithm.name=dppo", "trainer.filters.logprob=1e-6"]
    wanted = ["fork", recorded, "--from", "2", *settings, f"run.dir={tmp_path}"]
    command = [sys.executable, "-m", "volley", *map(str, wanted)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", env=in_use()) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 3/"))
        process.kill()
    done = volley(*wanted)
    assert done.returncode == 0, done.stderr
    fork = tmp_path / "r-fork"
    verified = result_of(volley("verify", fork, "--json"))
    assert (verified["ok"], verified["by_disposition"]) == (True, {"trained": STEPS * BATCH})
    replayed = result_of(volley("replay", fork, "--from-step", "2", "--json"))
    assert (replayed["ok"], replayed["steps"]) == (True, STEPS - 2)
    ours, theirs = (checksums_of(folder) for folder in (fork, recorded))
    assert ours[:2] == theirs[:2]
    assert all(a != b for a, b in zip(ours[2:], theirs[2:], strict=True))


def checksums_of(folder: Path) -> list[str]:
    """Checksums of the parameters after each step."""
    lines = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [line["checksums"]["params"] for line in lines]
