"""Two environments in one run of simulated services, the orchestrator killed, the weights of the mixture changed: each
ticket is the task that it is in an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import config
from shared.run import archive
from shared.run.folder import RunFolder
from shared.run.mixture import TicketAssignment, replayed
from shared.run.shares import configured, weights_of
from shared.types import Group
from shared.web.access import Role, token_for
from tests.support.stack import training
from volley.reporting import jsonl
from volley.runs import addresses
from volley_dashboard.report import report
from volley_proof.verify.command import verify

N_STEPS = 12
SETTINGS = (
    "run.seed=5",
    f"trainer.max_steps={N_STEPS}",
    "data.n_eval_tasks=4",
    "data.mixture.frozen_lake.weight=2",
    "data.mixture.sokoban.weight=1",
    "data.mixture.sokoban.env_config.talk=bare",
    "orchestrator.lease_s=2",
)

pytestmark = pytest.mark.timeout(600)


def trained(run: RunFolder) -> dict[int, tuple[str, str]]:
    """Environment and task of every archived ticket."""
    groups = [
        Group.decode(data) for v in archive.versions(run.archive) for data in archive.read(run.archive, run.name, v)
    ]
    return {group.ticket: (group.env, group.task) for group in groups}


def proven(run: RunFolder) -> None:
    result = verify(run)
    assert result["ok"], result["violations"]


def asked(run: RunFolder, mixture: dict[str, float]) -> dict[str, Any]:
    found = addresses.read(run)
    headers = {"Authorization": f"Bearer {token_for(found.token_files, Role.ADMIN)}"}
    url = f"{found.urls['orchestrator']}/runs/{run.name}"
    answer = httpx.patch(url, json={"mixture": mixture}, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return {row["env"]: row for row in answer.json()["mixture"]}


@pytest.mark.long
def test_an_orchestrator_that_is_killed_while_the_mixture_changes_gives_no_ticket_another_task(tmp_path: Path) -> None:
    with training(tmp_path / "calm", *SETTINGS, simulated=True) as calm:
        assert calm.wait(300) == 0, calm.text()
    with training(tmp_path / "rough", *SETTINGS, simulated=True) as rough:
        for n, step in enumerate((2, 5, 8), start=1):
            rough.wait_for(rf"^step +{step}/{N_STEPS}", 120)
            if n == 2:
                assert asked(rough.folder, {"sokoban": 6})["sokoban"]["share"] == 0.75
            rough.kill("orchestrator")
            rough.wait_for(rf"(?s)(^orchestrator answers after.*){{{n + 1}}}", 120)
        assert rough.wait(300) == 0, rough.text()
    for run in (calm.folder, rough.folder):
        proven(run)
    assert not calm.folder.mixture.exists()
    (change,) = jsonl.read(rough.folder.mixture)
    undisturbed, disturbed = trained(calm.folder), trained(rough.folder)
    assert {env for env, _ in undisturbed.values()} == {"frozen_lake", "sokoban"}
    before = [ticket for ticket in undisturbed.keys() & disturbed.keys() if ticket < change["from_ticket"]]
    assert len(before) > 4
    assert all(disturbed[ticket] == undisturbed[ticket] for ticket in before)
    assignment = TicketAssignment(weights_of(configured(config.load([rough.folder.config]).config.data)))
    assert replayed(assignment, rough.folder.mixture.read_bytes().splitlines()) == []
    assert all(assignment.of(ticket).env == env for ticket, (env, _) in disturbed.items())
    assert len(set(disturbed.values())) == len(disturbed)  # no pass over a split is over: every task once
    summary = report.make(rough.folder)
    assert [one["env"] for one in summary["environments"]] == ["frozen_lake", "sokoban"]
    assert all(one["groups"] and one["evaluations"] for one in summary["environments"])


CURRICULUM = """
def curriculum(mixture):
    started = sum(one.tickets for one in mixture.envs.values())
    return {"sokoban": 1 + started // 4, "frozen_lake": int(started < 8)}
"""


@pytest.mark.long
def test_a_curriculum_of_ones_own_goes_on_after_kills_of_the_orchestrator(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(CURRICULUM, encoding="utf-8")
    settings = (f"data.curriculum.custom={tmp_path}/rule.py:curriculum", "data.curriculum.every_groups=2")
    with training(tmp_path, *SETTINGS, *settings, simulated=True) as run:
        for n, step in enumerate((3, 8), start=1):
            run.wait_for(rf"^step +{step}/{N_STEPS}", 120)
            (tmp_path / "rule.py").unlink(missing_ok=True)
            run.kill("orchestrator")
            run.wait_for(rf"(?s)(^orchestrator answers after.*){{{n + 1}}}", 120)
        assert run.wait(300) == 0, run.text()
    proven(run.folder)
    changes = jsonl.read(run.folder.mixture)
    shares = [change["factors"].get("sokoban", 1.0) for change in changes]
    assert len(changes) > 2
    assert shares == sorted(shares)
    assert changes[-1]["factors"]["frozen_lake"] == 0
    last = [env for ticket, (env, _) in trained(run.folder).items() if ticket >= changes[-1]["from_ticket"]]
    assert set(last) <= {"sokoban"}
