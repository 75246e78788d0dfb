"""An orchestrator that is stopped and killed: stored turns are not sampled again, and the run is proven."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import pytest

from shared import codec
from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group
from tests.support.stack import continued, training
from volley_proof.verify.command import verify

SETTINGS = (
    "run.seed=5",
    "trainer.max_steps=8",
    "trainer.order=ticket",
    "data.n_eval_tasks=1",
    "orchestrator.lease_s=5",
    "orchestrator.max_turns=6",
    "orchestrator.generation.partial_rollouts=true",
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_a_run_that_is_killed_and_stopped_goes_on_from_stored_turns_and_makes_the_same_groups(tmp_path: Path) -> None:
    with training(tmp_path / "calm", *SETTINGS, simulated=True) as calm:
        assert calm.wait(300) == 0, calm.text()
    left = 0

    def n_stored(run: RunFolder) -> int:
        with sqlite3.connect(f"file:{run.partials}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM partials").fetchone()[0])

    with training(tmp_path / "rough", *SETTINGS, simulated=True) as rough:
        for n, step in enumerate((1, 3), start=1):
            rough.wait_for(rf"^step +{step}/8", 120)
            rough.kill("orchestrator")
            left += n_stored(rough.folder)
            rough.wait_for(rf"(?s)(^orchestrator answers after.*){{{n + 1}}}", 120)
        rough.wait_for(r"^step +5/8", 120)
        rough.process.send_signal(signal.SIGINT)
        rough.wait(60)
        left += n_stored(rough.folder)
        interrupted = interrupted_episodes(rough.folder)
    with continued(tmp_path / "rough", simulated=True) as rough:
        assert rough.wait(300) == 0, rough.text()
    assert left > 0
    assert n_stored(rough.folder) == 0
    for run in (calm.folder, rough.folder):
        result = verify(run)
        assert result["ok"], result["violations"]
    made = [
        {
            (group.ticket, e.sample_index): e.token_ids.tolist()
            for v in archive.versions(run.archive)
            for group in map(Group.decode, archive.read(run.archive, run.name, v))
            for e in group.trajectories
        }
        for run in (calm.folder, rough.folder)
    ]
    assert made[0].keys() == made[1].keys()
    assert {key for key in made[0] if made[0][key] != made[1][key]} <= interrupted


def interrupted_episodes(run: RunFolder) -> set[tuple[int, int]]:
    """Ticket and sample of each episode that the stop cut within an answer, whose rest has a seed of its own."""
    with sqlite3.connect(f"file:{run.partials}?mode=ro", uri=True) as db:
        turns = db.execute("SELECT ticket, sample, record FROM partials WHERE turn > 0").fetchall()
    return {
        (ticket, sample)
        for ticket, sample, record in turns
        if any(part["finish"] == "abort" for part in codec.unpack(record, "turn", 2**20)["parts"])
    }
