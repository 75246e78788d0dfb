"""kill -9 of every service in one run, also before it is ready: no ticket is lost, none is trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import Training, training
from volley_proof.verify.command import verify

N_STEPS, N_GROUPS = 8, 2

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_survives_the_loss_of_each_service_before_it_is_ready(tmp_path: Path) -> None:
    """At the first start, and at the start after the first."""
    killed = dict[str, set[int]]()
    with training(tmp_path, f"trainer.max_steps={N_STEPS}") as run:
        for victim in ("redis", "env", "rollout", "orchestrator", "trainer"):
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
        for step, victim in enumerate(("trainer", "orchestrator", "redis", "rollout"), start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 300)
            run.kill(victim)
            run.wait_for(rf"^{victim}(-0)? ended with signal 9 \(SIGKILL\); restarting", 60)
        assert run.wait(400) == 0, run.text()
        assert run.leftovers() == []
    assert_all_trained_once(run)


def assert_all_trained_once(run: Training) -> None:
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    assert (result["lost"], result["doubly_trained"]) == (0, 0)
    assert result["by_disposition"]["trained"] == N_STEPS * N_GROUPS
