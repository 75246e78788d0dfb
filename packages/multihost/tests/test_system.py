"""A trainer of two processes with two devices each, and a rollout server outside: every process may be killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import training
from volley_proof.verify.command import verify

N_STEPS, N_GROUPS = 5, 2
TWO = ("services.trainer.num_processes=2", "trainer.mesh.shape=[4,1]")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_trainer_of_two_processes_survives_the_loss_of_each(tmp_path: Path) -> None:
    with training(tmp_path, f"trainer.max_steps={N_STEPS}", "sft.max_steps=0", *TWO) as run:
        for step, (victim, other) in enumerate((("trainer-1", "trainer"), ("trainer", "trainer-1")), start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 300)
            run.kill(victim)
            run.wait_for(rf"^{victim} ended with signal 9 \(SIGKILL\); restarting", 60)
            run.wait_for(rf"^{other} ended with exit code (1|75): .*; restarting", 60)
        assert run.wait(400) == 0, run.text()
        assert run.leftovers() == []
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert result["by_disposition"]["trained"] == N_STEPS * N_GROUPS
