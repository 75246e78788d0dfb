"""kill -9 of trainer, orchestrator, rollout server and Redis in one run: no ticket is lost, none is trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli import jsonl
from tests.support.stack import training

N_STEPS, N_GROUPS = 8, 2

pytestmark = pytest.mark.timeout(900)


def surviving(ledger: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines of the lineage that survived: a `rollback` undoes what was trained after its step, before it in the file."""
    kept: list[Mapping[str, Any]] = []
    for line in ledger:
        if "rollback" in line:
            kept = [end for end in kept if end["disposition"] != "trained" or end["step"] <= line["rollback"]]
        else:
            kept.append(line)
    return kept


def test_a_run_survives_the_loss_of_each_service(tmp_path: Path) -> None:
    with training(tmp_path, f"trainer.max_steps={N_STEPS}") as run:
        for step, victim in enumerate(("trainer", "orchestrator", "redis", "rollout"), start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 300)
            run.kill(victim)
            run.wait_for(rf"^{victim}(-0)? ended with signal 9; restarting", 60)
        assert run.wait(400) == 0, run.text()
        assert run.leftovers() == []
    ends = surviving(jsonl.read(run.folder.path / "ledger.jsonl"))
    assert all(n == 1 for n in Counter(end["ticket"] for end in ends).values()), "a ticket has two ends"
    trained = [end for end in ends if end["disposition"] == "trained"]
    assert Counter(end["step"] for end in trained) == dict.fromkeys(range(1, N_STEPS + 1), N_GROUPS)
    tickets = sorted(end["ticket"] for end in ends)
    assert set(range(1, max(end["ticket"] for end in trained) + 1)) <= set(tickets), "a ticket was lost"
