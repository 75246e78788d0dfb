"""The environment of the tutorial, sent into a run that is going on: it is trained on without
a restart.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from shared.run import archive
from shared.run.folder import RunFolder
from shared.types import Group
from shared.web.access import Role, token_for
from tests.docs.commands import first_example
from tests.support.net import HTTP
from tests.support.stack import Training, training
from volley.printing import json_output
from volley.runs import addresses
from volley_proof.reverify import command as reverify
from volley_proof.verify.command import verify

N_STEPS = 40  # on a loaded machine validation takes as long as twenty steps
LATE_S = 300.0

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_what_is_submitted_into_a_live_run_is_trained_on_and_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (f"trainer.max_steps={N_STEPS}", "data.n_eval_tasks=2", "services.env.unsandboxed=[compass]")
    with training(tmp_path, *changes) as run:
        run.wait_for(r"^step +1/", 400)
        services = {name: run.service(name) for name in ("env", "orchestrator", "rollout", "trainer")}
        _submit(run)
        run.wait_for(r"^step +3/", 300)
        assert {name: run.service(name) for name in services} == services
        assert run.wait(600) == 0, run.text()
        assert run.leftovers() == []
    result = verify(run.folder)
    assert result["ok"], result["violations"]
    trained = [group.env for group in _trained(run.folder)]
    assert trained[0] == "frozen_lake"
    assert trained.count("compass@1") >= 2
    assert set(trained) == {"frozen_lake", "compass@1"}
    summary = orjson.loads(run.folder.summary.read_bytes())
    assert "compass" in orjson.dumps(summary).decode()
    before = _reverified(run.folder, capsys)
    assert before["changed"] == []
    assert {name: row["groups"] for name, row in before["environments"].items()} == {
        "compass@1": trained.count("compass@1"),
        "frozen_lake": trained.count("frozen_lake"),
    }
    source = run.folder.environments / "submitted" / "compass" / "1" / "source" / "environment.py"
    source.write_text(source.read_text(encoding="utf-8").replace("float(right)", "float(not right)"), encoding="utf-8")
    after = _reverified(run.folder, capsys)["environments"]
    assert after["compass@1"]["changed"] == after["compass@1"]["episodes"] > 0
    assert after["frozen_lake"]["changed"] == 0


def _submit(run: Training) -> None:
    """As the page says, and until it is in use."""
    at = addresses.read(run.folder)
    url, token = at.urls["env"], token_for(at.token_files, Role.ADMIN)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "text/x-python"}
    answer = HTTP.post(f"{url}/environments?name=compass&weight=1", content=first_example().encode(), headers=headers)
    assert answer.status_code == 202, answer.text
    deadline = time.monotonic() + LATE_S
    while (row := HTTP.get(f"{url}/environments/compass", headers=headers).json()["versions"][0])["state"] != "active":
        assert row["state"] != "rejected", row
        assert time.monotonic() < deadline, row
        time.sleep(0.1)


def _reverified(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with json_output():
        assert reverify.main(folder.path, only=None, instead=None) == 0
    return orjson.loads(capsys.readouterr().out)


def _trained(folder: RunFolder) -> list[Group]:
    """All archived groups, in the order they were trained in."""
    versions = archive.versions(folder.archive)
    return [Group.decode(data) for version in versions for data in archive.read(folder.archive, folder.name, version)]
