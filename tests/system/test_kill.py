"""kill -9 of every service in one run, also before it is ready: no ticket is lost, none is trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.run import archive
from shared.types import Group
from tests.support.stack import Training, training
from volley_proof.verify.command import verify

N_STEPS, N_GROUPS = 8, 2
COUNTER = """
import time


class Counter:
    splits = {"train": 400, "eval": 50}

    def __init__(self, **unused):  # small.yaml has the keys of another environment
        self.n = 0

    def reset(self, split, index, seed):
        return f"{split} {index}"

    def step(self, text):
        self.n += 1
        time.sleep(0.3)
        return "go on", float(2**self.n), self.n == 5, False, {}

    def snapshot(self):
        return self.n

    def restore(self, snapshot):
        self.n = snapshot

    def demonstration(self, split, index):
        return [{"role": "user", "content": self.reset(split, index, 0)}, {"role": "assistant", "content": "a"}], False
"""
"""Five turns, each with a reward of its own: one that is missing or played twice changes the sum. They take longer
than a step of the trainer, so that a kill meets some."""

VICTIMS = ("trainer", "env", "orchestrator", "redis", "rollout")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_survives_the_loss_of_each_service_before_it_is_ready(tmp_path: Path) -> None:
    """At the first start, and at the start after the first."""
    killed = dict[str, set[int]]()
    with training(tmp_path, f"trainer.max_steps={N_STEPS}") as run:
        for victim in reversed(VICTIMS):
            killed[victim] = {run.kill_next(victim, set())}
        run.wait_for(rf"^step +1/{N_STEPS}", 300)
        for victim, before in killed.items():
            serving = run.kill_next(victim, before)
            run.kill_next(victim, {*before, serving})
            run.wait_for(rf"(?s)({victim}(-0)? ended with signal 9 .*?restarting.*?){{3}}", 60)
        assert run.wait(400) == 0, run.text()
        assert run.leftovers() == []
    assert_all_trained_once(run)


def test_a_run_survives_the_loss_of_each_service(tmp_path: Path) -> None:
    with training(tmp_path, f"trainer.max_steps={N_STEPS}") as run:
        for step, victim in enumerate(VICTIMS, start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 300)
            run.kill(victim)
            run.wait_for(rf"^{victim}(-0)? ended with signal 9 \(SIGKILL\); restarting", 60)
        assert run.wait(400) == 0, run.text()
        assert run.leftovers() == []
    assert_all_trained_once(run)


def test_episodes_with_snapshots_go_on_when_their_service_is_killed(tmp_path: Path) -> None:
    """Each ends in its first attempt: of the turns that were stored none is sampled again."""
    file = tmp_path / "counter.py"
    file.write_text(COUNTER, encoding="utf-8")
    own = (f"data.env={file}", "services.env.unsandboxed=[counter]")
    with training(tmp_path, f"trainer.max_steps={N_STEPS}", *own) as run:
        for kills in (1, 2, 3):
            run.wait_for(rf"^step +{2 * kills}/{N_STEPS}", 300)
            run.kill("env")
            run.wait_for(rf"(?s)(env ended with signal 9 .*?restarting.*?){{{kills}}}", 60)
        assert run.wait(400) == 0, run.text()
    assert_all_trained_once(run)
    folder = run.folder
    payloads = [one for v in archive.versions(folder.archive) for one in archive.read(folder.archive, folder.name, v)]
    episodes = [one for group in map(Group.decode, payloads) for one in group.trajectories]
    assert sum(bool(one.failures) for one in episodes) >= 3, "the kills met no episodes"
    assert {(one.attempt, one.reward) for one in episodes} == {(0, 62.0)}


def assert_all_trained_once(run: Training) -> None:
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert result["by_disposition"]["trained"] == N_STEPS * N_GROUPS
